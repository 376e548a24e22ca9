"""The process environment: this worker's position in its job, settings in variables, and usable CPU
cores.

No other module reads or writes `os.environ`. Which variables there are, and what each means, is in
`variable_table`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .. import arguments
from ..errors import ConfigError
from ..topology import World
from .launchers import find_launcher, read_world
from .variable_table import (
    DEBUG,
    DEBUG_RANK,
    DISPLAY,
    EARLIER_RUN_DIR,
    ELASTIC,
    HEARTBEAT_TIMEOUT,
    JOB_KEY,
    LAUNCHED,
    LAUNCHER_TIMEOUT,
    NETWORK,
    NETWORK_DIR,
    PAUSE_TIMEOUT,
    PROGRESS,
    REPLAY,
    RESUME,
    RUN_ID,
    SHM_SIZE,
    STALL_TIMEOUT,
    STALL_WARNING,
    TIMELINE,
    TRANSPORT,
    WATCHDOG,
    WATCHDOG_DIR,
    Variable,
)

__all__ = [
    "ElasticWorker",
    "attempt_variables",
    "cublas_workspace",
    "debug_rank",
    "debugging",
    "display",
    "earlier_run_dir",
    "elastic_variable",
    "elastic_worker",
    "emulated_network",
    "emulation_variables",
    "find_world",
    "gives_nodes_ranks",
    "heartbeat_timeout",
    "horovod_marks_cycles",
    "horovod_timeline",
    "is_launched",
    "job_key",
    "launcher_timeout",
    "pause_timeout",
    "position_variables",
    "records_dir",
    "replay_request",
    "replay_variables",
    "restart_count",
    "run_id",
    "runtime_dir",
    "set_cublas_workspace",
    "set_defaults",
    "set_horovod_variables",
    "set_variables",
    "shm_size",
    "shows_progress",
    "stall_timeout",
    "stall_warning",
    "threads",
    "timeline_dir",
    "transport",
    "under_launcher",
    "usable_cores",
    "variables",
    "variables_for_workers",
    "visible_gpus",
    "wants_colours",
    "watchdog_mode",
    "with_variables",
    "world_variables",
]


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, by its affinity mask and the
    container's quota.
    """
    if sys.platform == "linux":
        return max(1, min(len(os.sched_getaffinity(0)), _cgroup_quota()))
    return os.cpu_count() or 1


def _cgroup_quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max 100000")
        return sys.maxsize


_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def cublas_workspace() -> str | None:
    """Return the value of CUBLAS_WORKSPACE_CONFIG, or None."""
    return os.environ.get(_CUBLAS_WORKSPACE)


def set_cublas_workspace(value: str | None) -> None:
    """Set CUBLAS_WORKSPACE_CONFIG; None unsets it. cuBLAS reads it on creating a handle, torch at
    each operation.
    """
    if value is None:
        os.environ.pop(_CUBLAS_WORKSPACE, None)
    elif os.environ.get(_CUBLAS_WORKSPACE) != value:
        os.environ[_CUBLAS_WORKSPACE] = value


_MODES = {"on": "on", "1": "on", "": "on", "strict": "strict", "off": "off", "0": "off"}


def _read(variable: Variable) -> str:
    """Return the text of `variable`; "" if it is unset."""
    return os.environ.get(variable.name, "").strip()


def _read_path(variable: Variable) -> Path | None:
    text = os.environ.get(variable.name, "")  # a folder's name may end in a space
    return Path(text) if text else None


def _read_seconds(variable: Variable) -> float:
    """Return the number of seconds in `variable`, or its default."""
    text = _read(variable) or variable.default
    return arguments.parse_number(variable.name, text, above=0, expected=variable.values)


def watchdog_mode() -> str:
    """Return "on", "strict" or "off", from LOCKSTEP_WATCHDOG.

    Raises:
        ConfigError: for any other value.
    """
    text = _read(WATCHDOG).lower()
    if text not in _MODES:
        raise ConfigError(WATCHDOG.name, WATCHDOG.values, text)
    return _MODES[text]


