"""The results of workers: what they have told and what the ends of their processes add, and the
error of a run.

After the last worker has ended, the launcher collects everything in `WorkerResults`, from which
`raise_failure` selects the error. `Failure` is the form in which the first failure of a host
travels to the other hosts.
"""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from .. import environment
from ..errors import (
    ConfigError,
    InterruptedRunError,
    LockstepError,
    MissingPackageError,
    WorkerError,
    ranks_in_words,
)
from ..job.messages import Failure
from ..pickling import Pickler, pickled
from ..system.processes import UNKNOWN_EXIT_CODE, signal_name
from ..watchdog.report import Report as WatchdogReport

__all__ = [
    "WorkerResults",
    "common_error",
    "first_failure",
    "later_failures",
    "pickle_by_value",
    "pickle_call",
    "raise_failure",
    "run_stored_call",
    "unpickle",
]


class _Pickler(Pickler):
    """Pickles by value and moves tensors to the CPU, as the reader may lack the device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def pickle_by_value(value: object) -> bytes:
    """Return `value` as bytes that another process of this Python can rebuild; tensors arrive on
    the CPU.
    """
    return pickled(value, _Pickler)


def unpickle(data: bytes) -> Any:
    """Return the value of `pickle_by_value`. Only for bytes that this program has written
    itself.
    """
    return pickle.loads(data)


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call ``fn(*args, **kwargs)`` as bytes.

    Raises:
        ConfigError: the function or an argument, which the message names, cannot be pickled.
    """
    try:
        return pickle_by_value((fn, args, kwargs))
    except MissingPackageError:
        raise
    except Exception as error:
        arguments: dict[str, object] = {"fn": fn}
        arguments |= {f"args[{i}]": value for i, value in enumerate(args)} | kwargs
        for name, value in arguments.items():
            _check_argument(name, value)
        raise _not_picklable("fn and its arguments", type(fn).__name__, error) from None


def _check_argument(name: str, value: object) -> None:
    try:
        pickle_by_value(value)
    except Exception as error:
        raise _not_picklable(name, value, error) from None


def _not_picklable(name: str, value: object, error: Exception) -> ConfigError:
    hint = f"Create it inside the function instead: {type(error).__name__}: {error}"
    return ConfigError(name, "an object that can be pickled", value, hint)


def run_stored_call(call: Path, value: Path, find_rank: Callable[[], int] | None = None) -> None:
    """Execute the pickled call in a file as a worker; rank 0 writes its pickled value into another.

    Args:
        call: of `pickle_call`.
        value: of which nothing exists before it is whole.
        find_rank: called after the function; by default the rank is the one that the environment
            gives.
    """
    fn, args, kwargs = unpickle(call.read_bytes())
    # the function chooses its own start method: what it defines cannot be imported by name in a new
    # interpreter
    multiprocessing.set_start_method(None, force=True)
    returned = fn(*args, **kwargs)
    rank = find_rank() if find_rank is not None else environment.find_world().rank
    if rank == 0:
        draft = value.with_name(f"{value.name}-{time.time_ns()}")
        draft.write_bytes(pickle_by_value(returned))
        draft.replace(value)


FORCED_EXIT_CODE = 86
"""The exit code with which a worker's own watchdog ends it after a report, if its threads cannot be
interrupted.
"""


@dataclass(frozen=True)
class WorkerResults:
    """Everything known after the last worker has ended.

    Attributes:
        reports: the workers' reports, the earliest first.
        dead_ranks: the ranks that were found dead first.
        dead_since: the earliest time at which they can have died, in nanoseconds since the epoch.
        watchdog_report: the watchdog's report on all ranks.
        codes: exit code of each rank that ended before the launcher ended the others; negative for
            a signal.
        signals: the signals that the launcher received.
        killed: whether the launcher killed workers after their grace period.
        workers: how many there were.
        first_rank: the rank of the first of them; all other ranks here are local ranks.
    """

    reports: Sequence[Failure] = ()
    dead_ranks: Sequence[int] = ()
    codes: Mapping[int, int] | None = None
    signals: Sequence[int] = ()
    killed: bool = False
    workers: int = 0
    first_rank: int = 0
    dead_since: int = 0
    watchdog_report: WatchdogReport | None = None

    @property
    def failures(self) -> list[Failure]:
        """The reports of failed workers, the earliest first; those that only repeat the watchdog's
        report come last.
        """
        return sorted(
            (report for report in self.reports if not report.stopped),
            key=lambda report: report.repeats_watchdog,
        )


