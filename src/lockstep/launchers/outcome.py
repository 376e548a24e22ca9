"""What a run's end means to the one who started it: pure, from what the workers and the agent have left."""

from __future__ import annotations

import base64
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import InterruptedRunError, LockstepError, WorkerError
from ..watch.report import Report as JointReport
from .call import unpack
from .folder import Report

__all__ = ["Ending", "conclude", "echoes", "first_failure", "shared_failure"]

FORCED = 86
"""The exit code of a worker that its own watcher has ended, after the joint report, as it could not be reached."""


@dataclass(frozen=True)
class Ending:
    """Everything known after the last worker has gone.

    Attributes:
        reports: what the workers said, the earliest first.
        lost: the ranks that were found dead first.
        lost_at: the earliest time at which they can have died, in nanoseconds since the epoch.
        joint: the report that the workers' watchers have made for all ranks.
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
    joint: JointReport | None = None

    @property
    def failures(self) -> list[Report]:
        """What failed workers said, the earliest first; those that only say what the joint report says come last."""
        return sorted((report for report in self.reports if not report.stopped), key=lambda report: report.is_joint)


def conclude(ending: Ending) -> None:
    """Raise what the ending amounts to; return where all is well.

    Raises:
        WorkerError: a worker failed. That it left on a signal which the launcher was sent is no failure.
        LockstepError: all workers failed with this very error, which is therefore no worker's own; or some have said
            what the joint report says, and none has failed otherwise.
        InterruptedRunError: workers stopped in good order, or the launcher was sent SIGTERM.
        KeyboardInterrupt: the launcher was sent SIGINT.
    """
    error = first_failure(ending)
    if error is not None and ending.joint is not None:
        error.report_json = with_last_words(ending.joint, ending).to_json()
    stopped = sorted((report for report in ending.reports if report.stopped), key=lambda report: report.rank)
    if error is not None and not ((ending.signals or stopped) and _is_obedience(error, ending)):
        shared = shared_failure(ending) or _joint_failure(error, ending)
        if shared is not None:
            shared.report_json = error.report_json
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

    A report without dead peers comes before any other, the earliest first; then a death without a report; then a
    failure after a peer's death. The last resort is a worker that says what the joint report says, or was ended by its
    watcher before it could.
    """
    failures = ending.failures
    causes = [report for report in failures if not report.after and not report.is_joint]
    if causes:
        return _reported(causes[0], ending)
    silent = _silent_ranks(ending)
    if silent:
        error = _silent(ending.first_rank + silent[0], (ending.codes or {}).get(silent[0], 0))
        error.time = ending.lost_at
        return error
    forced = [rank for rank, code in (ending.codes or {}).items() if code == FORCED]
    if ending.joint is not None and (failures[0].is_joint if failures else forced):
        return _blamed(ending.joint, failures, ending, forced)
    return _reported(failures[0], ending) if failures else None


def _silent_ranks(ending: Ending) -> list[int]:
    """The local ranks that have died without a word, those first that are known to have done so first."""
    told = {report.rank for report in ending.reports}
    if ending.joint is not None:
        told |= {rank for rank, code in (ending.codes or {}).items() if code == FORCED}
    seen = [rank for rank in ending.codes or {} if rank not in told]
    lost = [rank for rank in ending.lost if rank not in told]
    if ending.joint is not None:  # the others were alive when it was made, and have been ended after that
        dead = [row.rank - ending.first_rank for row in ending.joint.ranks if row.state in ("died", "lost")]
        lost = [rank for rank in lost if rank in dead or rank in seen]
    silent = [rank for rank in lost if rank in seen] or lost or seen
    culprits = ending.joint.culprits if ending.joint is not None else ()
    return sorted(silent, key=lambda rank: ending.first_rank + rank not in culprits)


def _blamed(joint: JointReport, failures: Sequence[Report], ending: Ending, forced: Sequence[int]) -> WorkerError:
    """The failure of the rank that the joint report blames, or else of the first that raised it, or was ended by it."""
    own_ranks = range(ending.first_rank, ending.first_rank + ending.workers)
    for row in joint.ranks:
        if row.rank in joint.culprits and row.rank in own_ranks and row.state == "raised":  # and waits for its threads
            kind, _, reason = row.note.partition(": ")
            return WorkerError(row.rank, kind or "exit", reason, row.words)
    own = [report for report in failures if ending.first_rank + report.rank in joint.culprits]
    if failures:
        return _reported((own or failures)[0], ending)
    kind = {"lost": "RankLostError", "stall": "StallError"}.get(joint.kind, "DesyncError")
    error = WorkerError(ending.first_rank + forced[0], kind, joint.sentence)
    error.in_collective = True
    return error


def with_last_words(joint: JointReport, ending: Ending) -> JointReport:
    """`joint` with what the launcher alone knows: how processes have ended, and what they have left in writing."""
    said = {ending.first_rank + report.rank: report for report in ending.failures if not report.is_joint}
    codes = {ending.first_rank + rank: code for rank, code in (ending.codes or {}).items() if code != FORCED}
    rows = []
    for row in joint.ranks:
        word = said.get(row.rank)
        if word is not None:
            note = word.reason if word.kind == "SystemExit" else row.note
            row = replace(row, note=note, words=word.traceback or row.words)
        elif row.rank in codes and row.state in ("died", "lost", "ended"):
            row = replace(row, note=_silent(row.rank, codes[row.rank]).reason)
        rows.append(row)
    return joint.with_rows(rows)


def shared_failure(ending: Ending) -> LockstepError | None:
    """The error of Lockstep's that every worker has reported alike, if there is one."""
    failures = ending.failures
    alike = {(report.kind, report.reason, bool(report.packed)) for report in failures}
    if len(failures) < ending.workers or len(alike) != 1 or not failures[0].packed:
        return None
    error: LockstepError = unpack(base64.b64decode(failures[0].packed))
    return error


def _joint_failure(error: WorkerError, ending: Ending) -> LockstepError | None:
    """The error by which a worker says what the joint report says, where `error` is that: it is no worker's own."""
    for report in ending.failures:
        if report.is_joint and report.packed and ending.first_rank + report.rank == error.rank:
            joint: LockstepError = unpack(base64.b64decode(report.packed))
            return joint
    return None


def echoes(ending: Ending, first: WorkerError) -> str:
    """What is to be said of the workers that failed after `first`, in one line; "" where there are none."""
    words: dict[str, list[int]] = {}
    for report in ending.reports:
        if not (report.stopped or report.is_joint) and ending.first_rank + report.rank != first.rank:
            words.setdefault(report.kind, []).append(ending.first_rank + report.rank)
    return "; ".join(f"{ranks_as_text(ranks)} failed after that with {kind}" for kind, ranks in words.items())


def ranks_as_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _reported(report: Report, ending: Ending) -> WorkerError:
    rank = ending.first_rank + report.rank
    error = WorkerError(rank, report.kind, report.reason, report.traceback, report.exit_code)
    error.time, error.in_collective = report.time, report.in_collective or report.is_joint
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
