"""The CPU cores that this process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["usable_cores"]


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
