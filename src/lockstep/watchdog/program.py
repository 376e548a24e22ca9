"""The program that runs in this process, as the watchdog sees it: whether it has got the error, and
how it ends, which the other ranks read in this rank's flight record.
"""

from __future__ import annotations

import os
import threading
import traceback
from types import TracebackType

from ..errors import InterruptedRunError
from ..flight_recorder import FlightRecorder

_REQUESTED = (KeyboardInterrupt, SystemExit, GeneratorExit, InterruptedRunError)


class Program:
    """The program of this process.

    Args:
        recorder: this rank's flight recorder.

    Attributes:
        thread: in which it runs, usually the main one.
        has_error: whether it has got the watchdog's error.
        is_exiting: whether it is over, or has raised an exception.
        has_failed: whether it ends with an error.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self.thread = threading.current_thread()
        self.has_error = False
        self.is_exiting = False
        self.has_failed = False

    def note_error(self) -> None:
        """Note that the calling thread gets the watchdog's error, if it is the program's."""
        if threading.current_thread() is self.thread:
            self.has_error = True

    def record_exception(self, error: BaseException, follows: bool) -> None:
        """Record that the program ends with `error`.

        Args:
            error: of the program.
            follows: whether another rank has failed before, so that this may be a consequence.
        """
        recorder = self._recorder
        if os.getpid() != recorder.pid:
            return  # a forked child; the rank is its parent
        self.is_exiting = True
        self.has_failed = not (isinstance(error, SystemExit) and error.code in (None, 0))
        if recorder.phase in ("raised", "left"):
            return
        if isinstance(error, _REQUESTED) or follows:
            self.record_exit()
            return
        frames = error.__traceback__
        while frames is not None and _runs_program(frames):
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        recorder.write_traceback(text)
        recorder.set_phase("raised")

    def record_exit(self) -> None:
        """Record that the program ends in good order."""
        if os.getpid() != self._recorder.pid:
            return
        self.is_exiting = True
        if self._recorder.phase not in ("raised", "left"):
            self._recorder.set_phase("ended")


def _runs_program(frames: TracebackType) -> bool:
    """Return whether this frame belongs to what runs the program, and not to the program."""
    name = str(frames.tb_frame.f_globals.get("__name__", ""))
    package = __package__.partition(".")[0]
    return name == "runpy" or name.startswith((f"{package}.launcher", f"{package}.ray"))
