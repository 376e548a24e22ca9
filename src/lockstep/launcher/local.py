"""Run the workers of this host: an entry point or a user's program in each, as a whole job or as one host of several.

`HostJob` holds the state of one run on this host, `run_workers` supervises the agent that starts the workers, and
`run_host_share` does both for a user's program as `lockstep run` configures it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult

from .. import environment
from ..errors import LockstepError
from ..extension_points import EXTENSION_POINTS
from ..interruption import collect_signals
from ..stores import loopback_variables
from ..system.job_folders import temporary_job_folder
from ..system.processes import TERM_GRACE_S, end_orphans
from . import agent, worker
from .elastic_job import Limits
from .elastic_workers import HostSetup
from .fork_server import threads_per_worker
from .host_protocol import HostFailure
from .log_multiplexer import FileOutput, LogMultiplexer, OutputTarget, RankLogFiles, inherit_output, pipe_output
from .options import JobOptions
from .pulse import Patience, Pulse
from .rendezvous import HostRendezvous
from .script import Script
from .supervisor import WatchdogFiles, WorkerSupervisor, program_name
from .terminal import lend_terminal
from .worker_options import EXIT_GRACE, WatchdogOptions, WorkerOptions
from .worker_status import (
    StatusFolder,
    WorkerResults,
    first_failure,
    newest_checkpoint,
    raise_failure,
    time_request_file,
)

if TYPE_CHECKING:
    from .rendezvous import HostRendezvous

__all__ = [
    "HostJob",
    "OutputSettings",
    "elastic_setup",
    "run_host_share",
    "run_program",
    "run_workers",
]


# --- Running an entry point in the workers of this host ---------------------------------------------------------------

# The end of the agent is noticed at once in any case. Polling every 50 ms took 1.4 % of a core, which a host with as
# many workers as cores lacks.
POLL_SECONDS = 0.2

REPORT_SECONDS = 4.0
"""Seconds for the other workers of a group to detect that a worker has died and to report it; they need 1 to 2 s."""

LOCAL_DETECTION_SECONDS = 1.0
"""Seconds for workers to detect the failure of another host's workers themselves, before the launcher reports it."""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class HostJob:
    """This host's share of a run, and its state.

    Attributes:
        folder: a private directory for this run only. The caller removes it; if the caller is killed, its workers do.
        options: the number of workers and their settings.
        rendezvous: of the agents of all hosts.
        output: where the workers write.
        log: prints a message of the launcher.
        program: what the workers run; by default this process's own program.
        shows_progress: whether to show that workers are being started, if that takes long.
        first_rank: the rank of this host's first worker, known after the rendezvous.
        is_over: whether another host ended the job.
        reason: why it did; "" if this host's workers had failed before.
        published_signal: whether the other hosts know of a signal that this one received.
        is_blocked: returns whether the launcher waits for whoever reads its output.
        pulse: of the launcher, while it supervises workers.
    """

    folder: Path
    options: WorkerOptions
    rendezvous: HostRendezvous
    output_target: OutputTarget
    log: Callable[[str], None] = _print
    program: str = ""
    shows_progress: bool = True
    first_rank: int = 0
    signals: list[int] = field(default_factory=list)
    supervisor: WorkerSupervisor | None = None
    is_over: bool = False
    reason: str = ""
    published_signal: bool = False
    is_blocked: Callable[[], bool] = lambda: False
    pulse: Pulse | None = None

    def __post_init__(self) -> None:
        if not self.program:
            name = program_name(sys.argv)
            self.program = " ".join([name, *sys.argv[1:2]]) if name == "lockstep" else name
        self.watchdog = WatchdogFiles(self.folder.name, self.options.watch, self.options.debug_rank, self.log)
        self._reports_due = self._remote_failure_due = 0.0

    def start_attempt(self, attempt: int, first_rank: int) -> None:
        """Prepare for the workers that the agent is about to start.

        Raises:
            LockstepError: this launcher did not run for so long that its workers have ended.
        """
        if self.lapse:
            raise LockstepError(self.lapse)
        if self.supervisor is not None:
            failure = first_failure(self.results({}))
            self.log("restarting the workers" + (f" after {str(failure).splitlines()[0]}" if failure else ""))
        self.first_rank = first_rank
        folder = StatusFolder(self.folder).for_attempt(attempt)
        folder.path.mkdir(mode=0o700)
        options = self.options
        self.watchdog.start_attempt(attempt, first_rank, options.workers)
        self._reports_due = 0.0
        self.supervisor = WorkerSupervisor(
            folder, range(options.workers), self.signals, options.exit_grace, options.grace
        )

    def awaits_reports(self, restarts_left: int) -> bool:
        """Return whether workers in a group with a dead worker may still report what they know about it.

        Nobody reads that about an attempt after which the workers are restarted.
        """
        if self.supervisor is None or self.signals:
            return False
        self._reports_due = self._reports_due or time.monotonic() + REPORT_SECONDS
        unreported = [rank for rank in range(self.options.workers) if not self.supervisor.folder.has_ended(rank)]
        states, first = self.watchdog.rank_states(), self.first_rank
        alive = [first + rank for rank in unreported if states.get(first + rank, "runs") in ("waits", "runs")]
        if not restarts_left and time.monotonic() < self._reports_due and self.watchdog.any_recorded(alive):
            return True
        self.supervisor.kill(
            rank for rank in unreported if states.get(first + rank) == "frozen"
        )  # it handles no signal
        return False

    @property
    def patience(self) -> Patience:
        """How long a launcher that does not answer is waited for."""
        return Patience.of(several_hosts=self.rendezvous.nodes > 1)

    @property
    def lapse(self) -> str:
        """Why this host is out, because its launcher did not run for too long; "" if it is not."""
        seconds = 0.0 if self.pulse is None else self.pulse.longest_lapse_s
        if self.pulse is None or seconds < self.patience.limit_s or self.is_blocked():
            return ""
        limit = f"LOCKSTEP_LAUNCHER_TIMEOUT is {self.patience.limit_s:g} s"
        return f"this launcher did not answer for {seconds:.0f} s ({limit}), and its workers have ended"

    def is_finished(self, local_rank: int) -> bool:
        """Return whether the work of a worker of this attempt is done."""
        return self.supervisor is not None and self.supervisor.folder.is_finished(local_rank)

    def deliver_remote_failure(self) -> None:
        """Report another host's failure to this host's workers, once: no rank over there may be left to do so."""
        self._remote_failure_due = self._remote_failure_due or time.monotonic() + LOCAL_DETECTION_SECONDS
        if time.monotonic() >= self._remote_failure_due:
            self._remote_failure_due = float("inf")
            failure = HostFailure.earliest(self.rendezvous.remote_failures())
            if failure is not None:
                self.watchdog.deliver_failure(failure)

    def results(self, codes: dict[int, int]) -> WorkerResults:
        """Return the results of the last attempt; `codes` are exit codes by local rank."""
        supervisor, size, first = self.supervisor, self.options.workers, self.first_rank
        if supervisor is None:
            return WorkerResults(signals=list(self.signals), workers=size)
        lost, at = supervisor.dead_ranks, supervisor.checked_at
        report = self.watchdog.report()
        return WorkerResults(
            supervisor.reports(), lost, codes, list(self.signals), supervisor.killed, size, first, at, report
        )


