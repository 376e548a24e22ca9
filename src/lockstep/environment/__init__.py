"""The only reader of this process's environment: which worker it is, and what the machine lets it use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from ..topology import World
from .cores import usable_cores
from .cublas import cublas_workspace, set_cublas_workspace
from .horovod import hand_down, horovod_marks_cycles, horovod_timeline, set_horovod_variables, with_variables
from .launchers import find_launcher, read_world
from .watching import heartbeat_timeout, stall_timeout, stall_warning, timeline_dir, watch_dir, watch_mode
from .workers import (
    ask_for_time,
    attempt,
    debug_rank,
    preset,
    put,
    run_id,
    threads,
    variables_for_workers,
    wants_colours,
)

__all__ = [
    "ask_for_time",
    "attempt",
    "cublas_workspace",
    "debug_rank",
    "debugging",
    "find_world",
    "hand_down",
    "heartbeat_timeout",
    "horovod_marks_cycles",
    "horovod_timeline",
    "is_launched",
    "preset",
    "put",
    "run_id",
    "runtime_dir",
    "set_cublas_workspace",
    "set_horovod_variables",
    "shm_size",
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
    "watch_dir",
    "watch_mode",
    "with_variables",
]


def find_world(variables: Mapping[str, str] | None = None) -> World:
    """This process's place in the job, read from the environment.

    Looked for in this order: the variables of Lockstep's own launcher and of torchrun (RANK, WORLD_SIZE, …), of
    Horovod (HOROVOD_RANK, …), of Open MPI (OMPI_COMM_WORLD_RANK, …), of MPICH and Intel MPI (PMI_RANK,
    MPI_LOCALRANKID, …), and of a step of several tasks under Slurm's srun (SLURM_STEP_NUM_TASKS, SLURM_PROCID, …).
    Without any of them the process is alone. What starts processes inside a job of the others comes first.

    Args:
        variables: read instead of the process's own environment.

    Raises:
        ConfigError: when a variable is missing beside the others, or is no whole number, or does not fit.
    """
    env = os.environ if variables is None else variables
    launcher = find_launcher(env)
    return World() if launcher is None else read_world(env, launcher)


def variables() -> dict[str, str]:
    """A copy of this process's environment, to hand on to a child."""
    return dict(os.environ)


def runtime_dir() -> Path | None:
    """The folder that the system has made for this user's running programs; None where there is none."""
    usual = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    return usual if usual.is_absolute() and usual.is_dir() else None


def is_launched() -> bool:
    """Whether a launcher has made this process one of a job's workers."""
    return find_launcher(os.environ) is not None


def under_launcher() -> bool:
    """Whether Lockstep's own launcher started this process and watches over it."""
    return "LOCKSTEP_LAUNCHED" in os.environ


def shm_size() -> int:
    """The most bytes of shared memory for a group, from LOCKSTEP_SHM_SIZE ("256M", "1G", bytes); 0 if unset.

    Raises:
        ConfigError: for another text.
    """
    text = os.environ.get("LOCKSTEP_SHM_SIZE", "").strip()
    found = re.fullmatch(r"(\d+)\s*([kmg]?)(i?b)?", text, re.IGNORECASE)
    if not text:
        return 0
    if found is None:
        raise ConfigError("LOCKSTEP_SHM_SIZE", "a size such as 64M, 1G or a number of bytes", text)
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()]


def transport() -> str:
    """The transport that LOCKSTEP_TRANSPORT asks for; "auto" if unset."""
    return os.environ.get("LOCKSTEP_TRANSPORT", "").strip() or "auto"


def visible_gpus() -> int | None:
    """How many GPUs this process has been told to see by CUDA_VISIBLE_DEVICES or its like; None where nothing says."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    given = [os.environ[name] for name in names if name in os.environ]
    return min(len([part for part in text.split(",") if part.strip()]) for text in given) if given else None


def debugging() -> bool:
    """Whether LOCKSTEP_DEBUG asks for whole tracebacks."""
    return os.environ.get("LOCKSTEP_DEBUG", "0") not in ("", "0")
