"""A note on what keeps the last rank of a host running when all the others have ended.

Work after the last collective, such as writing a model, is no error however long it takes: nothing is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from types import FrameType

from ..system.processes import read_status
from .call_sites import main_frame, stack_of

__all__ = ["LastRankWatch", "describe_activity", "watch"]

_TICK_S = 1.0
_REPEAT_FACTOR = 6.0  # a note is repeated when the time is this many times as long
_MAX_NOTES = 3
_SHOWN = 3  # threads, and frames of each


class LastRankWatch:
    """Writes a note when this rank has outlived all others of its host for a while.

    It goes on after the process groups have been destroyed, until the process ends or `stop` is called: what keeps a
    process running may be a function of `atexit`, or a thread that is not a daemon.

    Args:
        rank: this rank.
        pids: the processes of the other ranks of this host.
        others: those ranks, as text.
        warning_s: seconds after which the first note is written.
        is_silent: returns whether something else is reported, so that no note is written.
        write: shows a text to the user.
    """

    def __init__(
        self,
        rank: int,
        pids: Collection[int],
        others: str,
        warning_s: float,
        is_silent: Callable[[], bool],
        write: Callable[[str], None],
    ) -> None:
        self._rank, self._others, self._is_silent, self._write = rank, others, is_silent, write
        found = {pid: read_status(pid) for pid in pids}
        self._started = {pid: status.started for pid, status in found.items() if status is not None}
        self._alone_s, self._next_s, self._notes = 0.0, warning_s, 0
        self._last = time.monotonic()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep last rank", daemon=True)

    def start(self) -> None:
        """Start the thread that looks once a second."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(_TICK_S)

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S) and os.getpid() == self._pid and self._notes < _MAX_NOTES:
            self.tick()

    def tick(self) -> None:
        """Write a note if it is time for one."""
        now = time.monotonic()
        # a process that was stopped, or got no processor, has not observed the others meanwhile
        passed, self._last = min(now - self._last, 2 * _TICK_S), now
        if self._is_any_alive():
            return
        self._alone_s += passed
        if self._alone_s < self._next_s or self._is_silent():
            return
        self._next_s = self._alone_s * _REPEAT_FACTOR
        self._notes += 1
        self._write(
            f"note: rank {self._rank} still runs, {self._alone_s:.0f} s after {self._others} have ended:\n"
            f"  {describe_activity()}"
        )

    def _is_any_alive(self) -> bool:
        for pid in list(self._started):
            status = read_status(pid)
            if status is not None and status.state != "Z" and status.started == self._started[pid]:
                return True
            del self._started[pid]
        return False


def describe_activity() -> str:
    """Return what the program does: where its main thread is, or at the end of it, which threads keep it running."""
    main, frame = threading.main_thread(), main_frame()
    threads = [each for each in threading.enumerate() if not each.daemon and each is not main]
    if threads and _joins_threads(frame):
        frames = sys._current_frames()
        lines = [f"the thread {each.name} keeps it running{_at(frames.get(each.ident or 0))}" for each in threads]
        more = [f"and {len(lines) - _SHOWN} more threads"] * (len(lines) > _SHOWN)
        return "\n  ".join([*lines[:_SHOWN], *more])
    where = _at(frame)
    return f"its main thread is{where}" if where else "its main thread has ended"


def _joins_threads(frame: FrameType | None) -> bool:
    """Return whether the main thread waits for other threads at the end of the program."""
    while frame is not None:
        if frame.f_code.co_name == "_shutdown" and frame.f_code.co_filename == threading.__file__:
            return True
        frame = frame.f_back
    return False


def _at(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    frames = [(each.filename, each.lineno or 0, each.name) for each in reversed(traceback.extract_stack(frame))]
    stack = stack_of(frames)
    return f", at {' < '.join(stack[:_SHOWN])}" if stack else ""


_current: LastRankWatch | None = None  # that of the last default process group


def watch(made: LastRankWatch | None) -> None:
    """Start `made` in the place of the one before."""
    global _current
    before, _current = _current, made
    if before is not None:
        before.stop()
    if made is not None:
        made.start()


def _after_fork() -> None:
    global _current
    _current = None


os.register_at_fork(after_in_child=_after_fork)
