"""The launcher's supervision of running workers: signals, grace periods, and the watchdog's files
and messages.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import environment
from ..environment.variable_table import (
    STALL_TIMEOUT,
    STALL_WARNING,
    TIMELINE,
    WATCHDOG,
    WATCHDOG_DIR,
)
from ..errors import DataError
from ..flight_recorder import jobs, layout, open_job
from ..flight_recorder.jobs import MessageReader
from ..job.messages import Failure
from ..system.job_folders import JobFolderLock
from ..system.processes import TERM_GRACE_S, is_stopped
from ..watchdog import report as reports
from ..watchdog.diagnosis import ObservationClock
from .job_totals import TotalsOfJob, write_totals
from .remote_hosts.remote_command import redact_variables
from .worker_options import FAILURE_GRACE, WatchdogOptions
from .workers import WorkerProcess, Workers

if TYPE_CHECKING:
    from .metrics import MetricsExport


def program_name(argv: Sequence[str]) -> str:
    """Return the name of the program that `argv` starts, as users know it."""
    return Path(argv[0]).name.replace("__main__.py", "lockstep")


@dataclass
class WorkerSupervisor:
    """The workers of one attempt as the launcher sees them; `check` enforces the deadlines.

    Attributes:
        workers: of this host.
        signals: the signals that this process received, in order; a handler appends.
        exit_grace: seconds that workers may take to exit after a signal.
        save_grace: the same if one of them has asked for time to save.
        dead_ranks: the numbers of the workers that were dead at the first check that found any.
        checked_at: time of the check before that one, in nanoseconds since the epoch: they were
            alive then.
        killed: whether the grace period ran out and the remaining workers were killed.
        informed: the workers that get no signal from here, because they are told in another way.
    """

    workers: Workers
    signals: Sequence[int]
    exit_grace: float
    save_grace: float
    dead_ranks: list[int] = field(default_factory=list)
    killed: bool = False
    informed: set[int] = field(default_factory=set)
    checked_at: int = field(default_factory=time.time_ns)
    _signalled: set[int] = field(default_factory=set)
    _deadline: float = float("inf")
    _kill_at: float = float("inf")
    _stop_requested: bool = False

    def check(self, is_over: bool = False) -> bool:
        """Forward signals, enforce deadlines, and return whether any worker is alive.

        Args:
            is_over: the job cannot continue for another reason, so that the workers must end.
        """
        living = self.workers.living
        self._forward_signals(living)
        failures = self.workers.failures
        now = time.time_ns()
        self.dead_ranks = self.dead_ranks or self.workers.dead
        self.checked_at = self.checked_at if self.dead_ranks else now
        stops = bool(self.signals) or any(failure.stopped for failure in failures)
        self._stop_requested = self._stop_requested or stops
        failed = (
            is_over or bool(self.dead_ranks) or any(not failure.stopped for failure in failures)
        )
        self._set_deadline(failed)
        if failed:
            stopped = [
                number for number, worker in living.items() if worker.pid and is_stopped(worker.pid)
            ]
            self.workers.end(stopped, signal.SIGKILL)  # it cannot clean up
        if living and self.deadline_passed:
            self._end_overdue(living)
        return bool(living)

    @property
    def deadline_passed(self) -> bool:
        """Whether the grace period of the workers is over."""
        needs_time = self._stop_requested and any(
            worker.needs_time for worker in self.workers.all.values()
        )
        extra = self.save_grace - self.exit_grace if needs_time else 0.0
        return time.monotonic() >= self._deadline + max(0.0, extra) * (len(self.signals) < 2)

    def kill_all(self) -> None:
        """Kill every live worker and the processes that it has started."""
        self.killed = True
        self.workers.end(self.workers.living, signal.SIGKILL)

    def _end_overdue(self, living: Mapping[int, WorkerProcess]) -> None:
        """Kill workers past their deadline; without a signal from outside they get SIGTERM and a
        moment first.
        """
        now = time.monotonic()
        if self.signals or now >= self._kill_at:
            self.kill_all()
        elif self._kill_at == float("inf"):
            self.killed = True
            self._kill_at = now + TERM_GRACE_S
            self.workers.end(living, signal.SIGTERM)

    def _forward_signals(self, living: Mapping[int, WorkerProcess]) -> None:
        """Forward the first signal to the workers; one that has not connected does not handle any
        yet.
        """
        if not self.signals:
            return
        connected = {number for number, worker in living.items() if worker.connection is not None}
        new = connected - self._signalled - self.informed
        self.workers.signal(new, self.signals[0])
        self._signalled |= new

    def _set_deadline(self, failed: bool) -> None:
        now = time.monotonic()
        if len(self.signals) > 1:
            self._deadline = now
        elif self._deadline == float("inf") and (failed or self._stop_requested):
            self._deadline = now + (self.exit_grace if self._stop_requested else FAILURE_GRACE)


_STOPPED_POLL_S = (
    0.25  # less than the clock's longest tick, so that all time counts in which this process runs
)


class StoppedWorkers:
    """Finds the workers of an elastic job that have been stopped by a signal for as long as a stall
    may last.

    Only time in which this process has run and another worker was not stopped counts: a whole job
    may be stopped for a night and continue.

    Args:
        limit_s: seconds after which a stall is an error.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._clock = ObservationClock()
        self._next = 0.0

    def overdue(self, pids: Mapping[int, int], others_run: bool = False) -> list[int]:
        """Return those of the workers (number → process) that have been stopped for so long.

        Args:
            pids: the processes of this host's workers.
            others_run: whether there are workers on other hosts.
        """
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _STOPPED_POLL_S
        self._clock.tick()
        stopped = [number for number, pid in pids.items() if is_stopped(pid)]
        if len(stopped) == len(pids) and not others_run:
            return []
        return [number for number in stopped if self._clock.observed_s(number) >= self.limit_s]


