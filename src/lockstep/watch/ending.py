"""Lets the others know how this rank ends: with an exception, or by itself."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import InterruptedRunError

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Ending", "note_end", "note_error"]

_PAUSE_S = 0.05
_ON_REQUEST = (KeyboardInterrupt, SystemExit, GeneratorExit, InterruptedRunError)


def note_error(session: Session, error: BaseException) -> None:
    """This rank ends with `error`."""
    if os.getpid() != session.recorder.pid:
        return  # a forked child; the rank is its parent
    session.is_ending = True
    session.has_failed = not (isinstance(error, SystemExit) and error.code in (None, 0))
    if session.recorder.phase in ("raised", "left"):
        return
    if isinstance(error, _ON_REQUEST) or error is session.error or session.error is not None:
        note_end(session)  # it follows from what others have said, or was asked for
        return
    frames = error.__traceback__
    while frames is not None and _is_around(frames):
        frames = frames.tb_next
    session.recorder.say("".join(traceback.format_exception(type(error), error, frames)))
    session.recorder.turn("raised")


def _is_around(frames: TracebackType) -> bool:
    """Whether this is a frame of what runs the program, not of the program."""
    name = str(frames.tb_frame.f_globals.get("__name__", ""))
    return name == "runpy" or name.startswith(f"{__package__.partition('.')[0]}.launchers")


def note_end(session: Session) -> None:
    """This rank ends in good order."""
    if os.getpid() != session.recorder.pid:
        return
    session.is_ending = True
    if session.recorder.phase not in ("raised", "left"):
        session.recorder.turn("ended")


class Ending:
    """What is done when the interpreter ends, whatever the program has or has not done.

    Args:
        session: of this process.
        close: ends the session.
    """

    def __init__(self, session: Session, close: Callable[[], None]) -> None:
        self._session: Session | None = session
        self._close: Callable[[], None] | None = close
        self._before = sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Do nothing any more."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._hook:
            sys.excepthook = self._before
        self._session = self._close = None  # torch has made a hook that keeps this one

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._session is not None:
            note_error(self._session, error)
        self._before(kind, error, trace)

    def _at_exit(self) -> None:
        session = self._session
        if session is None or self._close is None:
            return
        known = session.error
        if os.getpid() == session.recorder.pid and session.recorder.phase != "raised":
            session.far.settle()
        note_end(session)
        self._close()
        if session.error is not known:  # too late to raise it
            sys.stderr.write(f"{type(session.error).__name__}: {session.error}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        # The program has destroyed no groups. Gloo's threads drop the last tensors a moment after a collective has
        # returned, and abort the process if the interpreter is gone by then.
        time.sleep(_PAUSE_S)
