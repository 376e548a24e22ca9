"""Where the workers of a job meet, if its launcher has not said so."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import hashlib
import importlib.util
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from . import environment, private_folders
from .environment.slurm import expand_nodes
from .environment.starter import starter
from .errors import ConfigError, StallError, TransportError
from .stores import LOOPBACK, loopback_variables, serve_store
from .topology import World

__all__ = ["Meeting", "find_meeting", "open_store"]

# Below the ports that Linux gives out by itself (from 32768), above those that Slurm's daemons have (6817 to 6819).
_FIRST_PORT, _PORTS = 10_000, 20_000

_POLL_S = 0.01

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
        The store for `init_process_group`; None where a launcher serves it at MASTER_ADDR and MASTER_PORT, which
        `init_process_group` reads itself.

    Raises:
        ConfigError: when the workers cannot meet as things are.
        StallError: when rank 0 does not come in time.
    """
    variables, limit = environment.variables(), timeout or default_pg_timeout
    meeting = find_meeting(world, variables)
    if meeting.kind == "address":
        return _meet_at_address(world, variables, limit)
    if meeting.kind == "here":
        environment.preset(loopback_variables())
        return _meet_here(meeting.job, world, limit)
    if meeting.kind == "tcp":
        return _meet_there(meeting, world, limit)
    if over_mpi is None:
        raise ConfigError(
            "environment", "MASTER_ADDR and MASTER_PORT", found="neither", hint="Set both for all workers."
        )
    return over_mpi()


def _meet_at_address(world: World, variables: Mapping[str, str], timeout: timedelta) -> Store | None:
    """As torch does for ``env://``, but for what rank 0 listens at."""
    address, port = variables["MASTER_ADDR"], variables["MASTER_PORT"]
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        return None  # torch says what is wrong with the port
    if not world.is_first:
        return TCPStore(address, int(port), timeout=timeout)
    # torch's variables may lack those of the host, and then all ranks seem to be on one
    is_certain = world.source != "torchrun" or "LOCAL_WORLD_SIZE" in variables
    is_alone = is_certain and world.local_world_size == world.world_size
    try:
        return serve_store(address, int(port), timeout, not is_alone, multi_tenant=True)
    except OSError:  # a store of this program's own may be there
        return TCPStore(address, int(port), None, True, timeout, False, multi_tenant=True)


def _meet_here(job: str, world: World, timeout: timedelta) -> Store:
    # The file only says where rank 0 listens. The last worker to have read it removes it.
    name = hashlib.sha256(job.encode()).hexdigest()[:32]
    path = _place_for(name) if world.is_first else _find(name, world.rank, timeout)
    board = FileStore(str(path), world.world_size)
    board.set_timeout(timeout)
    try:
        if world.is_first:
            store = serve_store(timeout=timeout)
            board.set("port", str(store.port))
            return store
        return TCPStore(LOOPBACK, _port_on(board, path, world.rank, timeout), timeout=timeout)
    finally:
        del board
        private_folders.leave(path.parent)


def _place_for(name: str) -> Path:
    """Where rank 0 says that it is there.

    Raises:
        TransportError: nowhere can a folder for this user alone be made.
    """
    parent = Path(tempfile.gettempdir())
    try:
        return private_folders.make_folder(parent, environment.runtime_dir()) / name
    except OSError as error:
        raise TransportError(f"no folder for this user alone can be made in {parent}: {error}. Set TMPDIR.") from error


def _find(name: str, rank: int, timeout: timedelta) -> Path:
    """Where rank 0 has said so: in one of this user's folders, but which one depends on what others have made."""
    parent, deadline = Path(tempfile.gettempdir()), time.monotonic() + timeout.total_seconds()
    while True:
        for folder in private_folders.find_folders(parent, environment.runtime_dir()):
            if (folder / name).exists():
                return folder / name
        if time.monotonic() > deadline:
            raise _late(rank, timeout)
        time.sleep(_POLL_S)


def _port_on(board: Store, path: Path, rank: int, timeout: timedelta) -> int:
    try:
        return int(board.get("port"))
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        raise _late(rank, timeout) from error


def _late(rank: int, timeout: timedelta) -> StallError:
    return StallError(f"rank {rank} has waited {timeout.total_seconds():g} s for rank 0 to say where to meet", (0,))


def _meet_there(meeting: Meeting, world: World, timeout: timedelta) -> Store:
    hint = "Set MASTER_ADDR and MASTER_PORT for all workers: the address of rank 0's machine, and a free port there."
    try:
        socket.getaddrinfo(meeting.host, meeting.port)
    except (OSError, UnicodeError) as error:  # the second: no name at all
        where = "environment variable SLURM_STEP_NODELIST"
        raise ConfigError(where, "names that can be looked up", found=f"{meeting.host}: {error}", hint=hint) from None
    try:
        if world.is_first:
            store = serve_store(meeting.host, meeting.port, timeout, several_hosts=True)
        else:
            store = TCPStore(meeting.host, meeting.port, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"rank {world.rank} cannot meet at {meeting.host}:{meeting.port}: {error}. {hint}"
        ) from error
    return PrefixStore(meeting.job, store)
