"""Bootstrap: the rendezvous of a job's workers, if their launcher does not provide a store."""

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

from . import environment
from .environment.launchers import expand_nodes, launcher_identity
from .errors import ConfigError, StallError, TransportError
from .stores import LOOPBACK, loopback_variables, serve_store
from .system import private_folders
from .topology import World

# Below the ephemeral ports of Linux (from 32768), above those of Slurm's daemons (6817 to 6819).
_FIRST_PORT = 10_000
_PORTS = 20_000

_POLL_S = 0.01

# the variables that identify a job of the launcher
_JOB_VARIABLES = {
    "slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"),
    "horovod": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the workers of one job find each other.

    Attributes:
        kind: "address": at MASTER_ADDR and MASTER_PORT; "tcp": at `host` and `port`, where rank 0
            is; "local": on this host, at a port that rank 0 publishes in a file; "mpi": over MPI.
        job: a text that all workers of this job derive, and no other job's.
        host: an address, for "tcp".
        port: a port, for "tcp".
    """

    kind: str
    job: str = ""
    host: str = ""
    port: int = 0


def find_rendezvous(world: World, variables: Mapping[str, str]) -> Rendezvous:
    """Choose the rendezvous from the environment `variables` of a worker at position `world`.

    In this order: MASTER_ADDR and MASTER_PORT; on one host, a port that rank 0 chooses; under srun,
    the first node of the step, at a port derived from the IDs of job and step; under mpiexec, MPI,
    if mpi4py is installed.

    Raises:
        ConfigError: there is no way to rendezvous, or the variables are incomplete.
    """
    names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if variables.get(name)]
    if len(names) == 2:
        return Rendezvous("address")
    launched_by_torch = world.source in ("torchrun", "lockstep")
    if names or launched_by_torch:
        got = f"{names[0]} alone" if names else "neither"
        hint = (
            "Start the workers with a launcher, or set both."
            if launched_by_torch
            else "Set both, or neither."
        )
        raise ConfigError(
            "environment",
            f"MASTER_ADDR and MASTER_PORT besides the rank ({world.source})",
            found=got,
            hint=hint,
        )
    if world.local_world_size == world.world_size:
        return Rendezvous("local", _job_key(world, variables))
    if world.source == "slurm":
        return Rendezvous(
            "tcp", _job_key(world, variables), _first_node(variables), _step_port(variables)
        )
    if world.source in ("openmpi", "mpich") and importlib.util.find_spec("mpi4py") is not None:
        return Rendezvous("mpi")
    extra = (
        " or install mpi4py (pip install 'lockstep-train[mpi]')"
        if world.source != "horovod"
        else ""
    )
    raise ConfigError(
        "environment",
        f"MASTER_ADDR and MASTER_PORT, as the workers are on several hosts ({world.source})",
        found="neither",
        hint="Set both for all workers (the address of rank 0's host, and a free port "
        f"there){extra}.",
    )


def _job_key(world: World, variables: Mapping[str, str]) -> str:
    names = _JOB_VARIABLES.get(world.source)
    if names is None:
        return f"{world.source} {launcher_identity(variables)}"
    return " ".join([world.source, *(variables.get(name, "") for name in names)])


def _first_node(variables: Mapping[str, str]) -> str:
    text = variables.get("SLURM_STEP_NODELIST", "")
    try:
        return expand_nodes(text)[0]
    except ValueError:
        hint = "srun sets it. Or set MASTER_ADDR and MASTER_PORT for all workers."
        expected = "a list of nodes such as node[01-03],gpu4"
        raise ConfigError(
            "environment variable SLURM_STEP_NODELIST", expected, text, hint
        ) from None


def _step_port(variables: Mapping[str, str]) -> int:
    """Return a port that differs between the steps of a job, and between consecutive jobs."""
    job, step = (variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if not (job.isdecimal() and step.isdecimal()):
        hint = "srun sets both. Or set MASTER_ADDR and MASTER_PORT for all workers."
        got = f"{job!r} and {step!r}"
        raise ConfigError(
            "environment variables SLURM_JOB_ID, SLURM_STEP_ID",
            "whole numbers",
            found=got,
            hint=hint,
        )
    # 97 steps of one job precede the first of the next; the prime shares no factor with the number
    # of ports
    return _FIRST_PORT + (int(job) * 97 + int(step)) % _PORTS


def open_store(
    world: World, timeout: timedelta | None = None, over_mpi: Callable[[], Store] | None = None
) -> Store | None:
    """Open the store that all workers of the job share; every worker must call this.

    Args:
        world: this worker's position.
        timeout: for the other workers; PyTorch's default for process groups if None.
        over_mpi: creates a store over MPI, for workers on several hosts that mpiexec started.

    Returns:
        The store for `init_process_group`; None if a launcher serves it at MASTER_ADDR and
        MASTER_PORT, which `init_process_group` reads itself.

    Raises:
        ConfigError: there is no way to rendezvous with these variables.
        StallError: rank 0 does not arrive in time.
    """
    variables = environment.variables()
    limit = timeout or default_pg_timeout
    rendezvous = find_rendezvous(world, variables)
    if rendezvous.kind == "address":
        return _store_at_address(world, variables, limit)
    if rendezvous.kind == "local":
        environment.set_defaults(loopback_variables())
        return _local_store(rendezvous.job, world, limit)
    if rendezvous.kind == "tcp":
        return _tcp_store(rendezvous, world, limit)
    if over_mpi is None:
        raise ConfigError(
            "environment",
            "MASTER_ADDR and MASTER_PORT",
            found="neither",
            hint="Set both for all workers.",
        )
    return over_mpi()


def _store_at_address(
    world: World, variables: Mapping[str, str], timeout: timedelta
) -> Store | None:
    """Open a store as torch's ``env://`` does, except that rank 0 listens only at MASTER_ADDR."""
    address = variables["MASTER_ADDR"]
    port = variables["MASTER_PORT"]
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) or not (
        port.isdecimal() and 0 < int(port) < 1 << 16
    ):
        return None  # torch reports what is wrong with the port
    if not world.is_first:
        return TCPStore(address, int(port), timeout=timeout)
    # torchrun's variables may lack the local ones, and then all ranks seem to be on one host
    is_certain = world.source != "torchrun" or "LOCAL_WORLD_SIZE" in variables
    is_alone = is_certain and world.local_world_size == world.world_size
    try:
        return serve_store(address, int(port), timeout, not is_alone, multi_tenant=True)
    except OSError:  # this program may already have a store there
        return TCPStore(address, int(port), None, True, timeout, False, multi_tenant=True)


