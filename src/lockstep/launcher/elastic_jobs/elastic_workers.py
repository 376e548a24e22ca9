"""The workers of one host of an elastic job: starts, watches and ends their processes."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ... import environment
from ...elastic.membership import Up, View
from ...environment import ElasticWorker
from ...environment.variable_table import EARLIER_RUN_DIR, RESUME
from ...job.messages import FromAnyWorker
from ...stores import loopback_variables
from ..host_workers import HostSetup, HostWorkers, worker_options
from ..options import JobOptions
from ..output.log_multiplexer import LogMultiplexer
from ..output.output_lines import OutputLine
from ..output.worker_output import PipedOutput, open_pipes
from ..pulse import ELASTIC_LIMIT_S, Patience
from ..start_line import write_start_line
from ..supervisor import StoppedWorkers
from ..worker_process.script import Script
from ..workers import Workers
from .host_messages import Ended, JobState, Start
from .job_size import Limits

__all__ = ["ElasticSetup", "ElasticWorkers", "elastic_setup"]


@dataclass(frozen=True)
class ElasticSetup(HostSetup):
    """How a host runs its workers of an elastic job.

    Attributes:
        limits: of the number of workers of the job.
        multiplexer: prints the workers' lines.
    """

    limits: Limits
    multiplexer: LogMultiplexer


def elastic_setup(
    script: Script, config: JobOptions, workers: int, multiplexer: LogMultiplexer
) -> ElasticSetup:
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
    several_hosts = config.nnodes > 1 or config.as_host or config.master_addr is not None
    pause_s = environment.pause_timeout() or config.stall_timeout or environment.stall_timeout()
    return ElasticSetup(
        script.run,
        Path(script.name).name,
        options,
        Patience.of(several_hosts, ELASTIC_LIMIT_S),
        multiplexer.write_message,
        {} if several_hosts else loopback_variables(),
        Limits(*config.elastic, pause_s),
        multiplexer,
    )


_END_S = 2.0  # for killed processes to end


class ElasticWorkers:
    """The workers of this host in an elastic job, which starts and ends single ones of them.

    Args:
        setup: how to run them.
        folder: a private directory.
        selector: of the launcher's loop.
        on_message: called with the number of a worker and each message from it.
    """

    def __init__(
        self,
        setup: ElasticSetup,
        folder: Path,
        selector: selectors.BaseSelector,
        on_message: Callable[[int, Up], None],
    ) -> None:
        self._setup = setup
        self._folder = folder
        self._signals: list[int] = []
        self._processes = Workers(folder, selector, on_message, FromAnyWorker | Up)
        control = str(folder / "control")
        output = PipedOutput(folder)
        self._workers = HostWorkers(setup, folder, output, self._processes, self._signals, control)
        self._supervisor = self._workers.begin_attempt(0, 0)
        self._attempt = 0
        self._local_ranks: dict[int, int] = {}
        self._retired: set[int] = set()  # local ranks whose devices compute wrong numbers
        self._stopped = StoppedWorkers(
            setup.options.watch.stall_timeout or environment.stall_timeout()
        )
        self._view: tuple[int, ...] = ()
        self._stack = ExitStack()

    def __enter__(self) -> ElasticWorkers:
        self._stack.callback(self._workers.close)
        self._pipes = self._stack.enter_context(open_pipes(self._folder, self._write))
        self._stack.callback(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, message: Start) -> None:
        """Start a worker."""
        if message.attempt > self._attempt:
            self._attempt = message.attempt
            self._supervisor = self._workers.begin_attempt(message.attempt, 0)
        number = message.number
        taken = {*self._local_ranks.values(), *self._retired}
        local_rank = next(index for index in count() if index not in taken)
        self._local_ranks[number] = local_rank
        worker = ElasticWorker(number, self._processes.path, message.joins)
        variables = {
            **environment.elastic_variable(worker),
            **environment.position_variables(
                message.rank, message.size, local_rank, message.local_size
            ),
            "TORCHELASTIC_RESTART_COUNT": str(message.attempt),
        }
        if message.resume:
            variables[RESUME.name] = message.resume
        if message.folder:
            variables[EARLIER_RUN_DIR.name] = message.folder
        self._pipes.add(number)
        self._workers.start(number, variables)

    def send(self, number: int, message: Any) -> None:
        """Send a message to a worker."""
        if isinstance(message, View):
            self._view = message.members
        self._processes.send(number, message)

    def kill(self, numbers: Sequence[int], gently: bool) -> None:
        """End workers, at once or after their step."""
        living = [number for number in numbers if number in self._processes.living]
        if not gently:
            self._processes.end(living, signal.SIGKILL)
            return
        for number in living:
            self._local_ranks.pop(number, None)  # who replaces it may begin before it has ended
        self._processes.signal(living, signal.SIGTERM)

    def retire_device(self, number: int) -> None:
        """Start no other worker on the device of this one: its local rank is not given again."""
        if number in self._local_ranks:
            self._retired.add(self._local_ranks[number])

    def take_ended(self) -> list[Ended]:
        """Return the workers whose processes have ended since the last call."""
        ended = []
        for number in list(self._processes.ended):
            ended_worker = self._processes.remove(number)
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
        self._workers.watchdog.note_members(state.lost, state.joined)
        self._workers.watchdog.relay_messages()
        while len(self._signals) < len(state.stops):
            self._signals.append(state.stops[len(self._signals)])
        if state.is_ending or state.stops:
            self._supervisor.check()
        elif self._workers.watchdog.is_enabled:
            self._kill_stopped(len(self._processes.living) < state.target)

    def _kill_stopped(self, others_run: bool) -> None:
        """Kill the workers that have been stopped for as long as a stall may last; others replace
        them.
        """
        pids = {number: process.pid for number, process in self._processes.living.items()}
        for number in self._stopped.overdue(pids, others_run):
            for_ = f"for {self._stopped.limit_s:g} s (--stall-timeout) while others ran"
            self._setup.log(
                f"lockstep: rank {self._rank(number)} has been stopped by a signal {for_}; it is "
                "killed"
            )
            self._processes.end([number], signal.SIGKILL)
            self._processes[number].is_ended_here = False  # it is lost as any other

    def tick(self) -> None:
        """Do what is due with the connections of workers."""
        self._processes.tick()

    def ping(self) -> None:
        """Show the workers that this launcher runs; another thread may call this."""
        self._processes.ping()

    def newest_checkpoint(self) -> str:
        """Return the newest checkpoint that one of the workers has saved; "" without one."""
        return self._processes.checkpoint or ""

    @property
    def is_empty(self) -> bool:
        """Whether no worker runs."""
        return not self._processes.living

    @property
    def killed(self) -> bool:
        """Whether workers were killed because they did not end in time."""
        return self._supervisor.killed

    @property
    def watchdog_report(self) -> Any:
        """The watchdog's report on all ranks, if there is one."""
        return self._workers.watchdog.report()

    def note(self, text: str) -> None:
        """Note what has happened in the job, for `lockstep top`."""
        self._workers.watchdog.note(text)

    def end(self) -> None:
        """End the workers that are left."""
        self.kill(list(self._processes.living), gently=False)
        self._processes.join(_END_S)  # before their folder is removed

    def _write(self, number: int, stream: int, line: OutputLine) -> None:
        """Print a line of a worker, as that of its rank."""
        self._setup.multiplexer.write(self._rank(number), stream, line)

    def _rank(self, number: int) -> int:
        """Return the rank of a worker in the newest view; its number if it has none."""
        return self._view.index(number) if number in self._view else number
