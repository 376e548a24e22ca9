"""Running an entry point in the worker processes of this machine, as a whole job or as one node's part of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult

from .. import environment
from ..errors import LockstepError
from ..stores import loopback_variables
from . import agent, worker
from .failure import Failure
from .folder import Folder, time_file
from .interruption import collected_signals
from .meeting import Meeting
from .options import Options
from .outcome import Ending, conclude, first_failure
from .streams import Streams
from .supervision import Supervision
from .sweep import MOMENT, sweep
from .watching import Watching

__all__ = ["Job", "run"]

# An end is noticed at once in any case. At 50 ms this took 1.4 % of a core, which as many workers as cores would miss.
POLL_SECONDS = 0.2

WORDS_SECONDS = 4.0
"""Seconds that workers have to find out that one of their group has ended, and to say so; they need one or two."""

ALONE_SECONDS = 1.0
"""Seconds in which workers find out by themselves that those of another node have failed, but for those that died."""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Job:
    """One node's part of a run, and how far it has come.

    Attributes:
        folder: a directory that only this user can enter, for the use of this run alone. The caller removes it; where
            the caller is killed, its workers do.
        options: how many workers, and how they are run.
        meeting: where the nodes meet.
        streams: where the workers write.
        tell: shows the launcher's own words.
        first_rank: the rank of this node's first worker, once the nodes have met.
        is_over: whether the job has ended for a reason that lies with another node.
        why: that reason; "" where this node's workers had failed before.
        has_noted: whether the other nodes have been told of a signal.
    """

    folder: Path
    options: Options
    meeting: Meeting
    streams: Streams
    tell: Callable[[str], None] = _print
    first_rank: int = 0
    signals: list[int] = field(default_factory=list)
    watch: Supervision | None = None
    is_over: bool = False
    why: str = ""
    has_noted: bool = False

    def __post_init__(self) -> None:
        self.watching = Watching(self.folder.name, self.options.watch, self.options.debug_rank, self.tell)
        self._words_due = self._told_due = 0.0

    def begin(self, attempt: int, first_rank: int) -> None:
        """Make ready for the workers that the agent is about to start."""
        if self.watch is not None:
            failure = first_failure(self.ending({}))
            self.tell("workers are started afresh" + (f" after {str(failure).splitlines()[0]}" if failure else ""))
        self.first_rank = first_rank
        folder = Folder(self.folder).attempt(attempt)
        folder.path.mkdir(mode=0o700)
        options = self.options
        self.watching.begin(attempt, first_rank, options.workers)
        self._words_due = 0.0
        self.watch = Supervision(folder, range(options.workers), self.signals, options.patience, options.grace)

    def awaits_words(self) -> bool:
        """Whether workers that were in a group with one that has ended may still say what they know of it."""
        if self.watch is None or self.signals:
            return False
        self._words_due = self._words_due or time.monotonic() + WORDS_SECONDS
        silent = [rank for rank in range(self.options.workers) if not self.watch.folder.has_ended(rank)]
        states, first = self.watching.states(), self.first_rank
        speaking = [first + rank for rank in silent if states.get(first + rank, "runs") in ("waits", "runs")]
        if time.monotonic() < self._words_due and self.watching.are_recorded(speaking):
            return True
        self.watch.end(rank for rank in silent if states.get(first + rank) == "frozen")  # it does not hear anything
        return False

    def pass_on_failure(self) -> None:
        """Tell this node's workers, once, how those of another have failed: nobody there may be left to say it."""
        self._told_due = self._told_due or time.monotonic() + ALONE_SECONDS
        if time.monotonic() >= self._told_due:
            self._told_due = float("inf")
            failure = Failure.first(self.meeting.heard())
            if failure is not None:
                self.watching.take(failure)

    def ending(self, codes: dict[int, int]) -> Ending:
        """What is known of the last attempt; `codes` are exit codes by local rank."""
        watch, size, first = self.watch, self.options.workers, self.first_rank
        if watch is None:
            return Ending(signals=list(self.signals), workers=size)
        lost, at = watch.lost, watch.checked
        report = self.watching.report()
        return Ending(watch.reports(), lost, codes, list(self.signals), watch.killed, size, first, at, report)


