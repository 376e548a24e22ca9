"""The only reader of this process's environment: which worker it is, and what the machine lets it use."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from .errors import ConfigError
from .topology import World

__all__ = [
    "debugging",
    "find_world",
    "is_launched",
    "rendezvous_is_set",
    "shm_size",
    "under_launcher",
    "usable_cores",
    "variables",
]


def find_world(variables: Mapping[str, str] | None = None) -> World:
    """This process's place in the job, read from the environment.

    Looked for in this order: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
    GROUP_WORLD_SIZE), which Lockstep's own launcher sets as well; without them the process is alone.

    Args:
        variables: read instead of the process's own environment.

    Raises:
        ConfigError: when a variable is missing beside the others, or is no whole number, or does not fit.
    """
    env = os.environ if variables is None else variables
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return World()
    source = "lockstep" if "LOCKSTEP_LAUNCHED" in env else "torchrun"
    rank, world_size = _whole(env, "RANK", source), _whole(env, "WORLD_SIZE", source)
    local_world_size = _whole(env, "LOCAL_WORLD_SIZE", source, default=world_size)
    local_rank = _whole(env, "LOCAL_RANK", source, default=rank % max(local_world_size, 1))
    node = _whole(env, "GROUP_RANK", source, default=rank // max(local_world_size, 1))
    nodes = _whole(env, "GROUP_WORLD_SIZE", source, default=max(node + 1, world_size // max(local_world_size, 1)))
    try:
        return World(rank, world_size, local_rank, local_world_size, node, nodes, source)
    except ValueError as error:
        raise ConfigError("environment", "variables that fit together", str(error)) from None


def _whole(env: Mapping[str, str], name: str, source: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    hint = f"Start workers with {source}, or unset RANK and WORLD_SIZE to run alone."
    if text is None:
        raise ConfigError(f"environment variable {name}", "a whole number", "nothing: it is not set", hint)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}", "a whole number", repr(text), hint) from None


def variables() -> dict[str, str]:
    """A copy of this process's environment, to hand on to a child."""
    return dict(os.environ)


def is_launched() -> bool:
    """Whether a launcher has made this process one of a job's workers."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def under_launcher() -> bool:
    """Whether Lockstep's own launcher started this process and watches over it."""
    return "LOCKSTEP_LAUNCHED" in os.environ


def rendezvous_is_set() -> bool:
    """Whether the address where the workers meet (MASTER_ADDR, MASTER_PORT) is given."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


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


def debugging() -> bool:
    """Whether LOCKSTEP_DEBUG asks for whole tracebacks."""
    return os.environ.get("LOCKSTEP_DEBUG", "0") not in ("", "0")


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity mask, cut down to the container's quota (cgroup v2)."""
    if sys.platform == "linux":
        return max(1, min(len(os.sched_getaffinity(0)), _cgroup_quota()))
    return os.cpu_count() or 1


def _cgroup_quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max 100000")
        return sys.maxsize