def run_workers(task: Callable[[], object], job: HostJob) -> dict[int, Any]:
    """Run `task` in the worker processes of this host and return its value for each rank.

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
        setup = worker.WorkerSetup(
            StatusFolder(job.folder),
            job.options.workers,
            job.options.threads,
            job.output_target,
            run_id,
            job.program,
            job.patience,
        )
        elastic_agent = _agent_for(task, setup, job)
        try:
            with Pulse(job.folder, job.is_blocked) as job.pulse:
                job.rendezvous.beats = job.pulse.beats
                result = _supervise(elastic_agent, job)
            ended = job.supervisor.killed_ranks if job.supervisor is not None else set()
            codes = {rank: code for rank, code in elastic_agent.codes.items() if code and rank not in ended}
            results = job.results(codes)
        finally:
            left = end_orphans(run_id, keep_children=True, term_grace_s=0.0 if len(job.signals) > 1 else TERM_GRACE_S)
            if left:
                job.log(f"lockstep: ended processes that the ranks left running: {left}")
            job.watchdog.close()
    try:
        _raise_failure(results, "" if job.signals else job.reason)
    except LockstepError as error:
        error.checkpoint = error.checkpoint or newest_checkpoint(job.folder)
        raise
    if isinstance(result, Exception):
        raise LockstepError(f"the workers could not be run: {type(result).__name__}: {result}") from result
    return result.return_values


def _raise_failure(results: WorkerResults, reason: str) -> None:
    """Raise the error of this host's workers, or else `reason`, for which another host ended them, if there is one."""
    if not reason or results.watchdog_report is not None:  # only this host may have the watchdog's report
        raise_failure(results)
    if reason:
        raise LockstepError(f"the run was ended: {reason}")


