"""A note on what keeps the last rank of a host running when all the others have ended.

Work after the last collective, such as writing a model, is no error however long it takes: nothing
is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ..flight_recorder import RecorderReader
from ..flight_recorder.layout import PHASES, StateWords, rank_file
from ..system.processes import ProcessStatus, read_status
from .call_sites import main_frame, stack_of

_TICK_S = 1.0
_REPEAT_FACTOR = 6.0  # a note is repeated when the time is this many times as long
_MAX_NOTES = 3
_SHOWN = 3  # threads, and frames of each
_WORDS = StateWords()
# where the main thread waits for the others at the end of a program: in the interpreter, and in a
# worker of a launcher
_ENDS = (
    (threading.__file__, "_shutdown"),
    (str(Path(__file__).parents[1] / "launcher" / "worker_process" / "script.py"), "_finish"),
)


class LastRankWatch:
    """Writes a note when this rank has outlived all others of its host for a while.

    It goes on after the process groups have been destroyed, until the process ends or `stop` is
    called: what keeps a process running may be a function of `atexit`, or a thread that is not a
    daemon.

    Args:
        folder: of the job.
        rank: this rank.
        peers: the other ranks of this host.
        others: those ranks, as text.
        warning_s: seconds after which the first note is written.
        is_silent: returns whether something else is reported, so that no note is written.
        write: shows a text to the user.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        peers: Collection[int],
        others: str,
        warning_s: float,
        is_silent: Callable[[], bool],
        write: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._others = others
        self._is_silent = is_silent
        self._write = write
        self._folder = folder
        self._peers: list[tuple[RecorderReader, ProcessStatus]] = []  # those that may still run
        for peer in peers:
            with suppress(OSError, ValueError):  # it has removed its flight recorder
                # a reader of its own, as that of the session is closed with it
                reader = RecorderReader(rank_file(folder, peer))
                status = read_status(reader.pid)
                if status is None:
                    reader.close()
                else:
                    self._peers.append((reader, status))
        self._alone_s = 0.0
        self._next_s = warning_s
        self._notes = 0
        self._last = time.monotonic()
        self._is_over = False
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
        for reader, _ in self._peers:
            reader.close()
        self._peers = []

    def note_end(self) -> None:
        """Record that this rank's program has ended, which its session does not where the groups
        are destroyed.
        """
        self._is_over = True
        with (
            suppress(OSError),
            rank_file(self._folder, self._rank).open("r+b", buffering=0) as file,
        ):
            file.seek(8 * _WORDS.phase)
            file.write(PHASES.index("ended").to_bytes(8, sys.byteorder))

    def _run(self) -> None:
        while (
            not self._stop.wait(_TICK_S) and os.getpid() == self._pid and self._notes < _MAX_NOTES
        ):
            self.tick()

    def tick(self) -> None:
        """Write a note if it is time for one."""
        now = time.monotonic()
        # a process that was stopped, or got no processor, has not observed the others meanwhile
        passed = min(now - self._last, 2 * _TICK_S)
        self._last = now
        if self._is_any_alive():
            return
        self._alone_s += passed
        if self._alone_s < self._next_s or self._is_silent():
            return
        if self._is_over and not _joins_threads(main_frame()):  # its launcher keeps the process
            return
        self._next_s = self._alone_s * _REPEAT_FACTOR
        self._notes += 1
        self._write(
            f"note: rank {self._rank} still runs, {self._alone_s:.0f} s after {self._others} have "
            f"ended:\n  {describe_activity()}"
        )

    def _is_any_alive(self) -> bool:
        while self._peers:
            reader, before = self._peers[0]
            status = read_status(reader.pid)
            # a process that has ended its program may be kept by its launcher until all have
            ended = status is None or status.state == "Z" or status.started != before.started
            if not ended and reader.phase != "ended":
                return True
            reader.close()
            del self._peers[0]
        return False


def describe_activity() -> str:
    """Return what the program does: where its main thread is, or at the end of it, which threads
    keep it running.
    """
    main = threading.main_thread()
    frame = main_frame()
    threads = [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not main
    ]
    if threads and _joins_threads(frame):
        frames = sys._current_frames()
        places = [_place(frames.get(thread.ident or 0)) for thread in threads]
        names = [f"the thread {thread.name} keeps it running" for thread in threads]
        lines = [
            f"{name}, at {place}" if place else name
            for name, place in zip(names, places, strict=True)
        ]
        more = [f"and {len(lines) - _SHOWN} more threads"] * (len(lines) > _SHOWN)
        return "\n  ".join([*lines[:_SHOWN], *more])
    place = _place(frame)
    return f"its main thread is at {place}" if place else "its main thread has ended"


def _joins_threads(frame: FrameType | None) -> bool:
    """Return whether the main thread waits for other threads at the end of the program."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) in _ENDS:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    frames = [
        (entry.filename, entry.lineno or 0, entry.name)
        for entry in reversed(traceback.extract_stack(frame))
    ]
    stack = stack_of(frames)
    return " < ".join(stack[:_SHOWN])


_current: LastRankWatch | None = None  # that of the last default process group


def watch(last_rank_watch: LastRankWatch | None) -> None:
    """Start `last_rank_watch` in the place of the one before."""
    global _current
    before = _current
    _current = last_rank_watch
    if before is not None:
        before.stop()
    if last_rank_watch is not None:
        last_rank_watch.start()


def note_end() -> None:
    """Record that the program of this rank has ended; see `LastRankWatch.note_end`."""
    if _current is not None:
        _current.note_end()


def _after_fork() -> None:
    global _current
    _current = None


os.register_at_fork(after_in_child=_after_fork)