def heartbeat_timeout() -> float:
    """Return LOCKSTEP_HEARTBEAT_TIMEOUT: the seconds within which another host must answer."""
    return _read_seconds(HEARTBEAT_TIMEOUT)


def launcher_timeout() -> float | None:
    """Return LOCKSTEP_LAUNCHER_TIMEOUT: the seconds after which a launcher that does not answer is
    out; or None.
    """
    return _read_seconds(LAUNCHER_TIMEOUT) if _read(LAUNCHER_TIMEOUT) else None


def pause_timeout() -> float | None:
    """Return LOCKSTEP_PAUSE_TIMEOUT: the seconds for which an elastic job waits for workers and
    hosts; or None.

    Infinity is a number of seconds as well.
    """
    return _read_seconds(PAUSE_TIMEOUT) if _read(PAUSE_TIMEOUT) else None


def stall_timeout() -> float:
    """Return LOCKSTEP_STALL_TIMEOUT: the seconds of waiting for a rank that are an error."""
    return _read_seconds(STALL_TIMEOUT)


def stall_warning() -> float:
    """Return LOCKSTEP_STALL_WARNING: the seconds of waiting for a rank before a warning."""
    return _read_seconds(STALL_WARNING)


def records_dir() -> Path | None:
    """Return the folder for this job's flight records on this host, from the launcher."""
    return _read_path(WATCHDOG_DIR)


def timeline_dir() -> Path | None:
    """Return the folder for permanent records of all collectives, from LOCKSTEP_TIMELINE."""
    return _read_path(TIMELINE)


def restart_count() -> int:
    """Return how often this job's workers have been restarted after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def position_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return the variables that give a worker of an elastic job its position at its start, as
    torchrun's do.

    Its host counts as the only one until it is in a group. `local_rank`, which no other worker of
    its host has, chooses its GPU; so there are at least `local_rank` + 1 of the `local_size`
    workers on its host.
    """
    local_size = max(local_size, local_rank + 1)
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
    }
    return {
        name: str(value)
        for name, value in {**names, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}.items()
    }


def world_variables(world: World, address: str, port: int) -> dict[str, str]:
    """Return the variables of torchrun for a worker.

    Args:
        world: its position in the job.
        address, port: of the store, which no rank serves.
    """
    names: dict[str, object] = {"RANK": world.rank, "WORLD_SIZE": world.world_size}
    names |= {"LOCAL_RANK": world.local_rank, "LOCAL_WORLD_SIZE": world.local_world_size}
    names |= {
        "GROUP_RANK": world.node,
        "GROUP_WORLD_SIZE": world.nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    names |= {"ROLE_NAME": "worker", "ROLE_RANK": world.rank, "ROLE_WORLD_SIZE": world.world_size}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in names.items()}


