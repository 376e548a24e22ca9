"""Raises the report in the program's thread, wherever that is, and ends a process that cannot raise it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from .stacks import own_stack

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Doorbell", "deliver"]

_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 4  # programs use SIGUSR1 and 2 themselves
_BY_ITSELF_S = 1.0  # a collective that waits is left with an error in this time
_GRACE_S = 5.0  # a thread that has not got the error by then is in C code that never comes back
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
            self.rings = False
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        session = self._session
        if session.error is not None and not session.delivered.is_set():
            session.check()


def deliver(session: Session, stop: threading.Event) -> None:
    """See to it that the program's thread raises the session's error, and that the process ends after it.

    One that is not the main thread cannot be interrupted: it gets the error in a collective.
    """
    home, begin = session.home, time.monotonic()
    while not session.delivered.is_set() and home.is_alive() and not session.is_ending and not stop.is_set():
        waited = time.monotonic() - begin
        if waited > _GRACE_S:
            _end(session, f"{home.name} does not come back from {' < '.join(own_stack()) or 'a call'}")
        if session.doorbell.rings and (waited > _BY_ITSELF_S or home.ident not in session.inside):
            with suppress(OSError, ValueError):  # it has ended
                signal.pthread_kill(home.ident or 0, _SIGNAL)
        stop.wait(0.1)
    # what the user's program does with the error is its own affair, but threads shall not keep a program that is over
    over = 0.0
    while not stop.wait(0.2):
        session.recorder.beat()
        if threading.main_thread().is_alive() and not session.is_ending:
            continue
        over = over or time.monotonic()
        if time.monotonic() - over > _GRACE_S:
            names = [each.name for each in threading.enumerate() if not each.daemon and each is not home]
            _end(session, f"threads keep the process alive ({', '.join(names)})")


def _end(session: Session, why: str) -> None:
    with suppress(Exception):
        sys.stderr.write(f"lockstep: rank {session.rank}: {why}; the process is ended\n{session.error}\n")
        sys.stderr.flush()
    os._exit(_CODE)
