"""Ends what a run's workers have started and left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["sweep"]


def sweep(run_id: str, spare_children: bool) -> None:
    """Kill every process of this user that has inherited the run's mark, in LOCKSTEP_RUN_ID, but this one.

    Args:
        run_id: the mark.
        spare_children: a launcher's own are the fork server and the resource tracker, which clear up themselves.
    """
    mark = f"LOCKSTEP_RUN_ID={run_id}".encode()
    for process in _processes():
        with suppress(OSError):  # ended, or another user's
            if mark in (process / "environ").read_bytes().split(b"\0") and not _is_spared(process, spare_children):
                os.kill(int(process.name), signal.SIGKILL)


def _processes() -> Iterator[Path]:
    with suppress(OSError):  # no /proc: then only the workers' own process groups are ended
        yield from (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _is_spared(process: Path, spare_children: bool) -> bool:
    """Whether it is this process, or one that clears up."""
    parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    is_tracker = b"multiprocessing.resource_tracker" in (process / "cmdline").read_bytes()
    return is_tracker or str(os.getpid()) in (process.name, parent if spare_children else "")
