"""The workers of one host of an elastic job: starts, watches and ends their processes."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ... import environment
from ...elastic.membership import Up, View
from ...environment import ElasticWorker
from ...environment.variable_table import EARLIER_RUN_DIR, RESUME
from ...job.messages import FromAnyWorker
from ...stores import loopback_variables
from ..local import worker_options
from ..options import JobOptions
from ..output.log_multiplexer import LogMultiplexer
from ..output.output_lines import OutputLine
from ..output.worker_output import PipedOutput, open_pipes
from ..pulse import ELASTIC_LIMIT_S, Patience
from ..start_line import write_start_line
from ..supervisor import (
    StoppedWorkers,
    WatchdogFiles,
    WorkerSupervisor,
    end_left_processes,
)
from ..worker_options import WorkerOptions
from ..worker_process import worker
from ..worker_process.script import Script
from ..workers import Workers
from .host_messages import Ended, JobState, Start
from .job_size import Limits

__all__ = ["HostSetup", "HostWorkers", "elastic_setup"]


@dataclass(frozen=True)
class HostSetup:
    """How a host runs its workers.

    Attributes:
        script: the program.
        options: of the workers.
        limits: of the number of workers of the job.
        multiplexer: prints the workers' lines.
        variables: for all workers of this host.
        patience: with a launcher that does not answer.
    """

    script: Script
    options: WorkerOptions
    limits: Limits
    multiplexer: LogMultiplexer
    variables: dict[str, str]
    patience: Patience


def elastic_setup(
    script: Script, config: JobOptions, workers: int, multiplexer: LogMultiplexer
) -> HostSetup:
    """Return how to run the workers of an elastic job on this host.

    Args:
        script: the program.
        config: of the run.
        workers: the most on this host.
        multiplexer: prints the workers' lines.
    """
    options = worker_options(config, workers)
    write_start_line(multiplexer, config, workers, options.threads)
    assert config.elastic is not None
    several = config.nnodes > 1 or config.as_host or config.master_addr is not None
    variables = {} if several else loopback_variables()
    patience = Patience.of(several, ELASTIC_LIMIT_S)
    pause_s = environment.pause_timeout() or config.stall_timeout or environment.stall_timeout()
    limits = Limits(*config.elastic, pause_s)
    return HostSetup(script, options, limits, multiplexer, variables, patience)


_END_S = 2.0  # for killed processes to end


class HostWorkers:
    """The workers of this host: starts, watches and ends their processes.

    Args:
        setup: how to run them.
        folder: a private directory.
        selector: of the launcher's loop.
        on_message: called with the number of a worker and each message from it.
    """

    def __init__(
        self,
        setup: HostSetup,
        folder: Path,
        selector: selectors.BaseSelector,
        on_message: Callable[[int, Up], None],
    ) -> None:
        self._setup = setup
        self._folder = folder
        self._log = setup.multiplexer.write_message
        self._workers = Workers(folder, selector, on_message, FromAnyWorker | Up)
        control = str(folder / "control")
        self._watchdog = WatchdogFiles(
            folder.name, setup.options.watch, None, self._log, control=control
        )
        self._run_id = environment.run_id() or folder.name
        self._local_ranks: dict[int, int] = {}
        self._retired: set[int] = set()  # local ranks whose devices compute wrong numbers
        self._stopped = StoppedWorkers(
            setup.options.watch.stall_timeout or environment.stall_timeout()
        )
        self._signals: list[int] = []
        self._attempt = -1
        self._view: tuple[int, ...] = ()
        self._stack = ExitStack()
        self._start_attempt(0)

    def __enter__(self) -> HostWorkers:
        self._stack.callback(self._watchdog.close)
        self._stack.callback(self._workers.close)
        self._stack.callback(self._end_orphans)
        self._pipes = self._stack.enter_context(open_pipes(self._folder, self._write))
        self._stack.callback(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_attempt(self, attempt: int) -> None:
        """Begin with the workers of another attempt."""
        self._attempt = attempt
        options = self._setup.options
        self._supervisor = WorkerSupervisor(
            self._workers, self._signals, options.exit_grace, options.grace
        )
        self._watchdog.start_attempt(attempt, 0, options.workers)

    def start(self, message: Start) -> None:
        """Start a worker."""
        if message.attempt > self._attempt:
            self._end_orphans()
            self._start_attempt(message.attempt)
        setup = self._setup
        number = message.number
        of_run = environment.variables_for_workers(self._run_id, setup.options.threads, None)
        elastic = environment.elastic_variable(
            ElasticWorker(number, self._workers.path, message.joins)
        )
        variables = {
            **environment.variables(),
            **setup.variables,
            **of_run,
            **self._watchdog.variables(),
            **elastic,
        }
        taken = {*self._local_ranks.values(), *self._retired}
        local_rank = next(index for index in count() if index not in taken)
        self._local_ranks[number] = local_rank
        variables |= environment.position_variables(
            message.rank, message.size, local_rank, message.local_size
        )
        variables["TORCHELASTIC_RESTART_COUNT"] = str(self._attempt)
        if message.resume:
            variables[RESUME.name] = message.resume
        if message.folder:
            variables[EARLIER_RUN_DIR.name] = message.folder
        self._pipes.add(number)
        name = Path(setup.script.name).name
        output = PipedOutput(self._folder)
        threads = setup.options.threads
        patience = setup.patience
        worker_setup = worker.WorkerSetup(
            self._folder, threads, output, self._run_id, name, patience
        )
        entry = partial(worker.main, setup.script.run, worker_setup)
        self._workers.start(number, entry, variables, setup.options.start_method)

    def send(self, number: int, message: Any) -> None:
        """Send a message to a worker."""
        if isinstance(message, View):
            self._view = message.members
        self._workers.send(number, message)

    def kill(self, numbers: Sequence[int], gently: bool) -> None:
        """End workers, at once or after their step."""
        living = [number for number in numbers if number in self._workers.living]
        if not gently:
            self._workers.end(living, signal.SIGKILL)
            return
        for number in living:
            self._local_ranks.pop(number, None)  # who replaces it may begin before it has ended
        self._workers.signal(living, signal.SIGTERM)

    def retire_device(self, number: int) -> None:
        """Start no other worker on the device of this one: its local rank is not given again."""
        if number in self._local_ranks:
            self._retired.add(self._local_ranks[number])

    def take_ended(self) -> list[Ended]:
        """Return the workers whose processes have ended since the last call."""
        ended = []
        for number in list(self._workers.ended):
            ended_worker = self._workers.remove(number)
            self._local_ranks.pop(number, None)
            self._pipes.release(number)
            code = 0 if ended_worker.is_ended_here else ended_worker.code or 0
            ended.append(Ended(number, code, ended_worker.is_finished, ended_worker.failure))
        return ended

    def supervise(self, state: JobState, in_training: Iterable[int]) -> None:
        """Print what the watchdog has to say, and enforce the deadlines of a job that ends.

        The workers that are, or have been, `in_training` get no signal, which could kill them while
        they report that the training was stopped by a message.
        """
        self._supervisor.informed |= set(in_training)
        self._watchdog.note_members(state.lost, state.joined)
        self._watchdog.relay_messages()
        while len(self._signals) < len(state.stops):
            self._signals.append(state.stops[len(self._signals)])
        if state.is_ending or state.stops:
            self._supervisor.check()
        else:
            self._kill_stopped(len(self._workers.living) < state.target)

    def _kill_stopped(self, others_run: bool) -> None:
        """Kill the workers that have been stopped for as long as a stall may last; others replace
        them.
        """
        pids = {number: process.pid for number, process in self._workers.living.items()}
        for number in self._stopped.overdue(pids, others_run) if self._watchdog.is_enabled else ():
            for_ = f"for {self._stopped.limit_s:g} s (--stall-timeout) while others ran"
            self._log(
                f"lockstep: rank {self._rank(number)} has been stopped by a signal {for_}; it is "
                "killed"
            )
            self._workers.end([number], signal.SIGKILL)
            self._workers[number].is_ended_here = False  # it is lost as any other

    def tick(self) -> None:
        """Do what is due with the connections of workers."""
        self._workers.tick()

    def ping(self) -> None:
        """Show the workers that this launcher runs; another thread may call this."""
        self._workers.ping()

    def newest_checkpoint(self) -> str:
        """Return the newest checkpoint that one of the workers has saved; "" without one."""
        return self._workers.checkpoint or ""

    @property
    def is_empty(self) -> bool:
        """Whether no worker runs."""
        return not self._workers.living

    @property
    def killed(self) -> bool:
        """Whether workers were killed because they did not end in time."""
        return self._supervisor.killed

    @property
    def watchdog_report(self) -> Any:
        """The watchdog's report on all ranks, if there is one."""
        return self._watchdog.report()

    def note(self, text: str) -> None:
        """Note what has happened in the job, for `lockstep top`."""
        self._watchdog.note(text)

    def end(self) -> None:
        """End the workers that are left."""
        self.kill(list(self._workers.living), gently=False)
        self._workers.join(_END_S)  # before their folder is removed

    def _end_orphans(self) -> None:
        """End the processes that workers have left running."""
        end_left_processes(self._run_id, self._signals, self._log)

    def _write(self, number: int, stream: int, line: OutputLine) -> None:
        """Print a line of a worker, as that of its rank."""
        self._setup.multiplexer.write(self._rank(number), stream, line)

    def _rank(self, number: int) -> int:
        """Return the rank of a worker in the newest view; its number if it has none."""
        return self._view.index(number) if number in self._view else number
