"""PyTorch's elastic agent as the parent of worker processes: quiet, and without traces in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

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


class Variables(LogsSpecs):
    """The environment of the workers, given at the point where the agent asks where they log: nowhere.

    A worker also has the variables that the fork server was started with, where these do not override them.

    Args:
        inherited: what the agent's own variables (RANK, …) override.
        own: what overrides all others.

    Attributes:
        attempt: how often workers have been started before.
    """

    attempt = 0

    def __init__(self, inherited: Mapping[str, str], own: Mapping[str, str]) -> None:
        super().__init__(os.devnull)
        self.inherited, self.own = inherited, own

    @property
    def root_log_dir(self) -> str:
        """Called by the agent's logging: no log files are kept."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the variables of each local rank, which it sets in the worker."""
        # an agent counts only the failures on its own node, and by this number the workers of all nodes meet
        ours = {"TORCHELASTIC_ERROR_FILE": "", "TORCHELASTIC_RESTART_COUNT": str(self.attempt), **self.own}
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
        begin: called before workers start, with the number of the attempt and the rank of the first of them.
    """

    def __init__(
        self, spec: WorkerSpec, variables: Variables, start_method: str, begin: Callable[[int, int], None]
    ) -> None:
        super().__init__(spec, variables, start_method=start_method)
        self._variables, self._begin = variables, begin
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
        self._begin(self._meeting.round, worker_group.workers[0].global_rank)
        with unseen_main():
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._meeting.round in self._given_up:
            return RunResult(WorkerState.FAILED)
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]

    def _exit_barrier(self) -> None:
        self._meeting.finish()


def make_agent(
    entry: Callable[..., object],
    args: tuple[object, ...],
    options: Options,
    variables: Variables,
    meeting: Meeting,
    begin: Callable[[int, int], None],
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
    return Agent(spec, variables, options.start_method, begin)


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