def raise_failure(results: WorkerResults) -> None:
    """Raise the error of the run; return if there is none.

    Raises:
        WorkerError: a worker failed. Exiting on a signal that the launcher received is no failure.
        LockstepError: all workers failed with this same error, which is therefore not specific to
            one worker; or some repeat the watchdog's report, and none failed otherwise.
        InterruptedRunError: workers shut down cleanly on a signal, or the launcher received
            SIGTERM.
        KeyboardInterrupt: the launcher received SIGINT.
    """
    error = first_failure(results)
    if error is not None and results.watchdog_report is not None:
        error.report_json = with_exit_details(results.watchdog_report, results).to_json()
    stopped = sorted(
        (report for report in results.reports if report.stopped), key=lambda report: report.rank
    )
    if error is not None and not (
        (results.signals or stopped) and _follows_from_signal(error, results)
    ):
        shared = common_error(results) or _watchdog_error(error, results)
        if shared is not None:
            shared.report_json = error.report_json
            raise shared from error
        error.others = later_failures(results, error)
        raise error
    if stopped:
        raise InterruptedRunError(
            stopped[0].reason, stopped[0].signal_number, stopped[0].checkpoint
        )
    if results.signals:
        number = results.signals[0]
        how = (
            "the workers did not exit in time and were killed"
            if results.killed
            else "the workers have exited"
        )
        if number == signal.SIGINT:
            raise KeyboardInterrupt(how)
        raise InterruptedRunError(f"stopped by {signal_name(number)}: {how}", number)


def first_failure(results: WorkerResults) -> WorkerError | None:
    """Return the first failure, or None if no worker failed.

    A report without dead peers precedes all others, the earliest first; then a death without a
    report; then a failure after a peer's death. The last resort is a worker that repeats the
    watchdog's report, or that its watchdog ended before it could.
    """
    failures = results.failures
    causes = [
        report for report in failures if not report.dead_peers and not report.repeats_watchdog
    ]
    if causes:
        return _error_from_report(causes[0], results)
    silent = _ranks_without_report(results)
    if silent:
        error = _error_of_silent_rank(silent[0], results)
        error.time = results.dead_since
        return error
    ended_by_watchdog = [
        rank for rank, code in (results.codes or {}).items() if code == FORCED_EXIT_CODE
    ]
    if results.watchdog_report is not None and (
        failures[0].repeats_watchdog if failures else ended_by_watchdog
    ):
        return _culprit_error(results.watchdog_report, failures, results, ended_by_watchdog)
    return _error_from_report(failures[0], results) if failures else None


def _error_of_silent_rank(rank: int, results: WorkerResults) -> WorkerError:
    codes = results.codes or {}
    # it ended with code 0, or so early that nobody has its code
    if results.signals and rank not in codes:
        number = results.signals[0]
        return WorkerError(
            results.first_rank + rank,
            "exit",
            f"ended on {signal_name(number)}",
            exit_code=128 + number,
        )
    return _error_from_exit_code(results.first_rank + rank, codes.get(rank, 0))


def _ranks_without_report(results: WorkerResults) -> list[int]:
    """Return the local ranks that died without a report, those first that are known to have died
    first.
    """
    reported = {report.rank for report in results.reports}
    if results.watchdog_report is not None:
        reported |= {
            rank for rank, code in (results.codes or {}).items() if code == FORCED_EXIT_CODE
        }
    seen = [rank for rank in results.codes or {} if rank not in reported]
    dead_ranks = [rank for rank in results.dead_ranks if rank not in reported]
    # the others were alive when it was made, and were ended afterwards
    if results.watchdog_report is not None:
        dead = [
            row.rank - results.first_rank
            for row in results.watchdog_report.ranks
            if row.state in ("died", "lost")
        ]
        dead_ranks = [rank for rank in dead_ranks if rank in dead or rank in seen]
    silent = [rank for rank in dead_ranks if rank in seen] or dead_ranks or seen
    culprits = results.watchdog_report.culprits if results.watchdog_report is not None else ()
    return sorted(silent, key=lambda rank: results.first_rank + rank not in culprits)


def _culprit_error(
    report: WatchdogReport,
    failures: Sequence[Failure],
    results: WorkerResults,
    ended_by_watchdog: Sequence[int],
) -> WorkerError:
    """Return the failure of the report's culprit, or else of the first rank that it was raised on
    or ended.
    """
    own_ranks = range(results.first_rank, results.first_rank + results.workers)
    for row in report.ranks:
        # and joins its threads
        if row.rank in report.culprits and row.rank in own_ranks and row.state == "raised":
            kind, _, reason = row.note.partition(": ")
            return WorkerError(
                row.rank, kind or "exit", _whole_message(kind, reason, row.traceback), row.traceback
            )
    culprits = [
        failure for failure in failures if results.first_rank + failure.rank in report.culprits
    ]
    if failures:
        return _error_from_report((culprits or failures)[0], results)
    kind = {"lost": "RankLostError", "stall": "StallError"}.get(report.kind, "DesyncError")
    error = WorkerError(results.first_rank + ended_by_watchdog[0], kind, report.sentence)
    error.in_collective = True
    return error


