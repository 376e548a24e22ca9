"""How all workers come to know, at the same place, that one of them wants the run to end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from signal import Signals
from typing import NoReturn

import torch

from ..communicator import Communicator
from ..data.loader import Batch, Loader
from .settling import LAG, OnHost
from .signals import StopSignals

__all__ = ["StoppableLoader", "Stopping"]


class Stopping:
    """The wishes of all workers to end the run: signals, and reasons that a program has.

    Args:
        comm: the workers.
        signals: what this one has been sent.
    """

    def __init__(self, comm: Communicator, signals: StopSignals) -> None:
        self._comm, self._signals = comm, signals
        self._asked: deque[Callable[[], bool]] = deque()
        self.reason = ""

    @property
    def signalled(self) -> bool:
        """Whether this worker has been sent a signal."""
        return self._signals.received is not None

    def agree(self) -> tuple[Signals | None, str]:
        """(the signal that some worker was sent, the reason that some worker has), for all workers the same."""
        wishes = self._comm.allgather_object((self._signals.received, self.reason))
        self.reason = next((reason for _, reason in wishes if reason), "")
        return next((Signals(number) for number, _ in wishes if number is not None), None), self.reason

    def ask(self, wait: bool = False) -> bool:
        """Whether any worker has been sent a signal; every worker must ask equally often.

        Among several workers the answer is that to an earlier question, so that nobody waits for it, and with `wait`
        to all the questions so far.
        """
        if self._comm.size == 1:
            return self.signalled
        self._asked.append(self._question())
        stop = False
        while len(self._asked) > (0 if wait else LAG):
            stop = self._asked.popleft()() or stop
        return stop

    def _question(self) -> Callable[[], bool]:
        flag = torch.full((1,), float(self.signalled), device=self._comm.device)
        finish = self._comm.allreduce_async(flag)
        if flag.device.type == "cpu":
            return lambda: bool(finish() > 0)
        answer = OnHost(finish())
        return lambda: answer.read()[0] > 0


class StoppableLoader:
    """What an evaluation takes from a loader, with the question before each batch whether the run shall end.

    Args:
        loader: what deals out the batches.
        stopping: whom to ask.
        stop: called where the answer is yes.
    """

    def __init__(self, loader: Loader, stopping: Stopping, stop: Callable[[], NoReturn]) -> None:
        self.comm, self.shards = loader.comm, loader.shards
        self._loader, self._stopping, self._stop = loader, stopping, stop

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of `epoch`, as long as nobody wants to stop."""
        for batch in self._loader.epoch(epoch):
            if self._stopping.ask():
                self._stop()
            yield batch
        if self._stopping.ask(wait=True):
            self._stop()
