"""The workers of one host of an elastic job: starts, watches and ends their processes."""

from __future__ import annotations

import multiprocessing
import selectors
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from .. import environment
from ..elastic.membership import Up, View
from ..elastic.roster import Roster
from ..environment import ElasticWorker
from ..system.processes import TERM_GRACE_S, end_orphans
from . import worker
from .elastic_job import Ended, JobState, Limits, Start
from .fork_server import note_how_to_know, starting_processes
from .log_multiplexer import LogMultiplexer, OutputLine, PipedOutput, open_pipes
from .pulse import Patience
from .script import Script
from .supervisor import StoppedWorkers, WatchdogFiles, WorkerSupervisor
from .worker_options import WorkerOptions
from .worker_status import StatusFolder, newest_checkpoint, time_request_file

__all__ = ["HostSetup", "HostWorkers"]


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
        self, setup: HostSetup, folder: Path, selector: selectors.BaseSelector, on_message: Callable[[int, Up], None]
    ) -> None:
        self._setup, self._folder = setup, folder
        self._log = setup.multiplexer.write_message
        self._roster = Roster(folder, selector, on_message)
        control = str(folder / "control")
        self._watchdog = WatchdogFiles(folder.name, setup.options.watch, None, self._log, control=control)
        self._run_id = environment.run_id() or folder.name
        self._living: list[int] = []
        self._pids: dict[int, int] = {}
        self._local_ranks: dict[int, int] = {}
        self._stopped = StoppedWorkers(setup.options.watch.stall_timeout or environment.stall_timeout())
        self._signals: list[int] = []
        self._attempt = -1
        self._view: tuple[int, ...] = ()
        self._stack = ExitStack()
        self._start_attempt(0)

    def __enter__(self) -> HostWorkers:
        self._stack.callback(self._watchdog.close)
        self._stack.callback(self._roster.close)
        self._stack.callback(self._end_orphans)
        self._pipes = self._stack.enter_context(open_pipes(self._folder, self._write))
        self._stack.callback(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        self._status = StatusFolder(self._folder).for_attempt(attempt)
        self._status.path.mkdir(mode=0o700)
        options = self._setup.options
        self._supervisor = WorkerSupervisor(
            self._status, self._living, self._signals, options.exit_grace, options.grace
        )
        self._watchdog.start_attempt(attempt, 0, options.workers)

    def start(self, message: Start) -> None:
        """Start a worker."""
        if message.attempt > self._attempt:
            self._end_orphans()
            self._start_attempt(message.attempt)
        setup, number = self._setup, message.number
        own = environment.variables_for_workers(
            self._run_id, setup.options.threads, time_request_file(self._folder), None
        )
        elastic = environment.elastic_variable(ElasticWorker(number, self._roster.path, message.joins))
        variables = {**environment.variables(), **setup.variables, **own, **self._watchdog.variables(), **elastic}
        local_rank = next(index for index in count() if index not in self._local_ranks.values())
        self._local_ranks[number] = local_rank
        variables |= environment.position_variables(message.rank, message.size, local_rank, message.local_size)
        variables["TORCHELASTIC_RESTART_COUNT"] = str(self._attempt)
        if message.resume:
            variables["LOCKSTEP_RESUME"] = message.resume
        if message.folder:
            variables["LOCKSTEP_EARLIER_RUN_DIR"] = message.folder
        self._pipes.add(number)
        name = Path(setup.script.name).name
        output, folder = PipedOutput(self._folder), StatusFolder(self._folder)
        threads, patience = setup.options.threads, setup.patience
        worker_setup = worker.WorkerSetup(folder, 0, threads, output, self._run_id, name, patience)
        context: Any = multiprocessing.get_context(setup.options.start_method)
        process = context.Process(target=_run_worker, args=(setup.script.run, worker_setup, number, variables))
        with starting_processes():
            process.start()
        note_how_to_know(process, partial(self._status.is_finished, number))
        self._living.append(number)
        self._pids[number] = process.pid
        self._roster.add(number, process)

    def send(self, number: int, message: Any) -> None:
        """Send a message to a worker."""
        if isinstance(message, View):
            self._view = message.members
        self._roster.send(number, message)

    def kill(self, numbers: Sequence[int], gently: bool) -> None:
        """End workers, at once or after their step."""
        if gently:
            for number in numbers:
                self._local_ranks.pop(number, None)  # who replaces it may begin before it has ended
                self._roster.terminate(number)
            return
        self._supervisor.kill(numbers)
        for number in set(numbers) - self._supervisor.killed_ranks:  # it has not registered yet
            self._roster.kill(number)
            self._supervisor.killed_ranks.add(number)

    def take_ended(self) -> list[Ended]:
        """Return the workers whose processes have ended since the last call."""
        ended = []
        for number in list(self._roster.exit_codes):
            code, report = self._roster.exit_codes.pop(number), self._status.read_report(number)
            self._living.remove(number)
            self._local_ranks.pop(number, None)
            del self._pids[number]
            self._pipes.release(number)
            code = 0 if number in self._supervisor.killed_ranks else code
            ended.append(Ended(number, code, self._status.is_finished(number), report))
        return ended

    def supervise(self, state: JobState, in_training: Iterable[int]) -> None:
        """Print what the watchdog has to say, and enforce the deadlines of a job that ends.

        The workers that are, or have been, `in_training` get no signal, which could kill them while they report that
        the training was stopped by a message.
        """
        self._supervisor.informed |= set(in_training)
        self._watchdog.relay_messages()
        while len(self._signals) < len(state.stops):
            self._signals.append(state.stops[len(self._signals)])
        if state.is_ending or state.stops:
            self._supervisor.check()
        else:
            self._kill_stopped(len(self._living) < state.target)

    def _kill_stopped(self, others_run: bool) -> None:
        """Kill the workers that have been stopped for as long as a stall may last; others replace them."""
        for number in self._stopped.overdue(self._pids, others_run) if self._watchdog.is_enabled else ():
            for_ = f"for {self._stopped.limit_s:g} s (--stall-timeout) while others ran"
            self._log(f"lockstep: rank {self._rank(number)} has been stopped by a signal {for_}; it is killed")
            self._supervisor.kill([number])
            self._supervisor.killed_ranks.discard(number)  # it is lost as any other

    def tick(self) -> None:
        """Do what is due with the connections of workers."""
        self._roster.tick()

    def newest_checkpoint(self) -> str:
        """Return the newest checkpoint that one of the workers has saved; "" without one."""
        return newest_checkpoint(self._folder) or ""

    @property
    def is_empty(self) -> bool:
        """Whether no worker runs."""
        return not self._living

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
        self.kill(self._living, gently=False)
        self._roster.join(_END_S)  # before their folder is removed

    def _end_orphans(self) -> None:
        left = end_orphans(self._run_id, True, term_grace_s=0.0 if len(self._signals) > 1 else TERM_GRACE_S)
        if left:
            self._log(f"lockstep: ended processes that the workers left running: {left}")

    def _write(self, number: int, stream: int, line: OutputLine) -> None:
        self._setup.multiplexer.write(self._rank(number), stream, line)

    def _rank(self, number: int) -> int:
        return self._view.index(number) if number in self._view else number


def _run_worker(task: Callable[[], object], setup: worker.WorkerSetup, number: int, variables: dict[str, str]) -> None:
    """Run `task` in a process of its own; the environment is set first."""
    environment.set_variables(variables)
    worker.main(task, setup, str(number))
