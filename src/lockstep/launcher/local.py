"""Run the workers of this host: an entry point or a user's program in each, as a whole job or as
one host of several.

`HostJob` holds the state of one run on this host, `run_workers` starts and supervises the workers,
and `run_host_share` does both for a user's program as `lockstep run` configures it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import environment
from ..activity import Activity
from ..errors import LockstepError
from ..extension_points import EXTENSION_POINTS
from ..interruption import collect_signals
from ..stores import loopback_variables
from ..system.job_folders import temporary_job_folder
from ..topology import World
from .coordinator import Round
from .links import OneHost
from .options import JobOptions
from .output.log_multiplexer import LogMultiplexer
from .output.output_lines import RankLogFiles
from .output.terminal import lend_terminal
from .output.worker_output import FileOutput, OutputTarget, inherit_output, pipe_output
from .pulse import Patience, Pulse
from .start_line import write_start_line
from .supervisor import WatchdogFiles, WorkerSupervisor, end_left_processes, program_name
from .worker_options import EXIT_GRACE, WatchdogOptions, WorkerOptions
from .worker_process import worker
from .worker_process.fork_server import threads_per_worker
from .worker_process.script import Script
from .worker_status import WorkerResults, first_failure, raise_failure
from .workers import Workers

__all__ = [
    "HostJob",
    "OutputSettings",
    "run_host_share",
    "run_program",
    "run_workers",
    "worker_options",
]

# The end of a worker is noticed at once in any case. Polling every 50 ms took 1.4 % of a core,
# which a host with as many workers as cores lacks.
POLL_SECONDS = 0.2

FAILED_POLL_SECONDS = 0.05
"""The same after a failure, when only what others still report is waited for."""

REPORT_SECONDS = 4.0
"""Seconds for the other workers of a group to detect that a worker has died and to report it; they
need 1 to 2 s.
"""

LOCAL_DETECTION_SECONDS = 1.0
"""Seconds for workers to detect the failure of another host's workers themselves, before the
launcher reports it.
"""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class HostJob:
    """This host's share of a run, and its state.

    Attributes:
        folder: a private directory for this run only. The caller removes it; if the caller is
            killed, its workers do.
        options: the number of workers and their settings.
        hosts: of the job.
        output_target: where the workers write.
        log: prints a message of the launcher.
        program: what the workers run; by default this process's own program.
        shows_progress: whether to show that workers are being started, if that takes long.
        first_rank: the rank of this host's first worker, known when the hosts have met.
        is_over: whether another host ended the job.
        reason: why it did; "" if this host's workers had failed before.
        has_told_signal: whether the other hosts know of a signal that this one received.
        is_blocked: returns whether the launcher waits for whoever reads its output.
        pulse: of the launcher, while it supervises workers.
        workers: of this host.
    """

    folder: Path
    options: WorkerOptions
    hosts: OneHost
    output_target: OutputTarget
    log: Callable[[str], None] = _print
    program: str = ""
    shows_progress: bool = True
    first_rank: int = 0
    supervisor: WorkerSupervisor | None = None
    is_over: bool = False
    reason: str = ""
    has_told_signal: bool = False
    is_blocked: Callable[[], bool] = lambda: False
    pulse: Pulse | None = None

    def __post_init__(self) -> None:
        self.signals = self.hosts.signals
        if not self.program:
            name = program_name(sys.argv)
            self.program = " ".join([name, *sys.argv[1:2]]) if name == "lockstep" else name
        self.watchdog = WatchdogFiles(
            self.folder.name, self.options.watch, self.options.debug_rank, self.log
        )
        self.workers = Workers(self.folder, self.hosts.selector)
        self._reports_due = self._remote_failure_due = 0.0

    def turn(self, seconds: float) -> None:
        """Wait for messages and the ends of processes, so long at most, and take them."""
        self.hosts.turn(seconds)
        self.workers.tick()

    def ping(self) -> None:
        """Show the workers and the other launchers that this one runs; in a thread."""
        self.workers.ping()
        self.hosts.ping()

    def start_attempt(self, attempt: int, first_rank: int) -> None:
        """Prepare for the workers that are about to be started.

        Raises:
            LockstepError: this launcher did not run for so long that its workers have ended.
        """
        if self.lapse:
            raise LockstepError(self.lapse)
        if self.supervisor is not None:
            failure = first_failure(self.results())
            self.log(
                "restarting the workers"
                + (f" after {str(failure).splitlines()[0]}" if failure else "")
            )
        self.first_rank = first_rank
        self.workers.forget()
        options = self.options
        self.watchdog.start_attempt(attempt, first_rank, options.workers)
        self._reports_due = 0.0
        self.supervisor = WorkerSupervisor(
            self.workers, self.signals, options.exit_grace, options.grace
        )

    def awaits_reports(self, restarts_left: int) -> bool:
        """Return whether workers in a group with a dead worker may still report what they know
        about it.

        Nobody reads that about an attempt after which the workers are restarted.
        """
        if self.supervisor is None or self.signals:
            return False
        self._reports_due = self._reports_due or time.monotonic() + REPORT_SECONDS
        unreported = [rank for rank, worker in self.workers.all.items() if not worker.has_reported]
        states = self.watchdog.rank_states()
        first = self.first_rank
        alive = [
            first + rank
            for rank in unreported
            if states.get(first + rank, "runs") in ("waits", "runs")
        ]
        if (
            not restarts_left
            and time.monotonic() < self._reports_due
            and self.watchdog.any_recorded(alive)
        ):
            return True
        frozen = [rank for rank in unreported if states.get(first + rank) == "frozen"]
        self.workers.end(frozen, signal.SIGKILL)  # it handles no signal
        return False

    @property
    def patience(self) -> Patience:
        """How long a launcher that does not answer is waited for."""
        return Patience.of(several_hosts=self.hosts.nodes > 1)

    @property
    def lapse(self) -> str:
        """Why this host is out, because its launcher did not run for too long; "" if it is not."""
        seconds = 0.0 if self.pulse is None else self.pulse.longest_lapse_s
        if self.pulse is None or seconds < self.patience.limit_s or self.is_blocked():
            return ""
        limit = f"LOCKSTEP_LAUNCHER_TIMEOUT is {self.patience.limit_s:g} s"
        return (
            f"this launcher did not answer for {seconds:.0f} s ({limit}), and its workers have "
            "ended"
        )

    def deliver_remote_failure(self) -> None:
        """Report another host's failure to this host's workers, once: no rank over there may be
        left to do so.
        """
        self._remote_failure_due = (
            self._remote_failure_due or time.monotonic() + LOCAL_DETECTION_SECONDS
        )
        if time.monotonic() >= self._remote_failure_due:
            self._remote_failure_due = float("inf")
            if self.hosts.failure is not None:
                self.watchdog.deliver_failure(self.hosts.failure)

    def results(self) -> WorkerResults:
        """Return the results of the last attempt."""
        supervisor = self.supervisor
        size = self.options.workers
        first = self.first_rank
        if supervisor is None:
            return WorkerResults(signals=list(self.signals), workers=size)
        codes = {
            rank: worker.code
            for rank, worker in self.workers.all.items()
            if worker.code and not worker.is_ended_here
        }
        lost = supervisor.dead_ranks
        at = supervisor.checked_at
        report = self.watchdog.report()
        return WorkerResults(
            self.workers.failures,
            lost,
            codes,
            list(self.signals),
            supervisor.killed,
            size,
            first,
            at,
            report,
        )


def run_workers(task: Callable[[], object], job: HostJob) -> None:
    """Run `task` in the worker processes of this host.

    Args:
        task: a function without arguments, picklable by name.
        job: this host's share of the run.

    Raises:
        WorkerError: the worker of this host that failed first.
        LockstepError: all workers failed with this same error; the first WorkerError is its cause.
        InterruptedRunError: the workers stopped on a signal, or this process received SIGTERM.
        KeyboardInterrupt: this process received SIGINT.
        LockstepError: the workers could not be run at all, or another host ended the job.
    """
    with collect_signals(job.signals):
        run_id = environment.run_id() or job.folder.name
        options = job.options
        setup = worker.WorkerSetup(
            job.folder, options.threads, job.output_target, run_id, job.program, job.patience
        )
        attempts = _Attempts(partial(worker.main, task, setup), _shared_variables(setup, job), job)
        try:
            with Pulse(job.ping, job.is_blocked) as job.pulse:
                problem = attempts.run()
            results = job.results()
        finally:
            end_left_processes(run_id, job.signals, job.log)
            job.watchdog.close()
            job.workers.close()
    try:
        _raise_failure(results, "" if job.signals else job.reason)
    except LockstepError as error:
        error.checkpoint = error.checkpoint or job.workers.checkpoint
        raise
    if problem is not None:
        raise LockstepError(
            f"the workers could not be run: {type(problem).__name__}: {problem}"
        ) from problem


def _raise_failure(results: WorkerResults, reason: str) -> None:
    """Raise the error of this host's workers, or else `reason`, for which another host ended them,
    if there is one.
    """
    # only this host may have the watchdog's report
    if not reason or results.watchdog_report is not None:
        raise_failure(results)
    if reason:
        raise LockstepError(f"the run was ended: {reason}")


def _shared_variables(setup: worker.WorkerSetup, job: HostJob) -> dict[str, str]:
    """Return the variables that are the same for all workers of this host in all attempts.

    The fork server has the environment of the first launch; workers get the current one.
    """
    variables = environment.variables()
    if job.hosts.nodes == 1:
        variables = loopback_variables() | variables
    variables |= environment.variables_for_workers(
        setup.run_id, setup.threads, job.options.debug_rank
    )
    return variables | _emulate(job)


_NETWORK = "network"  # the folder of the link clocks, in that of the job


def _emulate(job: HostJob) -> dict[str, str]:
    """Return the variables of the network that is emulated, if one is, and make the folder of its
    link clocks.
    """
    network = job.options.network
    if network is None:
        return {}
    folder = job.folder / _NETWORK
    folder.mkdir(mode=0o700, exist_ok=True)
    return environment.emulation_variables(str(network), folder)


class _Attempts:
    """Starts the workers of this host, and starts all again after a failure as often as the job
    allows.

    Args:
        entry: what each worker runs, with its local rank; picklable by name.
        variables: of the environment of all of them.
        job: this host's share of the run.
    """

    def __init__(
        self, entry: Callable[[int], object], variables: dict[str, str], job: HostJob
    ) -> None:
        self._entry = entry
        self._variables = variables
        self._job = job
        self._may_restart = True

    def run(self) -> Exception | None:
        """Run all attempts; returns why workers could not be started, if so."""
        job = self._job
        try:
            while (place := self._next_place()) is not None:
                try:
                    self._start(place)
                except (
                    OSError,
                    EOFError,
                    LockstepError,
                ) as error:  # the fork server cannot be reached, say
                    return error
                if self._supervise(job.options.restarts - place.number):
                    self._end()
                    continue
                if job.workers.living or self._has_failed():
                    self._end()
                else:
                    self._wait_for_other_hosts()
                return None
        finally:
            while job.workers.living:  # something has gone wrong here
                job.workers.end(job.workers.living, signal.SIGKILL)
                job.turn(POLL_SECONDS)
        return None

    def _next_place(self) -> Round | None:
        """Return where the workers of this host are to start next, once all hosts are ready; None
        if they are not.
        """
        job = self._job
        job.hosts.join(job.options.workers)
        while job.hosts.place is None and self._may_restart:
            job.turn(POLL_SECONDS)
            self._poll()
        return job.hosts.place

    def _wait_for_other_hosts(self) -> None:
        """Wait until the workers of all hosts have finished, or the job cannot go on."""
        job = self._job
        job.hosts.done()
        while not job.hosts.all_done and self._may_restart:
            job.turn(POLL_SECONDS)
            self._poll()

    def _start(self, place: Round) -> None:
        job = self._job
        count = self._job.options.workers
        job.start_attempt(place.number, place.first_rank)
        of_attempt = environment.attempt_variables(
            place.number, job.options.restarts, job.hosts.run_id
        )
        of_attempt |= job.watchdog.variables()
        # a fork server that is still loading PyTorch is waited for
        with Activity(f"lockstep: starting {count} worker{'s'[: count != 1]}", job.shows_progress):
            for local_rank in range(count):
                node = job.hosts.node
                nodes = job.hosts.nodes
                rank = place.first_rank + local_rank
                world = World(rank, place.world_size, local_rank, count, node, nodes, "lockstep")
                of_worker = environment.world_variables(world, job.hosts.address, place.port)
                variables = {
                    **self._variables,
                    **of_worker,
                    **of_attempt,
                }  # the launcher may have some of these
                job.workers.start(local_rank, self._entry, variables, job.options.start_method)

    def _supervise(self, restarts_left: int) -> bool:
        """Watch the workers until they have ended, or one has failed; returns whether to start all
        again.
        """
        job = self._job
        while job.workers.living and not self._has_failed():
            job.turn(POLL_SECONDS)
            self._poll()
            if job.hosts.next_is_open and self._may_restart:
                return True
        if not self._has_failed():
            return False
        restarts_left = restarts_left if self._may_restart else 0
        while job.workers.living and job.awaits_reports(restarts_left):
            job.turn(FAILED_POLL_SECONDS)
            self._poll()
        return restarts_left > 0 and self._may_restart

    def _has_failed(self) -> bool:
        """Return whether the process of a worker has ended, but not in good order."""
        workers = self._job.workers.all.values()
        return any(
            worker.code is not None and (worker.code or not worker.is_finished)
            for worker in workers
        )

    def _end(self) -> None:
        """End the workers that are left; those that take longer than their grace period are
        killed.
        """
        job = self._job
        job.workers.signal(job.workers.living, signal.SIGTERM)
        for ended in job.workers.living.values():
            ended.is_ended_here = True
        while job.workers.living:
            job.turn(FAILED_POLL_SECONDS)
            self._poll(is_over=True)

    def _poll(self, is_over: bool = False) -> None:
        """Do what is due while workers run.

        Args:
            is_over: whether the workers must end.
        """
        job = self._job
        reason = job.lapse or job.hosts.reason
        assert job.pulse is not None
        job.pulse.turn()
        for text in job.hosts.tick():
            job.log(f"lockstep: {text}")
        if reason and not job.is_over:
            job.is_over = True
            job.reason = "" if first_failure(job.results()) else reason
        if job.signals or job.is_over:
            self._may_restart = False
        if job.is_over and not job.signals:
            job.deliver_remote_failure()
        if job.signals and not job.has_told_signal:
            job.has_told_signal = True
            job.hosts.interrupt(job.signals[0])
        job.watchdog.relay_messages()
        if job.supervisor is not None:
            job.supervisor.check(is_over=is_over or job.is_over)


@dataclass(frozen=True)
class OutputSettings:
    """Where the output of the workers goes.

    Attributes:
        multiplexer: prints the lines of all workers, prefixed with their ranks.
        folder: instead, the folder for one log file per rank.
        direct: the only worker inherits this process's standard streams.
        tee: print the lines and also write two log files per rank in the folder.
        quiet: do not show that workers are being started.
    """

    multiplexer: LogMultiplexer
    folder: Path | None = None
    direct: bool = False
    tee: bool = False
    quiet: bool = False


def run_program(
    script: Script, options: WorkerOptions, output: OutputSettings, hosts: OneHost
) -> None:
    """Run `script` in `options.workers` processes, as this host's share of the job on `hosts`.

    Raises:
        as `run_workers`.
    """

    jobs: list[HostJob] = []
    with temporary_job_folder() as folder, ExitStack() as stack:
        first_rank = lambda: jobs[0].first_rank if jobs else 0  # noqa: E731
        output_target = stack.enter_context(_open_output(output, folder, options, first_rank))
        log = output.multiplexer.write_message
        program = Path(script.name).name
        jobs.append(HostJob(folder, options, hosts, output_target, log, program, not output.quiet))
        jobs[0].is_blocked = lambda: output.multiplexer.is_blocked
        try:
            run_workers(script.run, jobs[0])
        finally:
            stack.close()  # the output of the workers precedes the message about their end
            if options.network is not None and not output.quiet:
                summary = EXTENSION_POINTS.load("summary of an emulated network")
                log(summary(jobs[0].folder / _NETWORK, options.network))
            output.multiplexer.close()


@contextmanager
def _open_output(
    output: OutputSettings, folder: Path, options: WorkerOptions, first_rank: Callable[[], int]
) -> Iterator[OutputTarget]:
    with ExitStack() as stack:
        output_target: OutputTarget
        if output.folder is not None and not output.tee:
            output.folder.mkdir(parents=True, exist_ok=True)
            output_target = FileOutput(output.folder)
        elif output.direct:
            output_target = stack.enter_context(inherit_output())
        else:
            show = output.multiplexer.write
            if output.folder is not None:
                show = stack.enter_context(RankLogFiles(output.folder, show)).write
            ranks = range(options.workers)
            output_target = stack.enter_context(
                pipe_output(
                    folder,
                    ranks,
                    lambda local, stream, piece: show(first_rank() + local, stream, piece),
                )
            )
        if options.debug_rank is not None:
            output_target = stack.enter_context(lend_terminal(options.debug_rank, output_target))
        yield output_target


def run_host_share(
    script: Script, config: JobOptions, workers: int, multiplexer: LogMultiplexer, hosts: OneHost
) -> None:
    """Run this host's workers of `config.program`."""
    options = worker_options(config, workers)
    write_start_line(multiplexer, config, workers, options.threads)
    folder = Path(config.output_dir) if config.output_dir is not None else None
    alone = workers == 1 and hosts.nodes == 1 and folder is None and not config.as_host
    run_program(
        script, options, OutputSettings(multiplexer, folder, alone, config.tee, config.quiet), hosts
    )


def worker_options(config: JobOptions, workers: int) -> WorkerOptions:
    """Return how the options of a run say that the workers of this host are run.

    Args:
        config: of the run.
        workers: their number; in an elastic job the most of them.

    Raises:
        ConfigError: the environment has no valid mode of the watchdog.
    """
    network = (
        None
        if config.network is None
        else config.network.resolved(workers, environment.usable_cores())
    )
    return WorkerOptions(
        workers,
        threads_per_worker(config, workers),
        config.grace,
        EXIT_GRACE,
        config.restarts,
        config.start_method,
        config.debug_rank,
        _watchdog_options(config),
        network,
    )


def _watchdog_options(config: JobOptions) -> WatchdogOptions:
    environment.watchdog_mode()  # raises for an invalid value before anything starts
    mode = "strict" if config.strict else None
    if config.no_watchdog:
        mode = "off"
    timeline = None if config.timeline is None else str(Path(config.timeline).absolute())
    folder = "" if config.output_dir is None else str(Path(config.output_dir).absolute())
    # the first host serves the metrics of the whole job
    metrics = config.metrics() if config.node_rank == 0 else None
    return WatchdogOptions(mode, config.stall_timeout, timeline, folder, metrics)