def _whole_message(kind: str, first_line: str, traceback: str) -> str:
    """Return the message of an exception of which only the first line is known; `traceback` ends
    with all of it.
    """
    starts = list(
        re.finditer(
            rf"^(?:[\w.]+\.)?{re.escape(kind)}: (?={re.escape(first_line)})",
            traceback,
            re.MULTILINE,
        )
    )
    return traceback[starts[-1].end() :].rstrip() if starts and first_line else first_line


def with_exit_details(report: WatchdogReport, results: WorkerResults) -> WatchdogReport:
    """Return `report` with what only the launcher knows: exit codes and the workers' own
    reports.
    """
    reports = {
        results.first_rank + failure.rank: failure
        for failure in results.failures
        if not failure.repeats_watchdog
    }
    codes = {
        results.first_rank + rank: code
        for rank, code in (results.codes or {}).items()
        if code != FORCED_EXIT_CODE
    }
    rows = []
    for row in report.ranks:
        of_worker = reports.get(row.rank)
        if of_worker is not None:
            note = of_worker.reason if of_worker.kind == "SystemExit" else row.note
            row = structs.replace(row, note=note, traceback=of_worker.traceback or row.traceback)
        elif row.rank in codes and row.state in ("died", "lost", "ended"):
            row = structs.replace(row, note=_error_from_exit_code(row.rank, codes[row.rank]).reason)
        rows.append(row)
    return report.with_rows(rows)


def common_error(results: WorkerResults) -> LockstepError | None:
    """Return the error of Lockstep that every worker reported alike, if there is one."""
    failures = results.failures
    alike = {(report.kind, report.reason, bool(report.pickled)) for report in failures}
    if len(failures) < results.workers or len(alike) != 1 or not failures[0].pickled:
        return None
    error: LockstepError = unpickle(base64.b64decode(failures[0].pickled))
    error.call_site = failures[0].call_site
    return error


def _watchdog_error(error: WorkerError, results: WorkerResults) -> LockstepError | None:
    """Return the worker's exception if `error` repeats the watchdog's report: it is not specific to
    one worker.
    """
    for report in results.failures:
        if (
            report.repeats_watchdog
            and report.pickled
            and results.first_rank + report.rank == error.rank
        ):
            shared: LockstepError = unpickle(base64.b64decode(report.pickled))
            return shared
    return None


def later_failures(results: WorkerResults, first: WorkerError) -> str:
    """Return one line about the workers that failed after `first`; "" if there are none."""
    kinds: dict[str, list[int]] = {}
    for report in results.reports:
        if (
            not (report.stopped or report.repeats_watchdog)
            and results.first_rank + report.rank != first.rank
        ):
            kinds.setdefault(report.kind, []).append(results.first_rank + report.rank)
    return "; ".join(
        f"{ranks_in_words(ranks)} failed later with {kind}" for kind, ranks in kinds.items()
    )


def _error_from_report(report: Failure, results: WorkerResults) -> WorkerError:
    rank = results.first_rank + report.rank
    error = WorkerError(rank, report.kind, report.reason, report.traceback, report.exit_code)
    error.time = report.time
    error.in_collective = report.in_collective or report.repeats_watchdog
    return error


def _error_from_exit_code(rank: int, code: int) -> WorkerError:
    if code == UNKNOWN_EXIT_CODE:
        reason = (
            "ended without an error message; its exit code is not known, as the fork server had "
            "ended before it"
        )
        return WorkerError(rank, "exit", reason, exit_code=1)
    if code > 0:
        return WorkerError(
            rank,
            "exit",
            f"ended with exit code {code} and without an error message",
            exit_code=code,
        )
    if code == 0:
        return WorkerError(
            rank, "exit", "ended with exit code 0 before its work was done", exit_code=1
        )
    hint = " (as the kernel does when memory runs out)" if code == -signal.SIGKILL else ""
    return WorkerError(rank, "exit", f"killed by {signal_name(-code)}{hint}", exit_code=128 - code)


def _follows_from_signal(error: WorkerError, results: WorkerResults) -> bool:
    """Return whether the worker failed because the launcher, or before it a peer, received a
    signal.
    """
    if error.kind in ("exit", "SystemExit"):
        exit_codes = {128 + number for number in results.signals}
        return error.exit_code in exit_codes or (results.killed and error.kind == "exit")
    return error.kind == "KeyboardInterrupt" or error.in_collective
