"""`lockstep run --elastic`: workers that are lost are replaced, and their number changes, while the others go on."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import structs

from .. import environment
from ..elastic.control import ControlSocket
from ..elastic.membership import NO_STATE, Coordinator
from ..elastic.roster import Roster
from ..environment import ElasticWorker
from ..errors import LockstepError
from ..interruption import collect_signals
from ..stores import loopback_variables
from ..system.processes import TERM_GRACE_S, end_orphans
from ..watchdog.report import Report
from . import worker
from .fork_server import hidden_main
from .log_multiplexer import LogMultiplexer, OutputLine, PipedOutput, open_pipes
from .run_config import WorkerOptions
from .script import Script
from .supervisor import WatchdogFiles, WorkerSupervisor
from .worker_status import (
    StatusFolder,
    WorkerReport,
    WorkerResults,
    newest_checkpoint,
    raise_failure,
    time_request_file,
)

__all__ = ["Limits", "run_elastic"]

_POLL_S = 0.1
_MOST_FAILED_STARTS = 3  # workers, one after the other, that have ended before they became members
_SAME_ERROR_S = 1.0  # in which all workers raise the same error, if the input is bad
_MOST_RESTARTS = 3  # of all workers, one after the other, without any progress


@dataclass(frozen=True)
class Limits:
    """How many workers an elastic job may have: below `minimum` the training waits, and never more than `maximum`."""

    minimum: int
    maximum: int


def run_elastic(script: Script, options: WorkerOptions, limits: Limits, multiplexer: LogMultiplexer) -> None:
    """Run `script` in workers that may be lost, leave and join.

    Args:
        script: the program.
        options: of the workers; their number at the start is kept by replacing those that are lost.
        limits: of that number.
        multiplexer: prints the workers' lines.

    Raises:
        as `local.run_workers`.
    """
    resume: str | None = None
    restarts, progress = 0, NO_STATE
    signals: list[int] = []
    try:
        with collect_signals(signals):
            while True:
                with TemporaryDirectory(prefix="lockstep-") as folder:
                    job = _Job(Path(folder), script, options, limits, multiplexer, signals, resume)
                    job.run()
                    resume = newest_checkpoint(Path(folder)) or resume
                if not job.restart_reason:
                    return
                restarts = 0 if job.coordinator.progress > progress else restarts + 1
                progress = max(progress, job.coordinator.progress)
                if restarts > _MOST_RESTARTS:
                    times = f"the workers were started again {_MOST_RESTARTS} times without any progress"
                    raise LockstepError(f"{times}, and then {job.restart_reason}")
                where = f"from the checkpoint {resume}" if resume else "from the beginning"
                multiplexer.write_message(f"lockstep: {job.restart_reason}; all workers are started again, {where}")
    finally:
        multiplexer.close()


@dataclass
class _Job:
    """All workers of an elastic job, until it ends or they all have to be started again.

    Attributes:
        restart_reason: why all workers have to be started again; "" if they need not.
        coordinator: of the membership.
    """

    folder: Path
    script: Script
    options: WorkerOptions
    limits: Limits
    multiplexer: LogMultiplexer
    signals: list[int]
    resume: str | None
    restart_reason: str = ""
    _started: int = 0
    _failed_starts: int = 0
    _is_ending: bool = False
    _is_stopping: bool = False
    _kill_at: float = math.inf
    _living: list[int] = field(default_factory=list)
    _reports: dict[int, WorkerReport] = field(default_factory=dict)
    _codes: dict[int, int] = field(default_factory=dict)
    _view: tuple[int, ...] = ()
    _dismissed: set[int] = field(default_factory=set)
    _watchdog_report: Report | None = None
    _newest_checkpoint: str | None = None

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.options.workers, self.limits.minimum)
        self._target = self.options.workers
        self._log = self.multiplexer.write_message
        self._roster = Roster(self.folder, self.coordinator)
        control = str(self.folder / "control")
        self._control = ControlSocket(control, self._resize)
        self._roster.watch(self._control.listener, self._control.answer)
        self._watchdog = WatchdogFiles(self.folder.name, self.options.watch, None, self._log, control=control)
        self._status = StatusFolder(self.folder).for_attempt(0)
        self._status.path.mkdir(mode=0o700)
        self._run_id = environment.run_id() or self.folder.name
        self._supervisor = WorkerSupervisor(
            self._status, self._living, self.signals, self.options.exit_grace, self.options.grace
        )

    def run(self) -> None:
        """Start the workers, and supervise them until the last one has ended.

        Raises:
            the error of the job.
        """
        with ExitStack() as stack:
            stack.callback(self._watchdog.close)
            stack.callback(self._roster.close)
            stack.callback(self._control.close)
            stack.callback(self._end_orphans)
            self._add_output = stack.enter_context(open_pipes(self.folder, self._write))
            stack.callback(self._supervisor.kill, self._living)
            self._watchdog.start_attempt(0, 0, self.options.workers)
            for _ in range(self._target):
                self._start_worker()
            while self._living:
                for number in self._roster.wait(_POLL_S):
                    self._ended(number)
                self._supervise()
                self._roster.send()
        if not self.restart_reason:
            self._raise_failure()

    def _end_orphans(self) -> None:
        left = end_orphans(self._run_id, True, term_grace_s=0.0 if len(self.signals) > 1 else TERM_GRACE_S)
        if left:
            self._log(f"lockstep: ended processes that the workers left running: {left}")

    def _write(self, number: int, stream: int, line: OutputLine) -> None:
        self.multiplexer.write(self._rank(number), stream, line)

    def _rank(self, number: int) -> int:
        """Return the rank of a worker in the newest view, or its number if it is not in it."""
        view = self.coordinator.view
        return view.index(number) if number in view else number

    # --- starts -------------------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        number, self._started = self._started, self._started + 1
        joins = self.coordinator.formed >= 0
        rank = len(self.coordinator.view) if joins else number % self.options.workers  # until it is a member
        own = environment.variables_for_workers(
            self._run_id, self.options.threads, time_request_file(self.folder), None
        )
        elastic = environment.elastic_variable(ElasticWorker(number, self._roster.path, joins))
        variables = {**loopback_variables(), **environment.variables(), **own, **self._watchdog.variables(), **elastic}
        variables |= environment.position_variables(rank, rank + 1 if joins else self.options.workers)
        if self.resume:
            variables["LOCKSTEP_RESUME"] = self.resume
        self._add_output(number)
        output, folder = PipedOutput(self.folder), StatusFolder(self.folder)
        setup = worker.WorkerSetup(folder, 0, self.options.threads, output, self._run_id, Path(self.script.name).name)
        context: Any = multiprocessing.get_context(self.options.start_method)
        process = context.Process(target=_run_worker, args=(self.script.run, setup, number, variables))
        with hidden_main():
            process.start()
        self._living.append(number)
        self._roster.add(number, process)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _ended(self, number: int) -> None:
        """Decide what the end of a worker's process means."""
        self._living.remove(number)
        code, report = self._roster.exit_codes.pop(number), self._status.read_report(number)
        coordinator, rank = self.coordinator, self._rank(number)
        was_member, was_candidate = number in coordinator.members, number in coordinator.candidates
        is_error = was_member and report is not None and not report.stopped and not coordinator.failure
        if self._is_ending or self._is_stopping or is_error:
            self._note_end(number, code, report)
            if is_error and not self._is_stopping:
                self._end_with_error()
                return  # and the others do not go on
        if code == 0 and self._status.is_finished(number):
            coordinator.left(number)
            self._note_good_end(number, rank, was_member, was_candidate)
            return
        coordinator.lost(number)
        if self._is_ending or self._is_stopping or coordinator.failure or number in self._dismissed:
            return
        if was_candidate:
            self._note_failed_start(number, code, report)
        elif was_member:
            self._log(f"lockstep: rank {rank} was lost ({_how(code)}); {_workers(len(coordinator.members))} on")

    def _end_with_error(self) -> None:
        """End the job because of an error of the program, which other workers may be about to report as well."""
        self._is_ending = True
        self._kill_at = min(self._kill_at, time.monotonic() + _SAME_ERROR_S)

    def _note_good_end(self, number: int, rank: int, was_member: bool, was_candidate: bool) -> None:
        """Note that a worker's program has ended, or that the worker has left."""
        if was_member or (was_candidate and self.coordinator.formed < 0):
            self._is_ending = True
        elif not was_candidate:
            if number not in self._dismissed:
                self._target = max(self.limits.minimum, self._target - 1)
            self._log(f"lockstep: rank {rank} has left; {_workers(len(self.coordinator.members))} on")

    def _note_end(self, number: int, code: int, report: WorkerReport | None) -> None:
        rank = self._rank(number)
        if code and number not in self._supervisor.killed_ranks:
            self._codes[rank] = code
        if report is not None:
            self._reports[rank] = structs.replace(report, rank=rank)

    def _note_failed_start(self, number: int, code: int, report: WorkerReport | None) -> None:
        self._failed_starts += 1
        why = f"{report.kind}: {report.reason}" if report is not None else _how(code)
        members = len(self.coordinator.members)
        if members < self.limits.minimum:  # which would wait for others for ever
            if (report is not None and not members) or self._failed_starts > _MOST_FAILED_STARTS:
                self._note_end(number, code, report)
                self._end_with_error()
        elif self._failed_starts == _MOST_FAILED_STARTS:
            self._target = members
            self._log(f"lockstep: no more workers are started, as {self._failed_starts} could not join ({why})")

    def _raise_failure(self) -> None:
        reports = sorted(self._reports.values(), key=lambda report: report.time)
        workers = len(self.coordinator.view) or self.options.workers
        report = self._watchdog_report
        results = WorkerResults(
            reports, (), self._codes, list(self.signals), self._supervisor.killed, workers, watchdog_report=report
        )
        try:
            raise_failure(results)
        except LockstepError as error:
            error.checkpoint = error.checkpoint or self._newest_checkpoint
            raise

    # --- supervision --------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        coordinator = self.coordinator
        self._watchdog.relay_messages()
        self._announce_view()
        if self.signals and not self._is_stopping:
            self._is_stopping = True
            coordinator.stop(self.signals[0])
        if coordinator.failure and not (self._is_ending or self._is_stopping):
            self.restart_reason = coordinator.failure
            self._is_ending = True
            self._supervisor.kill(self._living)
        if self._is_ending or self._is_stopping:
            self._watchdog_report = self._watchdog.report()
            self._newest_checkpoint = newest_checkpoint(self.folder)
            self._roster.send()
            self._dismiss_candidates()
            self._supervisor.check()
            if time.monotonic() >= self._kill_at:
                self._supervisor.kill(self._living)
        elif not coordinator.complete:
            for _ in range(self._target - len(set(self._living) - self._dismissed)):
                self._start_worker()

    def _dismiss_candidates(self) -> None:
        """End the workers that would join a job that is ending, and would wait for its members for ever."""
        if self.coordinator.formed >= 0:
            candidates = self.coordinator.candidates
            self._dismissed.update(candidates)
            self._supervisor.kill(candidates)

    def _resize(self, workers: int) -> str:
        """Change the number of workers, on request of `lockstep resize`; returns what is done."""
        coordinator, (least, most) = self.coordinator, (self.limits.minimum, self.limits.maximum)
        if not least <= workers <= most:
            raise LockstepError(f"expected {least} to {most} workers, as the job was started with, got {workers}")
        if workers > coordinator.most:
            why = "each worker needs a virtual worker, or a sample of each global batch"
            raise LockstepError(f"expected at most {coordinator.most} workers, got {workers}: {why}")
        if self._is_ending or self._is_stopping or coordinator.complete:
            raise LockstepError("the job is ending")
        before, self._target, self._failed_starts = self._target, workers, 0
        staying = [number for number in coordinator.members if number not in self._dismissed]
        for number in [*coordinator.candidates, *reversed(staying)][: max(0, before - workers)]:
            self._dismissed.add(number)
            self._roster.terminate(number)
        return f"{before} workers before, {workers} after the step in progress"

    def _announce_view(self) -> None:
        view = self.coordinator.view
        joined = [str(view.index(number)) for number in view if self._view and number not in self._view]
        if joined:
            self._failed_starts = 0
            ranks = f"rank{'s'[: len(joined) != 1]} {', '.join(joined)}"
            self._log(f"lockstep: {ranks} joined; {_workers(len(view))} on")
        self._view = view


def _workers(count: int) -> str:
    return f"{count} workers go" if count != 1 else "1 worker goes"


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _run_worker(task: Callable[[], object], setup: worker.WorkerSetup, number: int, variables: dict[str, str]) -> None:
    """Run `task` in a process of its own; the environment is set first."""
    environment.set_variables(variables)
    worker.main(task, setup, str(number))
