"""The stack of another rank's main thread, also while it is in C code or holds the interpreter."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..recorder import Recorder, Recording
from ..recorder.layout import State
from .places import main_frame, stack_of

__all__ = ["StackFile", "ask", "own_stack"]

_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 3  # programs use SIGUSR1 and 2 themselves
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LONGEST = 64 << 10


class StackFile:
    """Lets others ask for this rank's stack: at a signal faulthandler writes it into a file of the job's folder."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self._recorder = recorder
        self._file: IO[str] = _path(folder, recorder.rank).open("w")
        if threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, signal.SIG_IGN)  # from when it is closed on: one may still be on its way
        faulthandler.register(_SIGNAL, file=self._file, all_threads=False, chain=False)
        recorder.note(State().stack_signal, _SIGNAL)

    def close(self) -> None:
        """Answer no more."""
        self._recorder.note(State().stack_signal, 0)
        faulthandler.unregister(_SIGNAL)
        self._file.close()


def own_stack() -> tuple[str, ...]:
    """Where this process's main thread is, innermost first."""
    frame = main_frame()
    found = reversed(traceback.extract_stack(frame)) if frame is not None else ()
    return stack_of([(each.filename, each.lineno or 0, each.name) for each in found])


def ask(folder: Path, recordings: Collection[Recording], patience_s: float = 0.4) -> dict[int, tuple[str, ...]]:
    """The stacks of the ranks that can say theirs, innermost first.

    Args:
        folder: of the job.
        recordings: of the ranks that are asked; their processes live.
        patience_s: how long is waited for all of them.
    """
    before: dict[int, int] = {}
    for recording in recordings:
        number, path = recording.word(State().stack_signal), _path(folder, recording.rank)
        if not number or recording.pid == os.getpid():
            continue
        with suppress(OSError):
            before[recording.rank] = path.stat().st_size
            os.kill(recording.pid, number)
    found: dict[int, tuple[str, ...]] = {}
    deadline = time.monotonic() + patience_s
    while len(found) < len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank in before.keys() - found.keys():
            text = _new_text(_path(folder, rank), before[rank])
            if text.endswith("\n"):
                frames = [(file, int(line), name) for file, line, name in _FRAME.findall(text)]
                found[rank] = stack_of(frames)
    if any(recording.pid == os.getpid() for recording in recordings):
        found |= {r.rank: own_stack() for r in recordings if r.pid == os.getpid()}
    return found


def _new_text(path: Path, start: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(_LONGEST).decode(errors="replace")
    return ""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"
