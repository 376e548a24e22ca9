"""PyTorch's elastic agent as the parent of worker processes: quiet, and without traces in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from typing import Any, Protocol, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.utils.api import macros

from .fork_server import unseen_main
from .meeting import Meeting
from .options import Options

__all__ = ["Agent", "Variables", "make_agent", "run_quietly"]

# The agent looks after its workers this often; 50 ms is little beside starting them.
MONITOR_SECONDS = 0.05

NOISY = ("torch.distributed.elastic", "torch.multiprocessing")


class Employer(Protocol):
    """For whom the agent works."""

    def begin(self, attempt: int, first_rank: int) -> None:
        """Make ready for workers; called with the number of the attempt, and the rank of the first of them."""

    def awaits_words(self) -> bool:
        """Whether the end of one worker is to be passed over for now, as others may still say what they know of it."""


class Variables(LogsSpecs):
    """The environment of the workers, given at the point where the agent asks where they log: nowhere.

    A worker also has the variables that the fork server was started with, where these do not override them.

    Args:
        inherited: what the agent's own variables (RANK, …) override.
        own: what overrides all others, for the attempt of this number.

    Attributes:
        attempt: how often workers have been started before.
    """

    attempt = 0

    def __init__(self, inherited: Mapping[str, str], own: Callable[[int], Mapping[str, str]]) -> None:
        super().__init__(os.devnull)
        self.inherited, self.own = inherited, own

    @property
    def root_log_dir(self) -> str:
        """Called by the agent's logging: no log files are kept."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the variables of each local rank, which it sets in the worker."""
        # an agent counts only the failures on its own node, and by this number the workers of all nodes meet
        ours = {"TORCHELASTIC_ERROR_FILE": "", "TORCHELASTIC_RESTART_COUNT": str(self.attempt)}
        ours |= self.own(self.attempt)
        for rank, agents in envs.items():
            envs[rank] = {**self.inherited, **agents, **ours}
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)


class Agent(LocalElasticAgent):
    """PyTorch's agent, which starts workers without the main module, and can be told to wait for them no longer.

    Args:
        spec: what it runs; its rendezvous handler is a `Meeting`.
        variables: the workers' environment.
        start_method: "forkserver" or "spawn".
        job: told when workers are about to start, and asked whether their ends are to be waited for.

    Attributes:
        codes: exit codes by local rank of those workers of the last attempt that have ended by themselves.
    """

    def __init__(self, spec: WorkerSpec, variables: Variables, start_method: str, job: Employer) -> None:
        super().__init__(spec, variables, start_method=start_method)
        self._variables, self._job = variables, job
        self.codes: dict[int, int] = {}
        self._meeting = cast(Meeting, spec.rdzv_handler)
        self._given_up: set[int] = set()

    def give_up(self) -> None:
        """Let this attempt fail. A worker that left with exit code 0 and no value would be waited for without end."""
        self._given_up.add(self._meeting.round)

    def make_last(self) -> None:
        """Let this be the last attempt, and wait for no other node at its end."""
        self._remaining_restarts = 0
        self._meeting.stopping.set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._variables.attempt = self._meeting.round
        # an agent counts only those restarts for which its own node's workers were the reason
        left = worker_group.spec.max_restarts - self._meeting.round
        self._remaining_restarts = min(self._remaining_restarts, left)
        self._job.begin(self._meeting.round, worker_group.workers[0].global_rank)
        self.codes = {}
        with unseen_main():
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._meeting.round in self._given_up:
            return RunResult(WorkerState.FAILED)
        if self._note_ends() and self._job.awaits_words():
            return RunResult(WorkerState.HEALTHY)  # once the agent has seen a failure, it ends the other workers
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]

    def _note_ends(self) -> bool:
        """Note the exit codes of workers that have ended, and say whether any has in another way than it should."""
        context: Any = self._pcontext  # it has no name for the processes that is meant for others
        processes = dict(enumerate(context._pc.processes))
        ends = wait([process.sentinel for rank, process in processes.items() if rank not in self.codes], 0)
        self.codes |= {rank: process.exitcode for rank, process in processes.items() if process.sentinel in ends}
        return any(self.codes.values())

    def _exit_barrier(self) -> None:
        self._meeting.finish()


def make_agent(
    entry: Callable[..., object],
    args: tuple[object, ...],
    options: Options,
    variables: Variables,
    meeting: Meeting,
    job: Employer,
) -> Agent:
    """An agent that runs ``entry(*args, local_rank)`` in worker processes.

    `entry` and `args` must be picklable by name; `local_rank` is text.
    """
    spec = WorkerSpec(
        role="worker",
        local_world_size=options.workers,
        rdzv_handler=meeting,
        entrypoint=entry,
        args=(*args, macros.local_rank),
        max_restarts=options.restarts,
        monitor_interval=MONITOR_SECONDS,
    )
    return Agent(spec, variables, options.start_method, job)


def run_quietly(agent: Agent) -> RunResult:
    """Run the agent to its end; what it logs from this thread is dropped.

    To be called in a thread of its own: in the main thread the agent would install its signal handlers.
    """
    with _silence(threading.get_ident()):
        return agent.run()  # type: ignore[no-any-return]


@contextmanager
def _silence(thread: int) -> Iterator[None]:
    """Drop what PyTorch's process machinery logs in `thread`."""

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    names = [name for name in logging.root.manager.loggerDict if name.startswith(NOISY)]
    with ExitStack() as undo:
        for logger in map(logging.getLogger, names):
            logger.addFilter(elsewhere)
            undo.callback(logger.removeFilter, elsewhere)
        yield
