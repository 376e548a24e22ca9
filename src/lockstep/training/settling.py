"""Looks at the results of steps when the device has them, without making it wait for the host."""

from __future__ import annotations

from collections import deque

import torch

from .step import StepResult

__all__ = ["LAG", "OnHost", "Unsettled"]

LAG = 4
"""Off the CPU, numbers are looked at when this many younger ones are queued."""


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


class Unsettled:
    """The steps whose results have not been looked at yet.

    Args:
        device: where the results come from. On the CPU they are there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._lag = 0 if device.type == "cpu" else LAG
        self._waiting: deque[tuple[StepResult, OnHost]] = deque()

    def add(self, result: StepResult) -> None:
        """A step has been queued."""
        self._waiting.append((result, OnHost(torch.stack([result.loss, result.stop]))))

    def settle(self) -> bool:
        """Look at all but the youngest steps; whether a worker wanted to stop.

        Raises:
            DivergedError: for a loss that is not finite, naming the step; see `StepResult.check`.
        """
        stop = False
        while len(self._waiting) > self._lag:
            stop = _look(*self._waiting.popleft()) or stop
        return stop

    def check(self) -> None:
        """See that every loss is finite. The steps stay: whether a worker wanted to stop is still to be seen.

        Raises:
            DivergedError: as `settle`.
        """
        for entry in self._waiting:
            _look(*entry)


def _look(result: StepResult, on_host: OnHost) -> bool:
    loss, stop = on_host.read()
    if loss - loss != 0:  # NaN or infinite
        result.check()
    return stop > 0
