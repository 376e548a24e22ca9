"""PyTorch's elastic agent as the parent of worker processes: quiet, and without traces in this process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.utils.api import macros

__all__ = ["Agent", "Variables", "make_agent", "run_quietly", "start_fork_server"]

# The agent looks after its workers this often; 50 ms is little beside starting them.
MONITOR_SECONDS = 0.05

NOISY = ("torch.distributed.elastic", "torch.multiprocessing")

# One at a time may hide the main module and show it again.
_starting = threading.Lock()


class Variables(LogsSpecs):
    """The environment of the workers, given at the point where the agent asks where they log: nowhere.

    A worker also has the variables that the fork server was started with, where these do not override them.

    Args:
        inherited: what the agent's own variables (RANK, …) override.
        own: what overrides all others.
    """

    def __init__(self, inherited: Mapping[str, str], own: Mapping[str, str]) -> None:
        super().__init__(os.devnull)
        self.inherited, self.own = inherited, own

    @property
    def root_log_dir(self) -> str:
        """Called by the agent's logging: no log files are kept."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the variables of each local rank, which it sets in the worker."""
        for rank, agents in envs.items():
            envs[rank] = {**self.inherited, **agents, "TORCHELASTIC_ERROR_FILE": "", **self.own}
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)


class Agent(LocalElasticAgent):
    """PyTorch's agent, which starts workers without the main module, and can be told to wait for them no longer."""

    def __init__(self, spec: WorkerSpec, variables: Variables) -> None:
        super().__init__(spec, variables, start_method="forkserver")
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let the run fail. A worker that left with exit code 0 and no value would be waited for without end."""
        self._given_up.set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _unseen_main():
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._given_up.is_set():
            return RunResult(WorkerState.FAILED)
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]


def make_agent(
    entry: Callable[..., object],
    args: tuple[object, ...],
    workers: int,
    variables: Variables,
    meeting: RendezvousHandler,
) -> Agent:
    """An agent that runs ``entry(*args, local_rank)`` in `workers` processes.

    `entry` and `args` must be picklable by name; `local_rank` is text.
    """
    spec = WorkerSpec(
        role="worker",
        local_world_size=workers,
        rdzv_handler=meeting,
        entrypoint=entry,
        args=(*args, macros.local_rank),
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
    )
    return Agent(spec, variables)


def run_quietly(agent: Agent) -> RunResult:
    """Run the agent to its end; what it logs from this thread is dropped.

    To be called in a thread of its own: in the main thread the agent would install its signal handlers.
    """
    with _silence(threading.get_ident()):
        return agent.run()  # type: ignore[no-any-return]


def start_fork_server() -> None:
    """Start multiprocessing's fork server, with PyTorch loaded, unless there is one already."""
    multiprocessing.set_forkserver_preload([f"{__package__}.preload"])
    with _unseen_main():
        resource_tracker.ensure_running()  # before the mask: starting it would unblock SIGINT
        # The mask is inherited. Without it Ctrl-C would end the server while it is loading, with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _unseen_main() -> Iterator[None]:
    """Let multiprocessing take this program's `__main__` for one that a child need not (and must not) run again.

    Work travels by value, so that workers have no use for the main module, and a script without an
    ``if __name__ == "__main__"`` guard would launch itself once more. Starting a process also settles
    multiprocessing's default start method, which is left open again.
    """
    main = sys.modules["__main__"]
    with _starting:
        seen = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
        method = multiprocessing.get_start_method(allow_none=True)
        main.__spec__ = None
        vars(main).pop("__file__", None)
        try:
            yield
        finally:
            vars(main).update(seen)
            if method is None:
                multiprocessing.set_start_method(None, force=True)


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
