"""Steps in flight: bounds the steps queued on a device, and checks their results when the device
has computed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import arguments, devices
from ..communicator.requests import register_pending
from .formats import IN_FLIGHT
from .recovery import REGROUP
from .step.step_result import StepResult

__all__ = ["LAG", "HostCopy", "InFlightLimit", "StepsInFlight", "check_in_flight"]

LAG = IN_FLIGHT - 1
"""Off the CPU, a result is read by default when this many later ones are queued."""


def check_in_flight(steps: int) -> int:
    """Check a number of steps in flight, and return it.

    Raises:
        ConfigError: if it is not a whole number of at least 1.
    """
    hint = (
        "1 waits for each step; it cannot be unbounded, because the batches of queued steps need "
        "memory."
    )
    return arguments.whole("max_steps_in_flight", steps, least=1, hint=hint)


class HostCopy:
    """An asynchronous copy of numbers to the host. Reading waits for this copy only, not for work
    queued after it.

    Args:
        numbers: 1-d tensor.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._arrived: Any = None
        self._numbers = numbers
        if devices.copies_in_background(numbers.device):
            self._numbers = numbers.to("cpu", non_blocking=True)
            self._arrived = devices.record_event(numbers.device)

    def read(self) -> list[float]:
        """Wait for the copy, and return the numbers."""
        return [float(number) for number in self.integers()]

    def integers(self) -> list[Any]:
        """Wait for the copy, and return the numbers of an integer tensor as integers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(self._numbers.tolist())


class InFlightLimit:
    """Bounds the number of steps that the host queues on a device: beyond it, the host waits for
    the oldest step.

    Args:
        device: the device. One without streams, such as the CPU, has no queue: a step has ended
            when its call returns.
        max_steps_in_flight: the bound.
    """

    def __init__(self, device: torch.device, max_steps_in_flight: int) -> None:
        self._device = device
        self._ahead = max_steps_in_flight - 1
        self._queued: deque[Any] = deque()

    def record(self) -> None:
        """Record that a step has been queued; beyond the bound, wait for the oldest."""
        if not devices.has_streams(self._device):
            return
        self._queued.append(devices.record_event(self._device))
        while len(self._queued) > self._ahead:
            self._queued.popleft().synchronize()


@dataclass
class _Queued:
    """A step in flight, and its result on the way to the host; None where it is there already, and
    has been checked.
    """

    result: StepResult
    copy: HostCopy | None
    reported: bool = False
    of_earlier_group: bool = False


class StepsInFlight:
    """The steps that are queued, or whose results have not been checked yet, in order.

    Args:
        device: the device that computes the results. On the CPU they are available immediately.
        max_steps_in_flight: number of unfinished steps that may be queued on another device.
        on_loss: called once for each step, in order, with its loss, when it is on the host and
            finite.
    """

    def __init__(
        self,
        device: torch.device,
        max_steps_in_flight: int = IN_FLIGHT,
        on_loss: Callable[[StepResult, float], None] | None = None,
    ) -> None:
        self._lag = 0 if device.type == "cpu" else check_in_flight(max_steps_in_flight) - 1
        self._on_loss = on_loss
        self._queue: deque[_Queued] = deque()
        self._failed = False
        register_pending(self)

    def add(self, result: StepResult) -> None:
        """Add a step that has been queued."""
        loss, _, stop = result.on_hand
        if not isinstance(loss, torch.Tensor):
            self._queue.append(_Queued(result, None))
            return
        numbers = [loss]
        numbers += [stop] if isinstance(stop, torch.Tensor) else []
        numbers += [] if result.grad_norm is None else [result.grad_norm.to(loss.dtype)]
        together = torch.stack(numbers) if len(numbers) > 1 else loss.reshape(1)
        if result.marks is not None:
            together = torch.cat([together, result.marks])
        self._queue.append(_Queued(result, HostCopy(together)))

    def settle(self, whole: bool = False) -> float:
        """Check the results of all but the latest steps; returns the sum of the workers' requests
        in them.

        Args:
            whole: whether to check those of the latest steps as well.

        Raises:
            DivergedError: for a loss that is not finite, naming the step; see `StepResult.check`.
            MismatchError: on every worker, if their hyperparameters or weights differ.
        """
        requests = 0.0
        while len(self._queue) > (0 if whole else self._lag):
            requests += self._inspect(self._queue.popleft())
        return requests

    def settle_at_boundary(self) -> float:
        """Check the steps that `settle` checks; if a worker requests to regroup, the latest ones as
        well, of which a worker that joins knows nothing.
        """
        requests = self.settle()
        if requests >= REGROUP:
            requests += self.settle(whole=True)
        return requests

    def regroup(self) -> None:
        """Keep the losses of the steps in flight, and requests to stop: the group of these steps is
        gone.

        Sums for the comparison of replicas are those of another number of workers. Requests to
        regroup are repeated.
        """
        for queued in self._queue:
            queued.of_earlier_group = True

    def check(self) -> None:
        """Check that every loss is finite. The steps stay in flight, because their stop flags are
        read later.

        Raises:
            DivergedError: see `settle`.
        """
        for queued in list(self._queue):
            self._inspect(queued)

    def wait(self) -> None:
        """Run `check` for `lockstep.synchronize`; an error that has been raised already is not
        raised again.
        """
        if not self._failed:
            self.check()

    def _inspect(self, queued: _Queued) -> float:
        result = queued.result
        if queued.copy is None:
            loss, _, stop = map(float, result.on_hand)
        else:
            numbers = iter(queued.copy.read())
            loss = next(numbers)
            asked = result.on_hand.stop
            stop = next(numbers) if isinstance(asked, torch.Tensor) else asked
            if result.grad_norm is not None:
                result = replace(result, grad_norm=torch.tensor(next(numbers)))
            if result.replicas is not None and not queued.of_earlier_group:
                result.replicas.settle(result.step, list(numbers))
            if loss - loss != 0 and not result.is_skipped:  # NaN or infinite
                self._failed = True
                result.check()
        if not queued.reported:
            queued.reported = True
            if self._on_loss is not None and not result.is_skipped:
                self._on_loss(result, loss)
        return stop % REGROUP if queued.of_earlier_group else stop
