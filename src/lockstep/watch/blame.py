"""What an error of a transport comes from: the report that the watchers make a moment later."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import environment
from ..errors import DesyncError, LockstepError, RankLostError, StallError, TransportError
from . import causes, render
from .report import Report

if TYPE_CHECKING:
    from .view import Session

__all__ = ["error_of", "explain", "is_of_transport", "is_refusal"]

_PATIENCE_S = 3.0  # in which watchers find out why the others do not answer
_PATIENCE_FAR_S = 8.0  # the same where some of them are on other machines, which may have fallen silent
_REFUSALS = (ValueError, TypeError, NotImplementedError)
_REFUSED = re.compile(r"ProcessGroup\w+::\w+: |Cannot use ReduceOp|Invalid scalar type")
_OF_TRANSPORT = ("gloo/", "connection", "connect ", "peer", "socket", "timed out", "nccl", "shm:", "lockstep.errors")


def explain(session: Session, error: BaseException, ranks: Collection[int] | None = None) -> None:
    """Raise the session's error instead of `error`, if that is a symptom of it; else return.

    Args:
        session: of this process.
        error: what a call has ended with.
        ranks: who takes part in that call; all ranks if None.
    """
    if session.error is None and is_of_transport(error):
        with _waiting(session):
            _await_report(session, ranks)
    if session.error is not None and error is not session.error and isinstance(error, Exception):
        session.hand_over()
        raise session.error from None


@contextmanager
def _waiting(session: Session) -> Iterator[None]:
    """Let the watchers see that this rank waits in its last collective, also when a wait inside C++ has failed."""
    last = causes.last_collective(session)
    if last is None:
        yield
        return
    member, raw = last
    with session.lock:
        known = any(each.number == raw.number and each.work is None for each in member.started)
        started = session.started(raw)
        if not known:
            member.started.append(started)
            session.recorder.reopen(raw.number)
            session.recorder.wait(raw.number, raw.entered)
    try:
        yield
    finally:
        if not known:
            member.leave(started, session.recorder.run())


def _await_report(session: Session, ranks: Collection[int] | None) -> None:
    patience_s = _PATIENCE_S if len(session.met.machines) == 1 else _PATIENCE_FAR_S
    begin = time.monotonic()
    while not session.look() and time.monotonic() - begin < patience_s:
        if time.monotonic() - begin > _PATIENCE_S / 4:
            finding = causes.who_has_gone(session, ranks)
            if finding is not None:
                session.fail(finding)
        time.sleep(0.01)


def is_of_transport(error: BaseException) -> bool:
    """Whether it says that others cannot be reached, rather than that something is wrong here."""
    if isinstance(error, TransportError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, LockstepError) or is_refusal(error):
        return False
    text = str(error).lower()
    return "Dist" in type(error).__name__ or any(word in text for word in _OF_TRANSPORT)


def is_refusal(error: BaseException) -> bool:
    """Whether a call was refused for its arguments, before anything was sent; c10d's own backends say who refuses."""
    return isinstance(error, _REFUSALS) or _REFUSED.match(str(error)) is not None


def error_of(report: Report) -> TransportError:
    """The exception that every rank raises; the launcher, where there is one, shows the whole report once."""
    data = report.to_json()
    text = report.sentence if environment.under_launcher() else render.as_text(report)
    if report.kind == "lost":
        return RankLostError(report.culprits[0] if report.culprits else -1, text, data)
    if report.kind == "stall":
        return StallError(text, report.culprits, data)
    return DesyncError(text, data)
