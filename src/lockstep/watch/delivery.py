"""Raises the report in the main thread, wherever that is, and ends a process that cannot raise it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Doorbell", "deliver"]

_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 4  # programs use SIGUSR1 and 2 themselves
_BY_ITSELF_S = 1.0  # a collective that waits is left with an error in this time
_GRACE_S = 5.0  # a main thread that has not got the error by then is in C code that never comes back
_CODE = 86  # by which the launcher knows that it only follows from what others have done


class Doorbell:
    """A signal at which the main thread raises the session's error."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rings = threading.current_thread() is threading.main_thread()
        if self.rings:
            self._before = signal.signal(_SIGNAL, self._raise)

    def close(self) -> None:
        """Put back what was there before."""
        if self.rings and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)
            self.rings = False

    def _raise(self, number: int, frame: FrameType | None) -> None:
        session = self._session
        if session.error is not None and not session.delivered.is_set():
            session.check()


def deliver(session: Session, stop: threading.Event) -> None:
    """See to it that the main thread raises the session's error, and that the process ends after it."""
    main, begin = threading.main_thread(), time.monotonic()
    while not session.delivered.is_set() and main.is_alive() and not session.is_ending and not stop.is_set():
        waited = time.monotonic() - begin
        if waited > _GRACE_S:
            _end(session, "the main thread is in a call that does not return")
        if session.doorbell.rings and (waited > _BY_ITSELF_S or main.ident not in session.inside):
            with suppress(OSError, ValueError):  # it has ended
                signal.pthread_kill(main.ident or 0, _SIGNAL)
        stop.wait(0.1)
    # what the user's program does with the error is its own affair, but threads shall not keep a program that is over
    over = 0.0
    while not stop.wait(0.2):
        session.recorder.beat()
        if main.is_alive() and not session.is_ending:
            continue
        over = over or time.monotonic()
        if time.monotonic() - over > _GRACE_S:
            _end(session, "a thread keeps the process alive")


def _end(session: Session, why: str) -> None:
    with suppress(Exception):
        sys.stderr.write(f"lockstep: rank {session.rank}: {why}; the process is ended\n{session.error}\n")
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
    os._exit(_CODE)