def run(task: Callable[[], object], job: Job) -> dict[int, Any]:
    """Run `task` in worker processes and return the value of each of their ranks.

    Args:
        task: picklable by name; called without arguments in every worker.
        job: where and how.

    Raises:
        WorkerError: for the worker of this node that failed first.
        LockstepError: where all workers failed with this very error; the first WorkerError is its cause.
        InterruptedRunError: when the workers stopped because of a signal, or this process was sent SIGTERM.
        KeyboardInterrupt: when this process was sent SIGINT.
        LockstepError: when the workers could not be run at all, or the job has ended elsewhere.
    """
    with collected_signals(job.signals):
        run_id = environment.run_id() or job.folder.name
        setup = worker.Setup(Folder(job.folder), job.options.workers, job.options.threads, job.streams, run_id)
        elastic = _agent_for(task, setup, job)
        try:
            result = _supervise(elastic, job)
            ended = job.watch.ended if job.watch is not None else set()
            codes = {rank: code for rank, code in elastic.codes.items() if code and rank not in ended}
            ending = job.ending(codes)
        finally:
            left = sweep(run_id, spare_children=True, moment=0.0 if len(job.signals) > 1 else MOMENT)
            if left:
                job.tell(f"lockstep: ended what the ranks had left behind: {left}")
            job.watching.close()
    _conclude(ending, "" if job.signals else job.why)
    if isinstance(result, Exception):
        raise LockstepError(f"the workers could not be run: {type(result).__name__}: {result}") from result
    return result.return_values


def _conclude(ending: Ending, why: str) -> None:
    """Raise what has gone wrong here, or the reason `why` for which the workers have been ended, if there is one."""
    if not why or ending.joint is not None:  # all nodes' report may be known on this one alone
        conclude(ending)
    if why:
        raise LockstepError(f"the run was ended: {why}")


def _agent_for(task: Callable[[], object], setup: worker.Setup, job: Job) -> agent.Agent:
    # The fork server has the variables of the first launch; workers get those of now.
    inherited = environment.variables()
    if job.meeting.nodes == 1:
        inherited = loopback_variables() | inherited
    own = environment.variables_for_workers(setup.run_id, setup.threads, time_file(job.folder), job.options.debug_rank)
    variables = agent.Variables(inherited, lambda _: own | job.watching.variables())
    return agent.make_agent(worker.main, (task, setup), job.options, variables, job.meeting, job)


def _supervise(elastic: agent.Agent, job: Job) -> RunResult | Exception:
    with ThreadPoolExecutor(1, "lockstep agent") as pool:
        future = pool.submit(_run, elastic)
        try:
            while not future.done():
                wait([future], POLL_SECONDS)
                _look(elastic, job)
            # Only where the fork server was killed does the agent end before its workers.
            while job.watch is not None and job.watch.check(agent_is_gone=True):
                time.sleep(POLL_SECONDS)
        finally:
            while not future.done():
                elastic.make_last()
                elastic.give_up()
                if job.watch is not None:
                    job.watch.kill()
                wait([future], POLL_SECONDS)
        return future.result()


def _look(elastic: agent.Agent, job: Job) -> None:
    why = job.meeting.keep_in_touch()
    if why and not job.is_over:
        job.is_over, job.why = True, "" if first_failure(job.ending({})) else why
    if job.signals or job.is_over:
        elastic.make_last()
    if job.is_over and not job.signals:
        job.pass_on_failure()
    if job.signals and not job.has_noted:
        job.has_noted = True
        job.meeting.note_interruption(job.signals[0])
    job.watching.pass_on()
    watch = job.watch
    if watch is not None and not watch.check(is_over=job.is_over) and watch.is_late:
        elastic.give_up()


def _run(elastic: agent.Agent) -> RunResult | Exception:
    try:
        return agent.run_quietly(elastic)
    except Exception as error:
        return error
