"""Stopping all workers after the same step, on a signal to any of them or at a program's
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from signal import Signals
from typing import NoReturn

import torch

from ..communicator import Communicator
from ..data.loader import Batch, Loader
from ..flight_recorder import in_method, named
from .in_flight import LAG, HostCopy
from .stop_signals import StopSignals

_NAME = "agreement on whether to stop"


class StopRequests:
    """Requests of any worker to end the run: signals, and reasons given by the program.

    Args:
        comm: communicator over the workers.
        signals: the signals that this worker has received.
    """

    def __init__(self, comm: Communicator, signals: StopSignals) -> None:
        self._comm = comm
        self._signals = signals
        self._pending_polls: deque[Callable[[], bool]] = deque()
        self.reason = ""

    @property
    def signalled(self) -> bool:
        """Whether this worker has received a signal."""
        return self._signals.received is not None

    def forget_polls(self) -> None:
        """Forget the polls in flight: the workers have changed."""
        self._pending_polls.clear()

    def agree(self) -> tuple[Signals | None, str]:
        """Exchange the requests; returns (a signal that any worker has received, a reason), equal
        on all workers.
        """
        with in_method("Trainer.fit"), named(_NAME):
            requests = self._comm.allgather_object((self._signals.received, self.reason))
        self.reason = next((reason for _, reason in requests if reason), "")
        return next(
            (Signals(number) for number, _ in requests if number is not None), None
        ), self.reason

    def poll(self) -> bool:
        """Return whether any worker has received a signal; every worker must call this equally
        often.

        Among several workers the answer is that of an earlier poll, so that no worker waits.
        """
        if self._comm.size == 1:
            return self.signalled
        self._pending_polls.append(self._start_poll())
        return self._end_polls(LAG)

    def end_polls(self) -> bool:
        """Wait for the answers of all polls so far; return whether any worker had received a signal
        by then.
        """
        return self.signalled if self._comm.size == 1 else self._end_polls(0)

    def _end_polls(self, left: int) -> bool:
        stop = False
        while len(self._pending_polls) > left:
            stop = self._pending_polls.popleft()() or stop
        return stop

    def _start_poll(self) -> Callable[[], bool]:
        flag = torch.full((1,), float(self.signalled), device=self._comm.device)
        with in_method("Trainer.fit"), named(_NAME):
            finish = self._comm.iallreduce(flag).wait
        if flag.device.type == "cpu":
            return lambda: bool(finish() > 0)
        on_host = HostCopy(finish())
        return lambda: on_host.read()[0] > 0


class StoppableLoader:
    """A loader for an evaluation that polls for stop requests before each batch but the first.

    Args:
        loader: the loader of the batches.
        stop_requests: the requests to poll.
        stop: called when a worker has requested a stop.
    """

    def __init__(
        self, loader: Loader, stop_requests: StopRequests, stop: Callable[[], NoReturn]
    ) -> None:
        self.comm = loader.comm
        self.virtual_workers = loader.virtual_workers
        self.global_batch_size = loader.global_batch_size
        self.steps = loader.steps
        self._loader = loader
        self._stop_requests = stop_requests
        self._stop = stop

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of `epoch` until a worker requests a stop."""
        for number, batch in enumerate(self._loader.epoch(epoch)):
            if number and self._stop_requests.poll():
                self._stop()
            yield batch
        if self._stop_requests.end_polls():
            self._stop()
