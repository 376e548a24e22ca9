"""What a run's end means to the one who started it: pure, from what the workers and the agent have left."""

from __future__ import annotations

import base64
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import InterruptedRunError, LockstepError, WorkerError
from .call import unpack
from .folder import Report

__all__ = ["Ending", "conclude", "echoes", "first_failure", "shared_failure"]


@dataclass(frozen=True)
class Ending:
    """Everything known after the last worker has gone.

    Attributes:
        reports: what the workers said, the earliest first.
        lost: the ranks that were found dead first.
        lost_at: the earliest time at which they can have died, in nanoseconds since the epoch.
        codes: exit code of each rank whose death the agent saw before it ended the others; negative for a signal.
        signals: what the launcher was sent.
        killed: whether the launcher killed workers because their time was up.
        workers: how many there were.
        first_rank: the rank of the first of them; all else here is numbered from 0 on each node.
    """

    reports: Sequence[Report] = ()
    lost: Sequence[int] = ()
    codes: Mapping[int, int] | None = None
    signals: Sequence[int] = ()
    killed: bool = False
    workers: int = 0
    first_rank: int = 0
    lost_at: int = 0


def conclude(ending: Ending) -> None:
    """Raise what the ending amounts to; return where all is well.

    Raises:
        WorkerError: a worker failed. That it left on a signal which the launcher was sent is no failure.
        LockstepError: all workers failed with this very error, which is therefore no worker's own.
        InterruptedRunError: workers stopped in good order, or the launcher was sent SIGTERM.
        KeyboardInterrupt: the launcher was sent SIGINT.
    """
    error = first_failure(ending)
    stopped = sorted((report for report in ending.reports if report.stopped), key=lambda report: report.rank)
    if error is not None and not ((ending.signals or stopped) and _is_obedience(error, ending)):
        shared = shared_failure(ending)
        if shared is not None:
            raise shared from error
        error.others = echoes(ending, error)
        raise error
    if stopped:
        raise InterruptedRunError(stopped[0].reason, stopped[0].signal_number, stopped[0].checkpoint)
    if ending.signals:
        number = ending.signals[0]
        how = "the workers did not leave in time and were killed" if ending.killed else "the workers have left"
        if number == signal.SIGINT:
            raise KeyboardInterrupt(how)
        raise InterruptedRunError(f"stopped by {_name(number)}: {how}", number)


def first_failure(ending: Ending) -> WorkerError | None:
    """The failure that came first, or None where no worker failed.

    A report without dead peers comes before any other, the earliest first; then a death without a report; a
    failure after a peer's death is the last resort.
    """
    failures = [report for report in ending.reports if not report.stopped]
    causes = [report for report in failures if not report.after]
    if causes:
        return _reported(causes[0], ending)
    codes = ending.codes or {}
    told = {report.rank for report in ending.reports}
    seen = [rank for rank in codes if rank not in told]
    lost = [rank for rank in ending.lost if rank not in told]
    silent = [rank for rank in lost if rank in seen] or lost or seen
    if silent:
        error = _silent(ending.first_rank + silent[0], codes.get(silent[0], 0))
        error.time = ending.lost_at
        return error
    return _reported(failures[0], ending) if failures else None


def shared_failure(ending: Ending) -> LockstepError | None:
    """The error of Lockstep's that every worker has reported alike, if there is one."""
    failures = [report for report in ending.reports if not report.stopped]
    alike = {(report.kind, report.reason, bool(report.packed)) for report in failures}
    if len(failures) < ending.workers or len(alike) != 1 or not failures[0].packed:
        return None
    error: LockstepError = unpack(base64.b64decode(failures[0].packed))
    return error


def echoes(ending: Ending, first: WorkerError) -> str:
    """What is to be said of the workers that failed after `first`, in one line; "" where there are none."""
    words: dict[str, list[int]] = {}
    for report in ending.reports:
        if not report.stopped and ending.first_rank + report.rank != first.rank:
            words.setdefault(report.kind, []).append(ending.first_rank + report.rank)
    return "; ".join(f"{ranks_as_text(ranks)} failed after that with {kind}" for kind, ranks in words.items())


def ranks_as_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _reported(report: Report, ending: Ending) -> WorkerError:
    rank = ending.first_rank + report.rank
    error = WorkerError(rank, report.kind, report.reason, report.traceback, report.exit_code)
    error.time, error.in_collective = report.time, report.in_collective
    return error


def _silent(rank: int, code: int) -> WorkerError:
    if code > 0:
        return WorkerError(rank, "exit", f"left with exit code {code} and no word", exit_code=code)
    if code == 0:
        return WorkerError(rank, "exit", "left with exit code 0 before its work was done", exit_code=1)
    hint = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
    return WorkerError(rank, "exit", f"killed by {_name(-code)}{hint}", exit_code=128 - code)


def _is_obedience(error: WorkerError, ending: Ending) -> bool:
    """Whether it failed by doing as it was told, or because a peer did so before it."""
    if error.kind in ("exit", "SystemExit"):
        asked = {128 + number for number in ending.signals}
        return error.exit_code in asked or (ending.killed and error.kind == "exit")
    return error.kind == "KeyboardInterrupt" or error.in_collective


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