def attempt_variables(attempt: int, restarts: int, run_id: str) -> dict[str, str]:
    """Return the variables of torchrun that say which attempt the workers of a job are.

    Args:
        attempt: how often all workers have been started before.
        restarts: how often they may be started again.
        run_id: the name of the job.
    """
    names = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
    names |= {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_ERROR_FILE": ""}
    return {
        **names,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


class ElasticWorker(NamedTuple):
    """This process as a worker of an elastic job.

    Attributes:
        number: of the worker, which no other worker of the job has had.
        socket: the path of the coordinator's socket.
        joins: whether the job was running already when it was started.
    """

    number: int
    socket: str
    joins: bool


def elastic_worker() -> ElasticWorker | None:
    """Return what LOCKSTEP_ELASTIC says of this worker, as "NUMBER:first:SOCKET"; None if the job
    is not elastic.
    """
    number, _, rest = os.environ.get(ELASTIC.name, "").partition(":")
    how, _, path = rest.partition(":")
    return ElasticWorker(int(number), path, how == "joins") if path else None


def earlier_run_dir() -> Path | None:
    """Return LOCKSTEP_EARLIER_RUN_DIR: where this job has begun to train before all its workers
    were started again.
    """
    return _read_path(EARLIER_RUN_DIR)


def emulated_network() -> tuple[str, Path] | None:
    """Return the emulated network of this job, LOCKSTEP_NETWORK, and the folder of its link clocks;
    None without.
    """
    network = _read(NETWORK)
    folder = _read_path(NETWORK_DIR)
    return (network, folder) if network and folder else None


def emulation_variables(network: str, folder: Path) -> dict[str, str]:
    """Return the variables that `emulated_network` reads."""
    return {NETWORK.name: network, NETWORK_DIR.name: str(folder)}


def job_key() -> str:
    """Return LOCKSTEP_JOB_KEY, the secret that all launchers of an elastic job on several hosts
    know; "" if unset.
    """
    return os.environ.get(JOB_KEY.name, "")


def elastic_variable(worker: ElasticWorker) -> dict[str, str]:
    """Return the variable that `elastic_worker` reads."""
    beginning = "joins" if worker.joins else "first"
    return {ELASTIC.name: f"{worker.number}:{beginning}:{worker.socket}"}


def debug_rank() -> int | None:
    """Return the rank that runs in a debugger on the terminal, or None; others wait for it without
    a time limit.
    """
    text = _read(DEBUG_RANK)
    return arguments.parse_whole(DEBUG_RANK.name, text, least=0) if text else None


def threads() -> int:
    """Return the number of threads in OMP_NUM_THREADS; 0 if unset."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() else 0


def run_id() -> str:
    """Return LOCKSTEP_RUN_ID, which all processes of a run have in common; "" if unset."""
    return os.environ.get(RUN_ID.name, "")


def variables_for_workers(run_id: str, threads: int, debug_rank: int | None) -> dict[str, str]:
    """Return the environment variables of each worker of a run besides those of torchrun.

    Args:
        run_id: identifies the run's processes, and those that they start.
        threads: intra-op threads of one worker.
        debug_rank: the rank that runs in a debugger on the terminal.
    """
    variables = {LAUNCHED.name: "1", RUN_ID.name: run_id}
    if debug_rank is not None:
        variables[DEBUG_RANK.name] = str(debug_rank)
    return {**variables, "OMP_NUM_THREADS": str(threads)}


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set the unset ones of `variables`, for this process and its children."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set `variables` for this process and its children."""
    os.environ.update(variables)


def wants_colours() -> bool:
    """Return whether output to a terminal may have colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def set_horovod_variables(world: World, host: str, folder: str) -> None:
    """Set the variables of Horovod's launcher for this process and its children.

    Args:
        world: this process's position in the job.
        host: the name of its host.
        folder: prepended to PYTHONPATH.
    """
    numbers = {
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.world_size,
        "HOROVOD_LOCAL_RANK": world.local_rank,
        "HOROVOD_LOCAL_SIZE": world.local_world_size,
        "HOROVOD_CROSS_RANK": world.node,
        "HOROVOD_CROSS_SIZE": world.nodes,
    }
    os.environ.update({name: str(value) for name, value in numbers.items()}, HOROVOD_HOSTNAME=host)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])


def horovod_timeline() -> str:
    """Return HOROVOD_TIMELINE: a file, DYNAMIC for a file that is named later, or "" for none."""
    return os.environ.get("HOROVOD_TIMELINE", "").strip()


def horovod_marks_cycles() -> bool:
    """Return whether HOROVOD_TIMELINE_MARK_CYCLES enables marks of negotiation cycles in the
    timeline.
    """
    return os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0").strip() not in ("", "0")


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` during the block."""
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def find_world(variables: Mapping[str, str] | None = None) -> World:
    """Read this process's position in the job from the environment.

    Launchers in order of precedence: Lockstep's own launcher and torchrun (RANK, WORLD_SIZE, …),
    Horovod (HOROVOD_RANK, …), Open MPI (OMPI_COMM_WORLD_RANK, …), MPICH and Intel MPI (PMI_RANK,
    MPI_LOCALRANKID, …), and a step of several tasks under Slurm's srun (SLURM_STEP_NUM_TASKS,
    SLURM_PROCID, …). Without any of them the process is the only worker. A launcher that starts
    processes inside a job of another one has precedence.

    Args:
        variables: read instead of the process's environment.

    Raises:
        ConfigError: a variable is missing while others are set, is not an integer, or contradicts
            another.
    """
    env = os.environ if variables is None else variables
    launcher = find_launcher(env)
    return World() if launcher is None else read_world(env, launcher)


def sets_allocator() -> bool:
    """Return whether the user has settings of the C library's allocator: MALLOC_* or
    GLIBC_TUNABLES.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)


def variables() -> dict[str, str]:
    """Return a copy of this process's environment, for a child process."""
    return dict(os.environ)


def runtime_dir() -> Path | None:
    """Return this user's runtime directory (XDG_RUNTIME_DIR); None if there is none."""
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    return path if path.is_absolute() and path.is_dir() else None


def is_launched() -> bool:
    """Return whether a launcher started this process as one of a job's workers."""
    return find_launcher(os.environ) is not None


def gives_nodes_ranks() -> bool:
    """Return whether RANK and WORLD_SIZE number nodes: PyTorchJob, of Kubeflow's Training Operator,
    sets them for pods.

    They are not those of a worker: its launcher would also have set LOCAL_RANK.
    """
    return "PET_NODE_RANK" in os.environ and "LOCAL_RANK" not in os.environ


def under_launcher() -> bool:
    """Return whether Lockstep's own launcher started and supervises this process."""
    return LAUNCHED.name in os.environ


def shm_size() -> int:
    """Return the maximum size of a group's shared memory in bytes, from LOCKSTEP_SHM_SIZE ("256M",
    "1G"); 0 if unset.

    Raises:
        ConfigError: the text is not a size.
    """
    text = _read(SHM_SIZE)
    if not text:
        return 0
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(i?b)?", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(SHM_SIZE.name, SHM_SIZE.values, text)
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def resume() -> str | None:
    """Return LOCKSTEP_RESUME: the run directory that a trainer resumes, or "latest"; None if
    unset.
    """
    return _read(RESUME) or None


def replay_request() -> Path | None:
    """Return LOCKSTEP_REPLAY: the file that says which step of which run is to be replayed; None if
    unset.
    """
    return _read_path(REPLAY)


def replay_variables(path: Path) -> dict[str, str]:
    """Return the variable that `replay_request` reads."""
    return {REPLAY.name: str(path)}


def transport() -> str:
    """Return LOCKSTEP_TRANSPORT: the transport for tensors on the CPU."""
    return _read(TRANSPORT) or TRANSPORT.default


def visible_gpus() -> int | None:
    """Return the number of devices in CUDA_VISIBLE_DEVICES or its equivalents; None if all are
    unset.
    """
    names = (
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),  # of Intel's GPUs and Huawei's NPUs
    )
    lists = [os.environ[name].split(",") for name in names if name in os.environ]
    return min((sum(bool(gpu.strip()) for gpu in gpus) for gpus in lists), default=None)


def display() -> str:
    """Return where the launcher shows this worker's output, from LOCKSTEP_DISPLAY.

    "notebook", or the columns of a terminal, such as "120"; "" if it is neither, or there is no
    launcher.
    """
    text = _read(DISPLAY)
    return text if text == "notebook" or text.isdecimal() else ""


def shows_progress() -> bool:
    """Return whether commands show what they are doing while they start; LOCKSTEP_PROGRESS=off
    turns it off.
    """
    return _read(PROGRESS).lower() not in ("off", "0")


def debugging() -> bool:
    """Return whether LOCKSTEP_DEBUG enables full tracebacks."""
    return _read(DEBUG) not in ("", "0")
