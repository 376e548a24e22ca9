"""Keeps the host a bounded number of steps ahead of the device, and looks at the results when the device has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..communicator.requests import outstanding
from ..errors import ConfigError
from .formats import IN_FLIGHT
from .step import StepResult

__all__ = ["LAG", "OnHost", "Pace", "Unsettled", "check_in_flight"]

LAG = IN_FLIGHT - 1
"""Off the CPU, numbers are looked at when this many younger ones are queued, unless the user says how many."""


def check_in_flight(steps: int) -> int:
    """`steps` itself, if so many can be queued.

    Raises:
        ConfigError: when it is no whole number of at least 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        hint = "1 waits for each step; there is no 'unbounded', as batches that wait for their step need memory."
        raise ConfigError("in_flight", "a whole number of at least 1", steps, hint)
    return steps


class OnHost:
    """Numbers on their way to the host. Reading waits for them alone, not for what the device was given since.

    Args:
        numbers: 1-d tensor.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        self._numbers = numbers

    def read(self) -> list[float]:
        """The numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(number) for number in self._numbers.tolist()]


class Pace:
    """Lets the host queue so many pieces of work, and then wait for the oldest of them.

    Args:
        device: that does the work. The CPU has nothing queued: what is called there has ended when the call returns.
        in_flight: how many.
    """

    def __init__(self, device: torch.device, in_flight: int) -> None:
        self._device, self._ahead = device, in_flight - 1
        self._queued: deque[torch.cuda.Event] = deque()

    def keep(self) -> None:
        """A piece has been queued."""
        if self._device.type != "cuda":
            return
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(torch.cuda.current_stream(self._device))
        self._queued.append(ended)
        while len(self._queued) > self._ahead:
            self._queued.popleft().synchronize()


@dataclass
class _Queued:
    """A step whose result is on its way."""

    result: StepResult
    on_host: OnHost
    told: bool = False


class Unsettled:
    """The steps whose results have not been looked at yet, in order.

    Args:
        device: where the results come from. On the CPU they are there at once.
        in_flight: so many steps may be queued, unfinished, on another device.
        tell: called once for each step, in order, with its loss, when that is here and finite.
    """

    def __init__(
        self,
        device: torch.device,
        in_flight: int = IN_FLIGHT,
        tell: Callable[[StepResult, float], None] | None = None,
    ) -> None:
        self._lag = 0 if device.type == "cpu" else check_in_flight(in_flight) - 1
        self._tell = tell
        self._waiting: deque[_Queued] = deque()
        self._failed = False
        outstanding(self)

    def add(self, result: StepResult) -> None:
        """A step has been queued."""
        numbers = torch.stack([result.loss, result.stop])
        if result.marks is not None:
            numbers = torch.cat([numbers, result.marks])
        self._waiting.append(_Queued(result, OnHost(numbers)))

    def settle(self) -> bool:
        """Look at all but the youngest steps; whether a worker wanted to stop.

        Raises:
            DivergedError: for a loss that is not finite, naming the step; see `StepResult.check`.
            MismatchError: on every worker, where they had other hyperparameters or weights; see there.
        """
        stop = False
        while len(self._waiting) > self._lag:
            stop = self._look(self._waiting.popleft()) or stop
        return stop

    def check(self) -> None:
        """See that every loss is finite. The steps stay: whether a worker wanted to stop is still to be seen.

        Raises:
            DivergedError: as `settle`.
        """
        for queued in list(self._waiting):
            self._look(queued)

    def wait(self) -> None:
        """As `check`, for `lockstep.wait_all`: what has been raised once is not raised again."""
        if not self._failed:
            self.check()

    def _look(self, queued: _Queued) -> bool:
        loss, stop, *marks = queued.on_host.read()
        if queued.result.replicas is not None:
            queued.result.replicas.settle(queued.result.step, marks)
        if loss - loss != 0:  # NaN or infinite
            self._failed = True
            queued.result.check()
        if not queued.told:
            queued.told = True
            if self._tell is not None:
                self._tell(queued.result, loss)
        return stop > 0