def _local_store(job: str, world: World, timeout: timedelta) -> Store:
    # The file only holds the port of rank 0. The last worker to read it removes it.
    name = hashlib.sha256(job.encode()).hexdigest()[:32]
    path = (
        _new_port_file(name) if world.is_first else _wait_for_port_file(name, world.rank, timeout)
    )
    port_store = FileStore(str(path), world.world_size)
    port_store.set_timeout(timeout)
    try:
        if world.is_first:
            store = serve_store(timeout=timeout)
            port_store.set("port", str(store.port))
            return store
        return TCPStore(
            LOOPBACK, _read_port(port_store, path, world.rank, timeout), timeout=timeout
        )
    finally:
        del port_store
        private_folders.remove_if_random(path.parent)


def _new_port_file(name: str) -> Path:
    """Return the path of the file in which rank 0 publishes its port.

    Raises:
        TransportError: no private folder can be created.
    """
    parent = Path(tempfile.gettempdir())
    try:
        return private_folders.make_folder(parent, environment.runtime_dir()) / name
    except OSError as error:
        raise TransportError(
            f"no private folder can be created in {parent}: {error}. Set TMPDIR."
        ) from error


def _wait_for_port_file(name: str, rank: int, timeout: timedelta) -> Path:
    """Wait for the file with rank 0's port, in any of this user's private folders: rank 0 chooses
    one of them.
    """
    parent = Path(tempfile.gettempdir())
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        for folder in private_folders.find_folders(parent, environment.runtime_dir()):
            if (folder / name).exists():
                return folder / name
        if time.monotonic() > deadline:
            raise _timeout_error(rank, timeout)
        time.sleep(_POLL_S)


def _read_port(port_store: Store, path: Path, rank: int, timeout: timedelta) -> int:
    try:
        return int(port_store.get("port"))
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        raise _timeout_error(rank, timeout) from error


def _timeout_error(rank: int, timeout: timedelta) -> StallError:
    return StallError(
        f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to publish its port", (0,)
    )


def _tcp_store(rendezvous: Rendezvous, world: World, timeout: timedelta) -> Store:
    hint = (
        "Set MASTER_ADDR and MASTER_PORT for all workers: the address of rank 0's host, and a "
        "free port there."
    )
    try:
        socket.getaddrinfo(rendezvous.host, rendezvous.port)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is invalid
        where = "environment variable SLURM_STEP_NODELIST"
        raise ConfigError(
            where, "names that can be resolved", found=f"{rendezvous.host}: {error}", hint=hint
        ) from None
    try:
        if world.is_first:
            store = serve_store(rendezvous.host, rendezvous.port, timeout, several_hosts=True)
        else:
            store = TCPStore(rendezvous.host, rendezvous.port, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"rank {world.rank} cannot rendezvous at {rendezvous.host}:{rendezvous.port}: "
            f"{error}. {hint}"
        ) from error
    return PrefixStore(rendezvous.job, store)
