"""Ends what a run's workers have started and left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["MOMENT", "sweep"]

MOMENT = 3.0
"""Seconds between SIGTERM and SIGKILL: to remove a temporary file or close a connection, not to finish any work."""

_NOTICE_S = (
    0.2  # in which children that see the end of their worker, as a loader's processes do, have left by themselves
)
_POLL_S = 0.02
_MOST_NAMED = 8


def sweep(run_id: str, spare_children: bool, spared: Collection[int] = (), moment: float = MOMENT) -> str:
    """End every process of this user that has inherited the run's mark, in LOCKSTEP_RUN_ID, but this one.

    They get SIGTERM, and those that are still there after `moment` seconds SIGKILL.

    Args:
        run_id: the mark.
        spare_children: a launcher's own are the fork server and the resource tracker, which clear up themselves.
        spared: other processes that are not to be ended.
        moment: see above.

    Returns:
        Which were ended, as ``123 sleep, 124 python (killed)``; "" where there was nothing to end.
    """

    def left() -> dict[int, str]:
        return {pid: name for pid, name in _marked(run_id, spare_children) if pid not in spared}

    if not _wait_until_gone(left, _NOTICE_S):
        return ""
    ended: dict[int, str] = {}

    def tell_all() -> dict[int, str]:
        found = left()
        for pid in found.keys() - ended.keys():  # those too that were started meanwhile
            _send(pid, signal.SIGTERM)
        ended.update(found)
        return found

    killed = _wait_until_gone(tell_all, moment)
    for pid in killed:
        _send(pid, signal.SIGKILL)
    words = [f"{pid} {name}{' (killed)' if pid in killed else ''}" for pid, name in sorted(ended.items())]
    more = [f"{len(words) - _MOST_NAMED} more"] if len(words) > _MOST_NAMED else []
    return ", ".join([*words[:_MOST_NAMED], *more])


def _wait_until_gone(look: Callable[[], dict[int, str]], seconds: float) -> dict[int, str]:
    """Those that are still there after so many seconds; ends as soon as there are none."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def _send(pid: int, number: int) -> None:
    with suppress(OSError):  # it has ended
        os.kill(pid, number)


def _marked(run_id: str, spare_children: bool) -> Iterator[tuple[int, str]]:
    """The processes with the mark, and their names."""
    mark = f"LOCKSTEP_RUN_ID={run_id}".encode()
    for process in _processes():
        with suppress(OSError):  # ended, or another user's
            if mark in (process / "environ").read_bytes().split(b"\0") and not _is_spared(process, spare_children):
                yield int(process.name), (process / "comm").read_text().strip()


def _processes() -> Iterator[Path]:
    with suppress(OSError):  # no /proc: then only the workers' own process groups are ended
        yield from (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _is_spared(process: Path, spare_children: bool) -> bool:
    """Whether it is this process, or one that clears up."""
    parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    is_tracker = b"multiprocessing.resource_tracker" in (process / "cmdline").read_bytes()
    return is_tracker or str(os.getpid()) in (process.name, parent if spare_children else "")
