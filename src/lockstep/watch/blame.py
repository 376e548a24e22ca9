"""What an error of a transport comes from: the report that the watchers make a moment later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .. import environment
from ..errors import DesyncError, LockstepError, RankLostError, StallError, TransportError
from . import causes, render
from .report import Report

if TYPE_CHECKING:
    from .view import Session

__all__ = ["error_of", "explain", "is_of_transport"]

_PATIENCE_S = 3.0  # in which watchers find out why the others do not answer
_PATIENCE_FAR_S = 8.0  # the same where some of them are on other machines, which may have fallen silent
_OF_TRANSPORT = ("gloo", "connection", "connect ", "peer", "socket", "timed out", "nccl", "shm:", "lockstep.errors")


def explain(session: Session, error: BaseException) -> None:
    """Raise the session's error instead of `error`, if that is a symptom of it; else return."""
    if session.error is None and is_of_transport(error):
        _await_report(session)
    if session.error is not None and error is not session.error and isinstance(error, Exception):
        session.hand_over()
        raise session.error from None


def _await_report(session: Session) -> None:
    patience_s = _PATIENCE_S if len(session.met.machines) == 1 else _PATIENCE_FAR_S
    begin = time.monotonic()
    while not session.look() and time.monotonic() - begin < patience_s:
        if time.monotonic() - begin > _PATIENCE_S / 4:
            finding = causes.who_has_gone(session)
            if finding is not None:
                session.fail(finding)
        time.sleep(0.01)


def is_of_transport(error: BaseException) -> bool:
    """Whether it says that others cannot be reached, rather than that something is wrong here."""
    if isinstance(error, TransportError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, LockstepError):
        return False
    text = str(error).lower()
    return "Dist" in type(error).__name__ or any(word in text for word in _OF_TRANSPORT)


def error_of(report: Report) -> TransportError:
    """The exception that every rank raises; the launcher, where there is one, shows the whole report once."""
    data = report.to_json()
    text = report.sentence if environment.under_launcher() else render.as_text(report)
    if report.kind == "lost":
        return RankLostError(report.culprits[0] if report.culprits else -1, text, data)
    if report.kind == "stall":
        return StallError(text, report.culprits, data)
    return DesyncError(text, data)
