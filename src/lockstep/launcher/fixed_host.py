"""The launcher of one host of a job of fixed size: it starts the workers of this host, supervises
them, and starts all again after a failure as often as the job allows.

`FixedHost` does so for any task, and `run_program` for a user's program, whose output goes where
its user wants it. What the launchers of several hosts agree upon is in `links` and `coordinator`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from .host_workers import HostSetup, HostWorkers, worker_options
from .links import OneHost
from .options import JobOptions
from .output.log_multiplexer import LogMultiplexer
from .output.output_lines import RankLogFiles
from .output.terminal import lend_terminal
from .output.worker_output import FileOutput, OutputTarget, inherit_output, pipe_output
from .pulse import Patience, Pulse
from .start_line import write_start_line
from .supervisor import WorkerSupervisor
from .worker_options import WorkerOptions
from .worker_process.script import Script
from .worker_status import WorkerResults, first_failure, raise_failure
from .workers import Workers

__all__ = ["FixedHost", "OutputSettings", "run_host_share", "run_program"]

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


_NETWORK = "network"  # the folder of the link clocks, in that of the job


class FixedHost:
    """This host, from the first start of its workers to the end of their last attempt.

    Args:
        setup: how to run the workers.
        hosts: of the job.
        folder: a private directory for this run only. The caller removes it; if the caller is
            killed, its workers do.
        output: where the workers write.
        shows_progress: whether to show that workers are being started, if that takes long.
        is_blocked: returns whether the launcher waits for whoever reads its output.

    Attributes:
        workers: of this host.
        first_rank: the rank of the first of them, known when the hosts have met.
    """

    def __init__(
        self,
        setup: HostSetup,
        hosts: OneHost,
        folder: Path,
        output: OutputTarget,
        shows_progress: bool = True,
        is_blocked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.first_rank = 0
        self._setup = setup
        self._hosts = hosts
        self._signals = hosts.signals
        processes = Workers(folder, hosts.selector)
        self.workers = HostWorkers(setup, folder, output, processes, hosts.signals)
        self._shows_progress = shows_progress
        self._is_blocked = is_blocked
        self._pulse = Pulse(self._beat, is_blocked)
        self._network_folder = folder / _NETWORK
        self._may_restart = True
        self._is_over = False  # another host has ended the job
        self._over_reason = ""  # why; "" if this host's workers had failed before
        self._has_told_signal = False
        self._reports_due = 0.0
        self._remote_failure_due = 0.0

    def run(self) -> None:
        """Run the workers to their end.

        Raises:
            WorkerError: the worker of this host that failed first.
            LockstepError: all workers failed with this same error; the first WorkerError is its
                cause.
            InterruptedRunError: the workers stopped on a signal, or this process received SIGTERM.
            KeyboardInterrupt: this process received SIGINT.
            LockstepError: the workers could not be run at all, or another host ended the job.
        """
        if self._setup.options.network is not None:
            self._network_folder.mkdir(mode=0o700)
        with collect_signals(self._signals):
            try:
                with self._pulse:
                    problem = self._run_attempts()
                results = self._results()
            finally:
                self.workers.close()
        try:
            _raise_failure(results, "" if self._signals else self._over_reason)
        except LockstepError as error:
            error.checkpoint = error.checkpoint or self.workers.processes.checkpoint
            raise
        if problem is not None:
            raise LockstepError(
                f"the workers could not be run: {type(problem).__name__}: {problem}"
            ) from problem

    def _run_attempts(self) -> Exception | None:
        """Run all attempts; returns why workers could not be started, if so."""
        processes = self.workers.processes
        try:
            while (place := self._next_place()) is not None:
                try:
                    supervisor = self._start(place)
                except (
                    OSError,
                    EOFError,
                    LockstepError,
                ) as error:  # the fork server cannot be reached, say
                    return error
                if self._supervise(supervisor, self._setup.options.restarts - place.number):
                    self._end_workers()
                    continue
                if processes.living or self._has_failed():
                    self._end_workers()
                else:
                    self._wait_for_other_hosts()
                return None
        finally:
            while processes.living:  # something has gone wrong here
                processes.end(processes.living, signal.SIGKILL)
                self.turn(POLL_SECONDS)
        return None

    def turn(self, seconds: float) -> None:
        """Wait for messages and the ends of processes, so long at most, and take them."""
        self._hosts.turn(seconds)
        self.workers.processes.tick()

    def _beat(self) -> None:
        """Show the workers and the other launchers that this one runs; in a thread."""
        self.workers.processes.ping()
        self._hosts.ping()

    def _next_place(self) -> Round | None:
        """Return where the workers of this host are to start next, once all hosts are ready; None
        if they are not.
        """
        self._hosts.join(self._setup.options.workers)
        while self._hosts.place is None and self._may_restart:
            self.turn(POLL_SECONDS)
            self._poll()
        return self._hosts.place

    def _start(self, place: Round) -> WorkerSupervisor:
        """Start the workers of an attempt; returns their supervisor.

        Raises:
            LockstepError: this launcher did not run for so long that its workers have ended.
        """
        supervisor = self.begin_attempt(place)
        options = self._setup.options
        hosts = self._hosts
        count = options.workers
        shared = environment.attempt_variables(place.number, options.restarts, hosts.run_id)
        if options.network is not None:
            network = str(options.network)
            shared |= environment.emulation_variables(network, self._network_folder)
        # a fork server that is still loading PyTorch is waited for
        with Activity(
            f"lockstep: starting {count} worker{'s'[: count != 1]}", self._shows_progress
        ):
            for local_rank in range(count):
                rank = place.first_rank + local_rank
                world = World(
                    rank,
                    place.world_size,
                    local_rank,
                    count,
                    hosts.node,
                    hosts.nodes,
                    "lockstep",
                )
                of_worker = environment.world_variables(world, hosts.address, place.port)
                self.workers.start(local_rank, {**of_worker, **shared})
        return supervisor

    def begin_attempt(self, place: Round) -> WorkerSupervisor:
        """Prepare for the workers that are about to be started; returns their supervisor.

        Raises:
            LockstepError: this launcher did not run for so long that its workers have ended.
        """
        lapse = self._lapse
        if lapse:
            raise LockstepError(lapse)
        if self.workers.supervisor is not None:
            failure = first_failure(self._results())
            after = f" after {str(failure).splitlines()[0]}" if failure else ""
            self._setup.log("restarting the workers" + after)
        self.first_rank = place.first_rank
        self.workers.processes.forget()
        self._reports_due = 0.0
        return self.workers.begin_attempt(place.number, place.first_rank)

    def _supervise(self, supervisor: WorkerSupervisor, restarts_left: int) -> bool:
        """Watch the workers until they have ended, or one has failed; returns whether to start all
        again.
        """
        processes = self.workers.processes
        while processes.living and not self._has_failed():
            self.turn(POLL_SECONDS)
            self._poll()
            if self._hosts.next_is_open and self._may_restart:
                return True
        if not self._has_failed():
            return False
        restarts_left = restarts_left if self._may_restart else 0
        while processes.living and self.awaits_reports(restarts_left):
            self.turn(FAILED_POLL_SECONDS)
            self._poll()
        return restarts_left > 0 and self._may_restart

    def _has_failed(self) -> bool:
        """Return whether the process of a worker has ended, but not in good order."""
        return any(
            worker.code is not None and (worker.code or not worker.is_finished)
            for worker in self.workers.processes.all.values()
        )

    def awaits_reports(self, restarts_left: int) -> bool:
        """Return whether workers in a group with a dead worker may still report what they know
        about it.

        Nobody reads that about an attempt after which the workers are restarted.
        """
        if self._signals:
            return False
        processes = self.workers.processes
        watchdog = self.workers.watchdog
        self._reports_due = self._reports_due or time.monotonic() + REPORT_SECONDS
        unreported = [rank for rank, worker in processes.all.items() if not worker.has_reported]
        states = watchdog.rank_states()
        first = self.first_rank
        alive = [
            first + rank
            for rank in unreported
            if states.get(first + rank, "runs") in ("waits", "runs")
        ]
        is_due = time.monotonic() >= self._reports_due
        if not restarts_left and not is_due and watchdog.any_recorded(alive):
            return True
        frozen = [rank for rank in unreported if states.get(first + rank) == "frozen"]
        processes.end(frozen, signal.SIGKILL)  # it handles no signal
        return False

    def _end_workers(self) -> None:
        """End the workers that are left; those that take longer than their grace period are
        killed.
        """
        processes = self.workers.processes
        processes.signal(processes.living, signal.SIGTERM)
        for ended in processes.living.values():
            ended.is_ended_here = True
        while processes.living:
            self.turn(FAILED_POLL_SECONDS)
            self._poll(must_end=True)

    def _wait_for_other_hosts(self) -> None:
        """Wait until the workers of all hosts have finished, or the job cannot go on."""
        self._hosts.done()
        while not self._hosts.all_done and self._may_restart:
            self.turn(POLL_SECONDS)
            self._poll()

    def _poll(self, must_end: bool = False) -> None:
        """Do what is due while workers run.

        Args:
            must_end: whether the workers must end.
        """
        reason = self._lapse or self._hosts.reason
        self._pulse.turn()
        for text in self._hosts.tick():
            self._setup.log(f"lockstep: {text}")
        if reason and not self._is_over:
            self._is_over = True
            self._over_reason = "" if first_failure(self._results()) else reason
        if self._signals or self._is_over:
            self._may_restart = False
        if self._is_over and not self._signals:
            self.deliver_remote_failure()
        if self._signals and not self._has_told_signal:
            self._has_told_signal = True
            self._hosts.interrupt(self._signals[0])
        self.workers.watchdog.relay_messages()
        if self.workers.supervisor is not None:
            self.workers.supervisor.check(is_over=must_end or self._is_over)

    @property
    def _lapse(self) -> str:
        """Why this host is out, because its launcher did not run for too long; "" if it is not."""
        seconds = self._pulse.longest_lapse_s
        limit_s = self._setup.patience.limit_s
        if seconds < limit_s or self._is_blocked():
            return ""
        limit = f"LOCKSTEP_LAUNCHER_TIMEOUT is {limit_s:g} s"
        return (
            f"this launcher did not answer for {seconds:.0f} s ({limit}), and its workers have "
            "ended"
        )

    def deliver_remote_failure(self) -> None:
        """Report another host's failure to this host's workers, once: no rank over there may be
        left to do so.
        """
        now = time.monotonic()
        self._remote_failure_due = self._remote_failure_due or now + LOCAL_DETECTION_SECONDS
        if now >= self._remote_failure_due:
            self._remote_failure_due = float("inf")
            if self._hosts.failure is not None:
                self.workers.watchdog.deliver_failure(self._hosts.failure)

    def _results(self) -> WorkerResults:
        """Return the results of the last attempt."""
        size = self._setup.options.workers
        supervisor = self.workers.supervisor
        if supervisor is None:
            return WorkerResults(signals=list(self._signals), workers=size)
        processes = self.workers.processes
        codes = {
            rank: worker.code
            for rank, worker in processes.all.items()
            if worker.code and not worker.is_ended_here
        }
        return WorkerResults(
            processes.failures,
            supervisor.dead_ranks,
            codes,
            list(self._signals),
            supervisor.killed,
            size,
            self.first_rank,
            supervisor.checked_at,
            self.workers.watchdog.report(),
        )


def _raise_failure(results: WorkerResults, reason: str) -> None:
    """Raise the error of this host's workers, or else `reason`, for which another host ended them,
    if there is one.
    """
    # only this host may have the watchdog's report
    if not reason or results.watchdog_report is not None:
        raise_failure(results)
    if reason:
        raise LockstepError(f"the run was ended: {reason}")


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
        as `FixedHost.run`.
    """
    log = output.multiplexer.write_message
    several_hosts = hosts.nodes > 1
    setup = HostSetup(
        script.run,
        Path(script.name).name,
        options,
        Patience.of(several_hosts),
        log,
        {} if several_hosts else loopback_variables(),
    )
    started: list[FixedHost] = []
    with temporary_job_folder() as folder, ExitStack() as stack:
        first_rank = lambda: started[0].first_rank if started else 0  # noqa: E731
        output_target = stack.enter_context(_open_output(output, folder, options, first_rank))
        is_blocked = lambda: output.multiplexer.is_blocked  # noqa: E731
        host = FixedHost(setup, hosts, folder, output_target, not output.quiet, is_blocked)
        started.append(host)
        try:
            host.run()
        finally:
            stack.close()  # the output of the workers precedes the message about their end
            if options.network is not None and not output.quiet:
                summary = EXTENSION_POINTS.load("summary of an emulated network")
                log(summary(folder / _NETWORK, options.network))
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