def _agent_for(task: Callable[[], object], setup: worker.WorkerSetup, job: HostJob) -> agent.Agent:
    # The fork server has the environment of the first launch; workers get the current one.
    inherit_output = environment.variables()
    if job.rendezvous.nodes == 1:
        inherit_output = loopback_variables() | inherit_output
    own = environment.variables_for_workers(
        setup.run_id, setup.threads, time_request_file(job.folder), job.options.debug_rank
    )
    own |= _emulate(job)
    variables = agent.WorkerVariables(inherit_output, lambda _: own | job.watchdog.variables())
    return agent.make_agent(worker.main, (task, setup), job.options, variables, job.rendezvous, job)


_NETWORK = "network"  # the folder of the link clocks, in that of the job


def _emulate(job: HostJob) -> dict[str, str]:
    """Return the variables of the network that is emulated, if one is, and make the folder of its link clocks."""
    network = job.options.network
    if network is None:
        return {}
    folder = job.folder / _NETWORK
    folder.mkdir(mode=0o700, exist_ok=True)
    return environment.emulation_variables(str(network), folder)


def _supervise(elastic_agent: agent.Agent, job: HostJob) -> RunResult | Exception:
    with ThreadPoolExecutor(1, "lockstep agent") as pool:
        future = pool.submit(_run_agent, elastic_agent)
        try:
            while not future.done():
                wait([future], POLL_SECONDS)
                _poll(elastic_agent, job)
            # The agent ends before its workers only if the fork server was killed.
            while job.supervisor is not None and job.supervisor.check(agent_is_gone=True):
                assert job.pulse is not None
                job.pulse.turn()
                time.sleep(POLL_SECONDS)
        finally:
            while not future.done():
                elastic_agent.stop_restarting()
                elastic_agent.fail_attempt()
                if job.supervisor is not None:
                    job.supervisor.kill_all()
                wait([future], POLL_SECONDS)
        return future.result()


def _poll(elastic_agent: agent.Agent, job: HostJob) -> None:
    reason = job.lapse or job.rendezvous.failure_reason()
    assert job.pulse is not None
    job.pulse.turn()
    for text in job.rendezvous.take_notes():
        job.log(f"lockstep: {text}")
    if reason and not job.is_over:
        job.is_over, job.reason = True, "" if first_failure(job.results({})) else reason
    if job.signals or job.is_over:
        elastic_agent.stop_restarting()
    if job.is_over and not job.signals:
        job.deliver_remote_failure()
    if job.signals and not job.published_signal:
        job.published_signal = True
        job.rendezvous.publish_interruption(job.signals[0])
    job.watchdog.relay_messages()
    supervisor = job.supervisor
    if supervisor is not None and not supervisor.check(is_over=job.is_over) and supervisor.deadline_passed:
        elastic_agent.fail_attempt()


