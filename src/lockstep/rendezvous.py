"""Where the workers of a job meet, if its launcher has not said so."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from . import environment
from .environment.slurm import expand_nodes
from .environment.starter import starter
from .errors import ConfigError, StallError, TransportError
from .topology import World

__all__ = ["Meeting", "find_meeting", "open_store"]

_LOOPBACK = "127.0.0.1"

# Below the ports that Linux gives out by itself (from 32768), above those that Slurm's daemons have (6817 to 6819).
_FIRST_PORT, _PORTS = 10_000, 20_000


# the variables that tell a launcher's jobs apart
_JOB = {
    "slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"),
    "horovod": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
}


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the workers of one job find each other.

    Attributes:
        kind: "address": at MASTER_ADDR and MASTER_PORT; "tcp": at `host` and `port`, where rank 0 is; "here": on this
            machine, at a port that rank 0 tells the others; "mpi": MPI tells them.
        job: a text that all workers of this job make out, and those of no other.
        host: an address, for "tcp".
        port: a port, for "tcp".
    """

    kind: str
    job: str = ""
    host: str = ""
    port: int = 0


def find_meeting(world: World, variables: Mapping[str, str]) -> Meeting:
    """Choose how the workers meet, from the `variables` of one of them, at `world`.

    In this order: MASTER_ADDR and MASTER_PORT; on one machine, a port that rank 0 picks; under srun, the first node of
    the step, at a port made of the numbers of job and step; under mpiexec, MPI, if mpi4py is installed.

    Raises:
        ConfigError: when there is no way, or the variables are incomplete.
    """
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if variables.get(name)]
    if len(given) == 2:
        return Meeting("address")
    launched_by_torch = world.source in ("torchrun", "lockstep")
    if given or launched_by_torch:
        got = f"{given[0]} alone" if given else "neither"
        hint = "Start the workers with a launcher, or set both." if launched_by_torch else "Set both, or neither."
        raise ConfigError(
            "environment", f"MASTER_ADDR and MASTER_PORT beside the rank ({world.source})", found=got, hint=hint
        )
    if world.local_world_size == world.world_size:
        return Meeting("here", _job(world, variables))
    if world.source == "slurm":
        return Meeting("tcp", _job(world, variables), _first_node(variables), _port(variables))
    if world.source in ("openmpi", "mpich") and importlib.util.find_spec("mpi4py") is not None:
        return Meeting("mpi")
    extra = " or install mpi4py (pip install 'lockstep-train[mpi]')" if world.source != "horovod" else ""
    raise ConfigError(
        "environment",
        f"MASTER_ADDR and MASTER_PORT, as the workers are on several machines ({world.source})",
        found="neither",
        hint=f"Set both for all workers (the address of rank 0's machine, and a free port there){extra}.",
    )


def _job(world: World, variables: Mapping[str, str]) -> str:
    names = _JOB.get(world.source)
    if names is None:
        return f"{world.source} {starter(variables)}"
    return " ".join([world.source, *(variables.get(name, "") for name in names)])


def _first_node(variables: Mapping[str, str]) -> str:
    text = variables.get("SLURM_STEP_NODELIST", "")
    try:
        return expand_nodes(text)[0]
    except ValueError:
        hint = "srun sets it. Or set MASTER_ADDR and MASTER_PORT for all workers."
        expected = "a list of nodes such as node[01-03],gpu4"
        raise ConfigError("environment variable SLURM_STEP_NODELIST", expected, text, hint) from None


def _port(variables: Mapping[str, str]) -> int:
    """A port that differs between the steps of a job, and between jobs that follow each other."""
    job, step = (variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if not (job.isdecimal() and step.isdecimal()):
        hint = "srun sets both. Or set MASTER_ADDR and MASTER_PORT for all workers."
        got = f"{job!r} and {step!r}"
        raise ConfigError("environment variables SLURM_JOB_ID, SLURM_STEP_ID", "whole numbers", found=got, hint=hint)
    # 97 steps of one job come before the next job's first; the prime shares no factor with the number of ports
    return _FIRST_PORT + (int(job) * 97 + int(step)) % _PORTS


def open_store(
    world: World, timeout: timedelta | None = None, over_mpi: Callable[[], Store] | None = None
) -> Store | None:
    """The store in which all workers of the job meet; every one must call it.

    Args:
        world: this worker's place.
        timeout: how long to wait for the others; PyTorch's default for process groups when None.
        over_mpi: makes a store with the help of MPI, for workers on several machines that mpiexec has started.

    Returns:
        The store for `init_process_group`; None where MASTER_ADDR and MASTER_PORT are set, which it reads itself.

    Raises:
        ConfigError: when the workers cannot meet as things are.
        StallError: when rank 0 does not come in time.
    """
    variables, limit = environment.variables(), timeout or default_pg_timeout
    meeting = find_meeting(world, variables)
    if meeting.kind == "address":
        return None
    if meeting.kind == "here":
        return _meet_here(meeting.job, world, limit)
    if meeting.kind == "tcp":
        return _meet_there(meeting, world, limit)
    if over_mpi is None:
        raise ConfigError(
            "environment", "MASTER_ADDR and MASTER_PORT", found="neither", hint="Set both for all workers."
        )
    return over_mpi()


def _meet_here(job: str, world: World, timeout: timedelta) -> Store:
    # The file only says where rank 0 listens. The last worker to have read it removes it.
    path = _private_folder() / hashlib.sha256(job.encode()).hexdigest()[:32]
    board = FileStore(str(path), world.world_size)
    board.set_timeout(timeout)
    if world.is_first:
        store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        board.set("port", str(store.port))
        return store
    try:
        port = int(board.get("port"))
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        seconds = f"{timeout.total_seconds():g} s"
        raise StallError(f"rank {world.rank} has waited {seconds} for rank 0 to say where to meet", (0,)) from error
    return TCPStore(_LOOPBACK, port, timeout=timeout)


def _private_folder() -> Path:
    """A folder for files that only this user's processes may write.

    Raises:
        TransportError: when there is another file in its place.
    """
    path = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TransportError(f"{path} belongs to others or can be entered by them. Remove it, or set TMPDIR.")
    return path


def _meet_there(meeting: Meeting, world: World, timeout: timedelta) -> Store:
    hint = "Set MASTER_ADDR and MASTER_PORT for all workers: the address of rank 0's machine, and a free port there."
    try:
        socket.getaddrinfo(meeting.host, meeting.port)
    except (OSError, UnicodeError) as error:  # the second: no name at all
        where = "environment variable SLURM_STEP_NODELIST"
        raise ConfigError(where, "names that can be looked up", found=f"{meeting.host}: {error}", hint=hint) from None
    try:
        store = TCPStore(meeting.host, meeting.port, None, world.is_first, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(
            f"rank {world.rank} cannot meet at {meeting.host}:{meeting.port}: {error}. {hint}"
        ) from error
    return PrefixStore(meeting.job, store)
