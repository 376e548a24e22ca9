"""Running an entry point in the worker processes of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult

from .. import environment
from ..errors import LockstepError
from . import agent, worker
from .folder import Folder
from .interruption import collected_signals
from .meeting import OneMachine
from .outcome import Ending, conclude
from .supervision import Supervision

__all__ = ["Options", "run"]

# An end is noticed at once in any case. At 50 ms this took 1.4 % of a core, which as many workers as cores would miss.
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Options:
    """How to run workers.

    Attributes:
        workers: how many.
        threads: threads that PyTorch may use within one operation, in each worker.
        grace: seconds that workers may take to leave after a signal.
    """

    workers: int
    threads: int
    grace: float


def run(task: Callable[[], object], options: Options, folder: Path) -> dict[int, Any]:
    """Run `task` in worker processes and return the value of each rank.

    Args:
        task: picklable by name; called without arguments in every worker.
        options: how many workers, and how they are run.
        folder: a directory that only this user can enter, for the use of this run alone. The caller removes it; where
            the caller is killed, its workers do.

    Raises:
        WorkerError: for the worker that failed first.
        LockstepError: where all workers failed with this very error; the first WorkerError is its cause.
        InterruptedRunError: when the workers stopped because of a signal, or this process was sent SIGTERM.
        KeyboardInterrupt: when this process was sent SIGINT.
        LockstepError: when the workers could not be run at all.
    """
    with _own_streams() as streams, collected_signals() as signals:
        setup = worker.Setup(Folder(folder), options.workers, options.threads, streams)
        supervision = Supervision(setup.folder, range(options.workers), signals, options.grace)
        result = _supervise(_agent_for(task, setup), supervision)
        codes = {} if isinstance(result, Exception) else {f.local_rank: f.exitcode for f in result.failures.values()}
        reports, killed = supervision.reports(), supervision.killed
        ending = Ending(reports, supervision.lost, codes, list(signals), killed, options.workers)
    conclude(ending)
    if isinstance(result, Exception):
        raise LockstepError(f"the workers could not be run: {type(result).__name__}: {result}") from result
    return result.return_values


def _agent_for(task: Callable[[], object], setup: worker.Setup) -> agent.Agent:
    # The fork server has the variables of the first launch; workers get those of now.
    inherited = environment.variables()
    own = {"LOCKSTEP_LAUNCHED": "1", "OMP_NUM_THREADS": str(setup.threads)}
    return agent.make_agent(worker.main, (task, setup), setup.workers, agent.Variables(inherited, own), OneMachine())


def _supervise(elastic: agent.Agent, supervision: Supervision) -> RunResult | Exception:
    with ThreadPoolExecutor(1, "lockstep agent") as pool:
        future = pool.submit(_run, elastic)
        try:
            while not future.done():
                wait([future], POLL_SECONDS)
                if not supervision.check() and supervision.is_late:
                    elastic.give_up()
            # Only where the fork server was killed does the agent end before its workers.
            while supervision.check(agent_is_gone=True):
                time.sleep(POLL_SECONDS)
        finally:
            while not future.done():
                elastic.give_up()
                supervision.kill()
                wait([future], POLL_SECONDS)
        return future.result()


def _run(elastic: agent.Agent) -> RunResult | Exception:
    try:
        return agent.run_quietly(elastic)
    except Exception as error:
        return error


@contextmanager
def _own_streams() -> Iterator[dict[int, Connection]]:
    """Standard output and standard error as they are now, in the form that multiprocessing can pass on."""
    with ExitStack() as stack:
        yield {number: stack.enter_context(Connection(os.dup(number), readable=False)) for number in (1, 2)}