def _run_agent(elastic_agent: agent.Agent) -> RunResult | Exception:
    try:
        return agent.run_agent(elastic_agent)
    except Exception as error:
        return error


# --- Running a user's program and relaying its output -----------------------------------------------------------------


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


def run_program(script: Script, options: WorkerOptions, output: OutputSettings, rendezvous: HostRendezvous) -> None:
    """Run `script` in `options.workers` processes, as this host's share of the job of `rendezvous`.

    Raises:
        as `run_workers`.
    """

    jobs: list[HostJob] = []
    with temporary_job_folder() as folder, ExitStack() as stack:
        first_rank = lambda: jobs[0].first_rank if jobs else 0  # noqa: E731
        output_target = stack.enter_context(_open_output(output, folder, options, first_rank))
        log, program = output.multiplexer.write_message, Path(script.name).name
        jobs.append(HostJob(folder, options, rendezvous, output_target, log, program, not output.quiet))
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
                pipe_output(folder, ranks, lambda local, stream, piece: show(first_rank() + local, stream, piece))
            )
        if options.debug_rank is not None:
            output_target = stack.enter_context(lend_terminal(options.debug_rank, output_target))
        yield output_target


# --- One host's share of `lockstep run` -------------------------------------------------------------------------------


def run_host_share(
    script: Script, config: JobOptions, workers: int, multiplexer: LogMultiplexer, rendezvous: HostRendezvous
) -> None:
    """Run this host's workers of `config.program`."""
    threads, watch = threads_per_worker(config, workers), _watchdog_options(config)
    if not config.quiet:
        multiplexer.write_message(_startup_message(workers, threads, config))
    method, debug_rank = config.start_method, config.debug_rank
    network = None if config.network is None else config.network.resolved(workers, environment.usable_cores())
    options = WorkerOptions(
        workers, threads, config.grace, EXIT_GRACE, config.restarts, method, debug_rank, watch, network
    )
    folder = Path(config.output_dir) if config.output_dir is not None else None
    alone = workers == 1 and rendezvous.nodes == 1 and folder is None
    run_program(script, options, OutputSettings(multiplexer, folder, alone, config.tee, config.quiet), rendezvous)


def elastic_setup(script: Script, config: JobOptions, workers: int, multiplexer: LogMultiplexer) -> HostSetup:
    """Return how to run the workers of an elastic job on this host."""
    threads, watch = threads_per_worker(config, workers), _watchdog_options(config)
    if not config.quiet:
        multiplexer.write_message(_startup_message(workers, threads, config))
    options = WorkerOptions(workers, threads, config.grace, EXIT_GRACE, 0, config.start_method, None, watch)
    assert config.elastic is not None
    several = config.nnodes > 1 or config.as_host or config.master_addr is not None
    variables, patience = {} if several else loopback_variables(), Patience.of(several)
    return HostSetup(script, options, Limits(*config.elastic), multiplexer, variables, patience)


def _watchdog_options(config: JobOptions) -> WatchdogOptions:
    environment.watchdog_mode()  # raises for an invalid value before anything starts
    mode = "off" if config.no_watchdog else "strict" if config.strict else None
    timeline = None if config.timeline is None else str(Path(config.timeline).absolute())
    folder = "" if config.output_dir is None else str(Path(config.output_dir).absolute())
    return WatchdogOptions(mode, config.stall_timeout, timeline, folder)


def _startup_message(workers: int, threads: int, config: JobOptions) -> str:
    of = f"{threads} thread{'s'[: threads != 1]}" + (" each" if workers > 1 else "")
    text = f"lockstep run: {workers} worker{'s'[: workers != 1]}, {of} ({environment.usable_cores()} cores)"
    if config.output_dir is None:
        return text
    return f"{text}, output in {config.output_dir}/" + ("rank.*/std*" if config.tee else "rank-*.log")
