"""Worker status and results: what a worker reports, what its process's end adds, and which error a run raises.

Workers write their status into a private folder of the run (`StatusFolder`). After the last worker has ended, the
launcher collects everything in `WorkerResults`, from which `raise_failure` selects the error. `HostFailure` is the
form in which the first failure of a host travels to the other hosts.
"""

from __future__ import annotations

import base64
import fcntl
import multiprocessing
import os
import pickle
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import structs

from .. import environment, messages
from ..errors import ConfigError, InterruptedRunError, LockstepError, MissingPackageError, WorkerError, ranks_in_words
from ..pickling import Pickler, pickled
from ..system.job_folders import JobFolderLock
from ..system.processes import UNKNOWN_EXIT_CODE, signal_name
from ..watchdog.report import Report as WatchdogReport

__all__ = [
    "StatusFolder",
    "WorkerReport",
    "WorkerResults",
    "combine",
    "common_error",
    "first_failure",
    "later_failures",
    "newest_checkpoint",
    "pickle_by_value",
    "pickle_call",
    "raise_failure",
    "run_call",
    "time_request_file",
    "unpickle",
]


# --- Pickled calls and values -----------------------------------------------------------------------------------------


class _Pickler(Pickler):
    """Pickles by value and moves tensors to the CPU, as the reader may lack the device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def pickle_by_value(value: object) -> bytes:
    """Return `value` as bytes that another process of this Python can rebuild; tensors arrive on the CPU."""
    return pickled(value, _Pickler)


def unpickle(data: bytes) -> Any:
    """Return the value of `pickle_by_value`. Only for bytes that this program has written itself."""
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


def run_call(call: Path | bytes, find_rank: Callable[[], int] | None = None) -> bytes | None:
    """Execute a pickled call as a worker; rank 0 returns its pickled value unless that is None.

    Args:
        call: of `pickle_call`, or the path of a file with it.
        find_rank: called after the function; by default the rank is the one that the environment gives.
    """
    fn, args, kwargs = unpickle(call if isinstance(call, bytes) else call.read_bytes())
    # the function chooses its own start method: what it defines cannot be imported by name in a new interpreter
    multiprocessing.set_start_method(None, force=True)
    value = fn(*args, **kwargs)
    rank = find_rank() if find_rank is not None else environment.find_world().rank
    return pickle_by_value(value) if value is not None and rank == 0 else None


# --- The status folder of a run ---------------------------------------------------------------------------------------


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker's report on its early end.

    Attributes:
        rank: its local rank.
        time: nanoseconds since the epoch, when the exception was caught.
        kind: class name of the exception.
        reason: its message.
        traceback: its traceback as text.
        exit_code: the process's exit code.
        dead_peers: local ranks that had died by then, so that this failure probably follows from theirs.
        signal_number: the signal on which the worker shut down cleanly; 0 if it failed.
        checkpoint: the checkpoint that it saved before it stopped.
        pickled: the exception by `pickle_by_value`, in Base64, if it is one of Lockstep's; else "".
        in_collective: whether it was raised in communication with other ranks, as happens after one of them exits.
        repeats_watchdog: whether it only repeats the watchdog's report on all ranks.
        call_site: where the user's program was, e.g. ``train.py:31 in main``; "" if that is not known.
    """

    rank: int
    time: int
    kind: str
    reason: str
    traceback: str = ""
    exit_code: int = 1
    dead_peers: tuple[int, ...] = ()
    signal_number: int = 0
    checkpoint: str | None = None
    pickled: str = ""
    in_collective: bool = False
    repeats_watchdog: bool = False
    call_site: str = ""

    @property
    def stopped(self) -> bool:
        """Whether the worker shut down cleanly on a signal."""
        return self.signal_number > 0


