"""How a worker failed, in the form that travels between hosts (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import WorkerError

__all__ = ["JOINT_KINDS", "Failure"]

JOINT_KINDS = ("DesyncError", "RankLostError", "StallError")
"""The errors by which a worker says what the joint report says, where there is one."""


@dataclass(frozen=True)
class Failure:
    """The first failure on one host.

    Attributes:
        rank: who failed.
        kind: the class name of what it raised, or "exit" where it died.
        reason: the message, in one line or more.
        traceback: as text, "" where there is none.
        exit_code: of the process.
        host: where it ran.
        others: what is to be said of others that failed after it.
        time: nanoseconds since the epoch, on the clock that the hosts have agreed on.
        report: the joint report of all ranks, as JSON; "" where there is none.
        is_joint: whether the worker has only said what that report says.
    """

    rank: int
    kind: str
    reason: str
    traceback: str = ""
    exit_code: int = 1
    host: str = ""
    others: str = ""
    time: int = 0
    report: str = ""
    is_joint: bool = False

    def as_error(self) -> WorkerError:
        """The same as an exception."""
        error = WorkerError(self.rank, self.kind, self.reason, self.traceback, self.exit_code)
        error.host, error.others, error.time = self.host, self.others, self.time
        error.report_json = self.report
        return error

    @staticmethod
    def of(error: WorkerError, host: str = "", ahead: int = 0) -> Failure:
        """What `error` says, which happened on `host`, whose clock is `ahead` by so many nanoseconds."""
        traceback, code = error.worker_traceback, error.exit_code
        where, at = error.host or host, error.time - ahead
        report, is_joint = error.report_json, bool(error.report_json) and error.kind in JOINT_KINDS
        return Failure(error.rank, error.kind, error.reason, traceback, code, where, error.others, at, report, is_joint)

    @staticmethod
    def first(failures: Sequence[Failure]) -> Failure | None:
        """The earliest, with what is to be said of the others; None where there is none.

        A worker that fails because another has, on another host, does so after it. One that says what the joint report
        says has seen the failure of another, or has failed together with all.
        """
        if not failures:
            return None
        first, *rest = sorted(failures, key=lambda failure: (failure.is_joint, failure.time))
        told = [first.others, *(text for failure in rest if not failure.is_joint for text in failure._as_echo())]
        report = first.report or next((failure.report for failure in rest if failure.report), "")
        return replace(first, others="; ".join(text for text in told if text), report=report)

    def _as_echo(self) -> tuple[str, str]:
        return f"rank {self.rank} on {self.host} failed after that with {self.kind}", self.others
