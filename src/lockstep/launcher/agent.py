"""PyTorch's elastic agent as the parent of worker processes, without log files and signal handlers of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.utils.api import macros

from ..activity import Activity
from .fork_server import note_how_to_know, starting_processes
from .rendezvous import HostRendezvous
from .worker_options import WorkerOptions

__all__ = ["Agent", "WorkerVariables", "make_agent", "run_agent"]

# The agent polls its workers this often; 50 ms is little compared with their start.
MONITOR_SECONDS = 0.05

SILENCED_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


class AgentCallbacks(Protocol):
    """The callbacks of the agent, and whether it shows that it starts workers."""

    shows_progress: bool

    def start_attempt(self, attempt: int, first_rank: int) -> None:
        """Prepare for workers; called with the number of the attempt and the rank of the first worker."""

    def awaits_reports(self, restarts_left: int) -> bool:
        """Return whether to ignore the failure of a worker for now, because others may still report about it."""

    def is_finished(self, local_rank: int) -> bool:
        """Return whether the work of a worker of this attempt is done."""


class WorkerVariables(LogsSpecs):
    """The environment variables of the workers, set when the agent asks where they log, which is nowhere.

    A worker also has the environment of the fork server, except where these variables override it.

    Args:
        inherited: variables that the agent's own (RANK, …) override.
        own: variables that override all others, by the number of the attempt.

    Attributes:
        attempt: number of restarts so far.
    """

    attempt = 0

    def __init__(self, inherited: Mapping[str, str], own: Callable[[int], Mapping[str, str]]) -> None:
        super().__init__(os.devnull)
        self.inherited, self.own = inherited, own

    @property
    def root_log_dir(self) -> str:
        """The folder of log files; none are written."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Set each worker's variables; the agent calls it with those of each local rank."""
        # an agent counts only failures on its own host, and workers of all hosts rendezvous by this number
        fixed = {"TORCHELASTIC_ERROR_FILE": "", "TORCHELASTIC_RESTART_COUNT": str(self.attempt)}
        fixed |= self.own(self.attempt)
        for rank, agents in envs.items():
            envs[rank] = {**self.inherited, **agents, **fixed}
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)


class Agent(LocalElasticAgent):
    """PyTorch's agent, which starts workers without the main module and can abandon an attempt.

    Args:
        spec: its rendezvous handler is a `HostRendezvous`.
        variables: the workers' environment.
        start_method: "forkserver" or "spawn".
        job: its `start_attempt` and `awaits_reports` are called.

    Attributes:
        codes: exit codes by local rank of the workers of the last attempt that ended by themselves.
    """

    def __init__(self, spec: WorkerSpec, variables: WorkerVariables, start_method: str, job: AgentCallbacks) -> None:
        super().__init__(spec, variables, start_method=start_method)
        self._variables, self._job = variables, job
        self.codes: dict[int, int] = {}
        self._host_rendezvous = cast(HostRendezvous, spec.rdzv_handler)
        self._failed_attempts: set[int] = set()

    def fail_attempt(self) -> None:
        """Fail this attempt. The agent would wait forever for a worker that exits with code 0 and no value."""
        self._failed_attempts.add(self._host_rendezvous.round)

    def stop_restarting(self) -> None:
        """Make this the last attempt, and do not wait for other hosts at its end."""
        self._remaining_restarts = 0
        self._host_rendezvous.stopping.set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._variables.attempt = self._host_rendezvous.round
        # an agent counts only restarts caused by workers of its own host
        left = worker_group.spec.max_restarts - self._host_rendezvous.round
        self._remaining_restarts = min(self._remaining_restarts, left)
        self._job.start_attempt(self._host_rendezvous.round, worker_group.workers[0].global_rank)
        self.codes = {}
        count = worker_group.spec.local_world_size
        # a fork server that is still loading PyTorch is waited for
        activity = Activity(f"lockstep: starting {count} worker{'s'[: count != 1]}", self._job.shows_progress)
        with activity, starting_processes():
            started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext  # torch has no public attribute for the processes
        for local_rank, process in enumerate(context._pc.processes):
            note_how_to_know(process, partial(self._job.is_finished, local_rank))
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._host_rendezvous.round in self._failed_attempts:
            return RunResult(WorkerState.FAILED)
        if self._record_exits() and self._job.awaits_reports(self._remaining_restarts):
            return RunResult(WorkerState.HEALTHY)  # once the agent sees a failure, it ends the other workers
        result = super()._monitor_workers(worker_group)
        for failure in result.failures.values():  # one that came after the exits were recorded
            self.codes.setdefault(failure.local_rank, failure.exitcode)
        return result  # type: ignore[no-any-return]

    def _record_exits(self) -> bool:
        """Record the exit codes of workers that have ended; returns whether any failed."""
        context: Any = self._pcontext  # torch has no public attribute for the processes
        processes = dict(enumerate(context._pc.processes))
        ends = wait([process.sentinel for rank, process in processes.items() if rank not in self.codes], 0)
        self.codes |= {rank: process.exitcode for rank, process in processes.items() if process.sentinel in ends}
        return any(self.codes.values())

    def _exit_barrier(self) -> None:
        self._host_rendezvous.finish()


def make_agent(
    entry: Callable[..., object],
    args: tuple[object, ...],
    options: WorkerOptions,
    variables: WorkerVariables,
    rendezvous: HostRendezvous,
    job: AgentCallbacks,
) -> Agent:
    """Return an agent that runs ``entry(*args, local_rank)`` in worker processes.

    `entry` and `args` must be picklable by name; `local_rank` is text.
    """
    spec = WorkerSpec(
        role="worker",
        local_world_size=options.workers,
        rdzv_handler=rendezvous,
        entrypoint=entry,
        args=(*args, macros.local_rank),
        max_restarts=options.restarts,
        monitor_interval=MONITOR_SECONDS,
    )
    return Agent(spec, variables, options.start_method, job)


def run_agent(agent: Agent) -> RunResult:
    """Run the agent to its end, without its log messages.

    Call it in a separate thread: in the main thread the agent would install signal handlers.
    """
    with _silence(threading.get_ident()):
        return agent.run()  # type: ignore[no-any-return]


@contextmanager
def _silence(thread: int) -> Iterator[None]:
    """Drop the log records of torch.distributed.elastic and torch.multiprocessing from `thread`."""

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    names = [name for name in logging.root.manager.loggerDict if name.startswith(SILENCED_LOGGERS)]
    with ExitStack() as undo:
        for logger in map(logging.getLogger, names):
            logger.addFilter(elsewhere)
            undo.callback(logger.removeFilter, elsewhere)
        yield