@dataclass(frozen=True)
class StatusFolder:
    """The status files of one run; `path` is a private directory of this user.

    A worker holds a POSIX lock on its presence file as long as it lives. The kernel releases the lock when the
    process ends, however it ends, and before it closes the process's sockets: a peer that fails because of that
    death already sees the lock free. Processes forked by the worker do not share the lock.
    """

    path: Path

    def for_attempt(self, number: int) -> StatusFolder:
        """Return the folder for the workers that are started after `number` restarts."""
        return StatusFolder(self.path / f"attempt-{number}")

    @property
    def time_requested(self) -> bool:
        """Whether a worker has asked for time to save after a signal."""
        return time_request_file(self.path.parent).exists()

    def register(self, rank: int) -> None:
        """Mark this process as the live worker `rank`, until the process ends."""
        draft = self.path / f"entering-{rank}"
        # never closed: closing any descriptor of the file releases the lock
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, str(os.getpid()).encode())
        draft.rename(self._presence_file(rank))
        JobFolderLock(self.path.parent)  # for as long as this process lives

    def live_pids(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the process IDs of those of `ranks` that have registered and are alive."""
        pids = {}
        for rank in ranks:
            path = self._presence_file(rank)
            with suppress(FileNotFoundError):  # not registered, or another worker is removing the folder
                if _is_locked(path):
                    pids[rank] = int(path.read_text())
        return pids

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have registered and died without having finished."""
        registered = [rank for rank in ranks if self._presence_file(rank).exists()]
        return [rank for rank in registered if not _is_locked(self._presence_file(rank)) and not self.is_finished(rank)]

    def mark_finished(self, rank: int) -> None:
        """Mark the work of `rank` as done, so that the end of its process is no failure."""
        self._finished_file(rank).touch()

    def is_finished(self, rank: int) -> bool:
        """Return whether the work of `rank` is done."""
        return self._finished_file(rank).exists()

    def has_ended(self, rank: int) -> bool:
        """Return whether `rank` has finished, failed or died."""
        return self.is_finished(rank) or self._report_file(rank).exists() or bool(self.dead_ranks([rank]))

    def write_report(self, report: WorkerReport) -> None:
        """Write `report` for the launcher, atomically."""
        draft = self.path / f"writing-{report.rank}"
        draft.write_text(messages.encode(report))
        draft.rename(self._report_file(report.rank))

    def read_report(self, rank: int) -> WorkerReport | None:
        """Return the report of `rank`, if it has written one."""
        try:
            return messages.decode(self._report_file(rank).read_text(), WorkerReport)
        except FileNotFoundError:
            return None

    def _presence_file(self, rank: int) -> Path:
        return self.path / f"present-{rank}"

    def _finished_file(self, rank: int) -> Path:
        return self.path / f"finished-{rank}"

    def _report_file(self, rank: int) -> Path:
        return self.path / f"report-{rank}.json"


def time_request_file(folder: Path) -> Path:
    """Return the file in a run's folder that a worker creates to ask for time to save."""
    return folder / "asked-for-time"


def newest_checkpoint(folder: Path) -> str | None:
    """Return the path of the newest checkpoint that a worker of the run in `folder` has saved; None without one."""
    try:
        return (folder / environment.CHECKPOINT_FILE).read_text() or None
    except (OSError, UnicodeDecodeError):
        return None


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        return False


# --- The error that a run raises (pure) -------------------------------------------------------------------------------

FORCED_EXIT_CODE = 86
"""The exit code with which a worker's own watchdog ends it after a report, if its threads cannot be interrupted."""


@dataclass(frozen=True)
class WorkerResults:
    """Everything known after the last worker has ended.

    Attributes:
        reports: the workers' reports, the earliest first.
        dead_ranks: the ranks that were found dead first.
        dead_since: the earliest time at which they can have died, in nanoseconds since the epoch.
        watchdog_report: the watchdog's report on all ranks.
        codes: exit code of each rank that ended before the agent ended the others; negative for a signal.
        signals: the signals that the launcher received.
        killed: whether the launcher killed workers after their grace period.
        workers: how many there were.
        first_rank: the rank of the first of them; all other ranks here are local ranks.
        ends: what is known of the end of ranks that died, where the exit code is not.
    """

    reports: Sequence[WorkerReport] = ()
    dead_ranks: Sequence[int] = ()
    codes: Mapping[int, int] | None = None
    signals: Sequence[int] = ()
    killed: bool = False
    workers: int = 0
    first_rank: int = 0
    dead_since: int = 0
    watchdog_report: WatchdogReport | None = None
    ends: Mapping[int, str] | None = None

    @property
    def failures(self) -> list[WorkerReport]:
        """The reports of failed workers, the earliest first; those that only repeat the watchdog's report come last."""
        return sorted(
            (report for report in self.reports if not report.stopped), key=lambda report: report.repeats_watchdog
        )


def combine(hosts: Sequence[WorkerResults], signals: Sequence[int] = ()) -> WorkerResults:
    """Return the results of all hosts of a job as one, in which local ranks are ranks.

    Args:
        hosts: their results, with times on one clock.
        signals: that the launcher of the job received.
    """
    reports: list[WorkerReport] = []
    dead: list[tuple[int, int]] = []
    codes: dict[int, int] = {}
    ends: dict[int, str] = {}
    for host in hosts:
        first = host.first_rank
        for report in host.reports:
            peers = tuple(first + rank for rank in report.dead_peers)
            reports.append(structs.replace(report, rank=first + report.rank, dead_peers=peers))
        dead += [(host.dead_since, first + rank) for rank in host.dead_ranks]
        codes |= {first + rank: code for rank, code in (host.codes or {}).items()}
        ends |= {first + rank: text for rank, text in (host.ends or {}).items()}
    reports.sort(key=lambda report: report.time)
    return WorkerResults(
        reports,
        [rank for _, rank in sorted(dead)],
        codes,
        signals,
        any(host.killed for host in hosts),
        sum(host.workers for host in hosts),
        dead_since=min((since for since, _ in dead), default=0),
        watchdog_report=next((host.watchdog_report for host in hosts if host.watchdog_report is not None), None),
        ends=ends,
    )


def raise_failure(results: WorkerResults) -> None:
    """Raise the error of the run; return if there is none.

    Raises:
        WorkerError: a worker failed. Exiting on a signal that the launcher received is no failure.
        LockstepError: all workers failed with this same error, which is therefore not specific to one worker; or some
            repeat the watchdog's report, and none failed otherwise.
        InterruptedRunError: workers shut down cleanly on a signal, or the launcher received SIGTERM.
        KeyboardInterrupt: the launcher received SIGINT.
    """
    error = first_failure(results)
    if error is not None and results.watchdog_report is not None:
        error.report_json = with_exit_details(results.watchdog_report, results).to_json()
    stopped = sorted((report for report in results.reports if report.stopped), key=lambda report: report.rank)
    if error is not None and not ((results.signals or stopped) and _follows_from_signal(error, results)):
        shared = common_error(results) or _watchdog_error(error, results)
        if shared is not None:
            shared.report_json = error.report_json
            raise shared from error
        error.others = later_failures(results, error)
        raise error
    if stopped:
        raise InterruptedRunError(stopped[0].reason, stopped[0].signal_number, stopped[0].checkpoint)
    if results.signals:
        number = results.signals[0]
        how = "the workers did not exit in time and were killed" if results.killed else "the workers have exited"
        if number == signal.SIGINT:
            raise KeyboardInterrupt(how)
        raise InterruptedRunError(f"stopped by {signal_name(number)}: {how}", number)


def first_failure(results: WorkerResults) -> WorkerError | None:
    """Return the first failure, or None if no worker failed.

    A report without dead peers precedes all others, the earliest first; then a death without a report; then a failure
    after a peer's death. The last resort is a worker that repeats the watchdog's report, or that its watchdog ended
    before it could.
    """
    failures = results.failures
    causes = [report for report in failures if not report.dead_peers and not report.repeats_watchdog]
    if causes:
        return _error_from_report(causes[0], results)
    silent = _ranks_without_report(results)
    if silent:
        error = _error_of_silent_rank(silent[0], results)
        error.time = results.dead_since
        return error
    ended_by_watchdog = [rank for rank, code in (results.codes or {}).items() if code == FORCED_EXIT_CODE]
    if results.watchdog_report is not None and (failures[0].repeats_watchdog if failures else ended_by_watchdog):
        return _culprit_error(results.watchdog_report, failures, results, ended_by_watchdog)
    return _error_from_report(failures[0], results) if failures else None


def _error_of_silent_rank(rank: int, results: WorkerResults) -> WorkerError:
    codes, ends = results.codes or {}, results.ends or {}
    if rank in ends and rank not in codes:
        return WorkerError(results.first_rank + rank, "exit", ends[rank])
    if results.signals and rank not in codes:  # it ended with code 0, or so early that nobody has its code
        number = results.signals[0]
        return WorkerError(results.first_rank + rank, "exit", f"ended on {signal_name(number)}", exit_code=128 + number)
    return _error_from_exit_code(results.first_rank + rank, codes.get(rank, 0))


def _ranks_without_report(results: WorkerResults) -> list[int]:
    """Return the local ranks that died without a report, those first that are known to have died first."""
    reported = {report.rank for report in results.reports}
    if results.watchdog_report is not None:
        reported |= {rank for rank, code in (results.codes or {}).items() if code == FORCED_EXIT_CODE}
    seen = [rank for rank in results.codes or {} if rank not in reported]
    dead_ranks = [rank for rank in results.dead_ranks if rank not in reported]
    if results.watchdog_report is not None:  # the others were alive when it was made, and were ended afterwards
        dead = [row.rank - results.first_rank for row in results.watchdog_report.ranks if row.state in ("died", "lost")]
        dead_ranks = [rank for rank in dead_ranks if rank in dead or rank in seen]
    silent = [rank for rank in dead_ranks if rank in seen] or dead_ranks or seen
    culprits = results.watchdog_report.culprits if results.watchdog_report is not None else ()
    return sorted(silent, key=lambda rank: results.first_rank + rank not in culprits)


def _culprit_error(
    report: WatchdogReport, failures: Sequence[WorkerReport], results: WorkerResults, ended_by_watchdog: Sequence[int]
) -> WorkerError:
    """Return the failure of the report's culprit, or else of the first rank that it was raised on or ended."""
    own_ranks = range(results.first_rank, results.first_rank + results.workers)
    for row in report.ranks:
        if row.rank in report.culprits and row.rank in own_ranks and row.state == "raised":  # and joins its threads
            kind, _, reason = row.note.partition(": ")
            return WorkerError(row.rank, kind or "exit", _whole_message(kind, reason, row.traceback), row.traceback)
    culprits = [each for each in failures if results.first_rank + each.rank in report.culprits]
    if failures:
        return _error_from_report((culprits or failures)[0], results)
    kind = {"lost": "RankLostError", "stall": "StallError"}.get(report.kind, "DesyncError")
    error = WorkerError(results.first_rank + ended_by_watchdog[0], kind, report.sentence)
    error.in_collective = True
    return error


def _whole_message(kind: str, first_line: str, traceback: str) -> str:
    """Return the message of an exception of which only the first line is known; `traceback` ends with all of it."""
    starts = list(
        re.finditer(rf"^(?:[\w.]+\.)?{re.escape(kind)}: (?={re.escape(first_line)})", traceback, re.MULTILINE)
    )
    return traceback[starts[-1].end() :].rstrip() if starts and first_line else first_line


def with_exit_details(report: WatchdogReport, results: WorkerResults) -> WatchdogReport:
    """Return `report` with what only the launcher knows: exit codes and the workers' own reports."""
    reports = {results.first_rank + each.rank: each for each in results.failures if not each.repeats_watchdog}
    codes = {
        results.first_rank + rank: code for rank, code in (results.codes or {}).items() if code != FORCED_EXIT_CODE
    }
    rows = []
    for row in report.ranks:
        own = reports.get(row.rank)
        if own is not None:
            note = own.reason if own.kind == "SystemExit" else row.note
            row = structs.replace(row, note=note, traceback=own.traceback or row.traceback)
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
    """Return the worker's exception if `error` repeats the watchdog's report: it is not specific to one worker."""
    for report in results.failures:
        if report.repeats_watchdog and report.pickled and results.first_rank + report.rank == error.rank:
            shared: LockstepError = unpickle(base64.b64decode(report.pickled))
            return shared
    return None


def later_failures(results: WorkerResults, first: WorkerError) -> str:
    """Return one line about the workers that failed after `first`; "" if there are none."""
    kinds: dict[str, list[int]] = {}
    for report in results.reports:
        if not (report.stopped or report.repeats_watchdog) and results.first_rank + report.rank != first.rank:
            kinds.setdefault(report.kind, []).append(results.first_rank + report.rank)
    return "; ".join(f"{ranks_in_words(ranks)} failed later with {kind}" for kind, ranks in kinds.items())


def _error_from_report(report: WorkerReport, results: WorkerResults) -> WorkerError:
    rank = results.first_rank + report.rank
    error = WorkerError(rank, report.kind, report.reason, report.traceback, report.exit_code)
    error.time, error.in_collective = report.time, report.in_collective or report.repeats_watchdog
    return error


def _error_from_exit_code(rank: int, code: int) -> WorkerError:
    if code == UNKNOWN_EXIT_CODE:
        reason = "ended without an error message; its exit code is not known, as the fork server had ended before it"
        return WorkerError(rank, "exit", reason, exit_code=1)
    if code > 0:
        return WorkerError(rank, "exit", f"ended with exit code {code} and without an error message", exit_code=code)
    if code == 0:
        return WorkerError(rank, "exit", "ended with exit code 0 before its work was done", exit_code=1)
    hint = " (as the kernel does when memory runs out)" if code == -signal.SIGKILL else ""
    return WorkerError(rank, "exit", f"killed by {signal_name(-code)}{hint}", exit_code=128 - code)


def _follows_from_signal(error: WorkerError, results: WorkerResults) -> bool:
    """Return whether the worker failed because the launcher, or before it a peer, received a signal."""
    if error.kind in ("exit", "SystemExit"):
        exit_codes = {128 + number for number in results.signals}
        return error.exit_code in exit_codes or (results.killed and error.kind == "exit")
    return error.kind == "KeyboardInterrupt" or error.in_collective
