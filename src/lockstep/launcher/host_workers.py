"""The workers of this host, in one attempt after another: starts their processes, watches them, and
ends what they leave behind.

Which workers are started, and when, is decided by `fixed_host`, or in an elastic job by the host
that leads (`elastic_jobs.elastic_workers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import environment
from ..system.processes import TERM_GRACE_S, end_orphans
from .options import JobOptions
from .output.worker_output import OutputTarget
from .pulse import Patience
from .supervisor import WatchdogFiles, WorkerSupervisor
from .worker_options import EXIT_GRACE, WatchdogOptions, WorkerOptions
from .worker_process import worker
from .worker_process.fork_server import threads_per_worker
from .workers import Workers

__all__ = ["HostSetup", "HostWorkers", "worker_options"]


@dataclass(frozen=True)
class HostSetup:
    """How a launcher runs the workers of its host.

    Attributes:
        task: what each worker runs, without arguments; picklable by name.
        program: what the job runs, for lists of processes.
        options: of the workers.
        patience: with a launcher that does not answer.
        log: prints a message of the launcher.
        defaults: variables for all workers of this host, where the environment does not have them.
    """

    task: Callable[[], object]
    program: str
    options: WorkerOptions
    patience: Patience
    log: Callable[[str], None]
    defaults: Mapping[str, str]


class HostWorkers:
    """The workers of this host.

    Args:
        setup: how to run them.
        folder: a private directory for this job only.
        output: where the workers write.
        processes: of the workers, of which none has been started.
        signals: that this launcher has received, in order; a handler appends.
        control: the path of the control socket of an elastic job; else "".

    Attributes:
        processes: of the workers.
        watchdog: its files and messages.
        supervisor: of the workers of this attempt; None before the first one.
    """

    def __init__(
        self,
        setup: HostSetup,
        folder: Path,
        output: OutputTarget,
        processes: Workers,
        signals: Sequence[int],
        control: str = "",
    ) -> None:
        options = setup.options
        self.processes = processes
        self.watchdog = WatchdogFiles(
            folder.name, options.watch, options.debug_rank, setup.log, control=control
        )
        self.supervisor: WorkerSupervisor | None = None
        self._setup = setup
        self._signals = signals
        self._run_id = environment.run_id() or folder.name
        worker_setup = worker.WorkerSetup(
            folder, options.threads, output, self._run_id, setup.program, setup.patience
        )
        self._entry = partial(worker.main, setup.task, worker_setup)

    def begin_attempt(self, number: int, first_rank: int) -> WorkerSupervisor:
        """Prepare for the workers of another attempt, once those of the last one have ended;
        returns their supervisor.

        Args:
            number: of attempts before.
            first_rank: the rank of this host's first worker.
        """
        if self.supervisor is not None:
            self.end_left_processes()
        options = self._setup.options
        self.watchdog.start_attempt(number, first_rank, options.workers)
        self.supervisor = WorkerSupervisor(
            self.processes, self._signals, options.exit_grace, options.grace
        )
        return self.supervisor

    def start(self, number: int, variables: Mapping[str, str]) -> None:
        """Start a worker.

        Args:
            number: of the worker on this host.
            variables: of its environment, besides those that all workers of this host have.
        """
        options = self._setup.options
        # the fork server has the environment of the first launch; workers get the current one
        everything = {
            **self._setup.defaults,
            **environment.variables(),
            **environment.variables_for_workers(self._run_id, options.threads, options.debug_rank),
            **self.watchdog.variables(),
            **variables,
        }
        self.processes.start(number, self._entry, everything, options.start_method)

    def end_left_processes(self) -> None:
        """End the processes that workers have left running, in whatever session, and say which.

        After a second signal nothing is waited for.
        """
        term_grace_s = 0.0 if len(self._signals) > 1 else TERM_GRACE_S
        left = end_orphans(self._run_id, keep_children=True, term_grace_s=term_grace_s)
        if left:
            self._setup.log(f"lockstep: ended processes that the ranks left running: {left}")

    def close(self) -> None:
        """End what the workers, which have ended, have left running; close and remove the rest."""
        try:
            self.end_left_processes()
        finally:
            self.watchdog.close()
            self.processes.close()


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