# Reading the records of eight ranks takes some milliseconds.
_TOTALS_PERIOD_S = 5.0
_METRICS_PERIOD_S = 1.0

_UNLIMITED_S = 7 * 24 * 3600.0  # seconds that ranks wait for one in a debugger

_FAILURES = {"exit": ("lost", "died", "died"), "SystemExit": ("left", "ended", "ended")}
_ADVICE = {
    "lost": "Read its last output, and the kernel's log on that host (dmesg) for out-of-memory "
    "kills.",
    "left": "Let all ranks run the same number of steps and end together.",
    "raised": "Fix the error in its traceback; the other ranks were ended because of it.",
}


@dataclass
class WatchdogFiles:
    """The launcher's side of the watchdog of one run: the folder for flight records, its messages
    and its report.

    Attributes:
        name: the unique name of the run.
        options: the user's settings of the watchdog.
        debug_rank: the rank that is being debugged, for which the others wait without limit.
        log: prints a message of the launcher.
        folder: of the last attempt; None if the watchdog is off.
        control: the path of the control socket of an elastic job; else "".
    """

    name: str
    options: WatchdogOptions
    debug_rank: int | None
    log: Callable[[str], None]
    folder: Path | None = None
    control: str = ""
    _base: Path | None = field(default=None, repr=False)
    _notes: MessageReader | None = field(default=None, repr=False)
    _has_folder: bool = field(default=True, repr=False)
    _lock: JobFolderLock | None = field(default=None, repr=False)
    _totals: TotalsOfJob | None = field(default=None, repr=False)
    _export: MetricsExport | None = field(default=None, repr=False)
    _next_update: float = field(default=0.0, repr=False)

    @property
    def is_enabled(self) -> bool:
        """Whether the watchdog is enabled."""
        return (self.options.mode or environment.watchdog_mode()) != "off"

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the watchdog for the workers that are about to be
        started.
        """
        chosen = {
            WATCHDOG.name: self.options.mode,
            TIMELINE.name: self.options.timeline,
        }
        limit = self.options.stall_timeout
        chosen[STALL_TIMEOUT.name] = None if limit is None else str(limit)
        if self.debug_rank is not None:
            chosen |= dict.fromkeys((STALL_TIMEOUT.name, STALL_WARNING.name), str(_UNLIMITED_S))
        chosen[WATCHDOG_DIR.name] = str(self.folder) if self.folder is not None else ""
        if not self._has_folder:
            chosen |= {WATCHDOG.name: "off", WATCHDOG_DIR.name: ""}
        return {name: value for name, value in chosen.items() if value is not None}

    def start_attempt(self, attempt: int, first_rank: int, workers: int) -> None:
        """Create the folder for the next workers; if that fails, for want of space say, the
        watchdog is off.
        """
        if not self.is_enabled:
            return
        before = self.folder
        self._update_totals()  # what the workers that have ended have done last
        self.folder = None
        try:
            self._base = self._base or jobs.make_base()
            self.folder = self._base / self.name / f"attempt-{attempt}"
            self._create_folder(self.folder, first_rank, workers)
            self._has_folder = True
            self._totals = self._totals or TotalsOfJob(is_elastic=bool(self.control))
            self._totals.start_attempt(attempt, self.folder)
            self._next_update = 0.0
        except OSError as error:
            self.log(
                f"lockstep: the watchdog is off: {self._base or layout.parent()}: {error.strerror}"
            )
            if self.folder is not None:
                self._remove(self.folder.parent)
            self.folder = None
            self._has_folder = False
        if before is not None:  # the records of the failed attempt are no longer needed
            if self.folder is not None:
                with suppress(OSError):  # it has no events
                    (before / jobs.EVENTS).rename(self.folder / jobs.EVENTS)
            shutil.rmtree(before, ignore_errors=True)

    def _create_folder(self, folder: Path, first_rank: int, workers: int) -> None:
        jobs.remove_dead()
        folder.mkdir(mode=0o700, parents=True)
        self._lock = self._lock or JobFolderLock(folder.parent)
        self._notes = MessageReader(folder)
        words = [program_name(sys.argv), *redact_variables(sys.argv[1:])]
        program = " ".join(words)[:200]
        host = socket.gethostname()
        now = time.time()
        folders = (str(Path.cwd()), self.options.folder)
        job = jobs.JobDescription(
            program, os.getpid(), workers, first_rank, now, host, *folders, control=self.control
        )
        jobs.write_description(folder, job)

    def relay_messages(self) -> None:
        """Print the watchdog's messages since the last call; now and then also add up what the
        ranks have done.
        """
        for text in self._notes.read() if self._notes is not None else ():
            self.log(f"lockstep: {text}")
        if time.monotonic() >= self._next_update:
            self._update_totals()

    def note_members(self, lost: int, joined: int) -> None:
        """Note how many workers of an elastic job were lost, and how many have joined."""
        if self._totals is not None:
            self._totals.lost = lost
            self._totals.joined = joined

    def _update_totals(self) -> None:
        metrics = self.options.metrics
        period_s = _TOTALS_PERIOD_S if metrics is None else _METRICS_PERIOD_S
        self._next_update = time.monotonic() + period_s
        if self._totals is None or self.folder is None:
            return
        try:
            totals = self._totals.update()
            write_totals(self.folder, totals)
            if metrics is not None:
                if self._export is None:
                    # not at the top: Python's HTTP server, which few jobs need, takes 40 ms
                    from .metrics import MetricsExport

                    self._export = MetricsExport(metrics, self.log)
                self._export.publish(totals)
        except Exception as error:  # no job ends because it cannot be measured
            self._totals = None
            self.log(f"lockstep: no metrics any more: {type(error).__name__}: {error}")

    def note(self, text: str) -> None:
        """Note what has happened in an elastic job, for `lockstep top`."""
        if self.folder is not None:
            with suppress(OSError), (self.folder / jobs.EVENTS).open("a") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def any_recorded(self, ranks: Iterable[int]) -> bool:
        """Return whether any of the global `ranks` has a flight record."""
        folder = self.folder
        return folder is not None and any(layout.rank_file(folder, rank).exists() for rank in ranks)

    def report(self) -> reports.Report | None:
        """Return the watchdog's report on all ranks, if there is one."""
        if self.folder is None:
            return None
        try:
            return reports.read(self.folder / "report.json")
        except DataError:
            return None

    def rank_states(self) -> dict[int, str]:
        """Return the states of all ranks according to the report; empty without one."""
        report = self.report()
        return {row.rank: row.state for row in report.ranks} if report is not None else {}

    def deliver_failure(self, failure: Failure) -> None:
        """Make this host's workers raise the `failure` of another host, unless there is a report
        already.
        """
        if self.folder is not None:
            # the disk is full, or that host runs another version
            with suppress(OSError, ValueError):
                report = (
                    reports.from_json(failure.report)
                    if failure.report
                    else _report_on_failure(failure, self.folder)
                )
                reports.write_once(self.folder, report)

    def close(self) -> None:
        """Print the remaining messages and remove the run's records."""
        self.relay_messages()
        if self._export is not None:
            self._export.close()
        if self._totals is not None:
            self._totals.close()
        if self.folder is not None:
            self._remove(self.folder.parent)

    def _remove(self, job: Path) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        jobs.remove(job)


def _report_on_failure(failure: Failure, folder: Path) -> reports.Report:
    """Return a report on a worker of another host, with the states of this host's workers from
    their records.
    """
    from ..watchdog.states import rank_status

    kind, state, verb = _FAILURES.get(failure.kind, ("raised", "raised", f"raised {failure.kind}"))
    reason = failure.reason.strip().partition("\n")[0]
    rows = [
        reports.RankStatus(failure.rank, state, reason, failure.host, traceback=failure.traceback)
    ]
    for recording in open_job(folder).values():
        rows.append(rank_status(recording.state(), True, False, False))
        recording.close()
    rows.sort(key=lambda row: row.rank)
    sentence = f"Rank {failure.rank} on {failure.host} {verb}: {reason}."
    return reports.Report(
        kind, sentence, tuple(rows), (failure.rank,), advice=_ADVICE[kind], time=time.time()
    )
