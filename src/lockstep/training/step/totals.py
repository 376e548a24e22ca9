"""What the passes of a step are given, and what they add to its sums beside the gradients: the
loss, its count, requests and marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...data.loader import Batch
from .precision import Number, Precision


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the passes of a step are given.

    Attributes:
        loss: (data, samples) → (sum of the loss, count), as the strategy has wrapped it.
        precision: the precision of the passes.
        batch: this worker's part of the global batch.
        number: the number of the step.
        requests: what this worker requests, see `recovery.STOP` and `REGROUP`.
        marks: 1-d tensor that is summed over the workers with the totals, see
            `ReplicaCheck.marks`.
    """

    loss: Any
    precision: Precision
    batch: Batch
    number: int
    requests: float
    marks: torch.Tensor


class Totals(Protocol):
    """The totals of passes; several may be added up."""

    def add(self, total: torch.Tensor, count: Number) -> None:
        """Add the sum of a pass's loss, and what it is a sum over."""

    def tensor(self, requests: float | None, *more: float) -> torch.Tensor:
        """Return (sum of the loss, count, requests, *marks, *more).

        Args:
            requests: what this worker requests; None for passes that leave that, and the marks, to
                others.
            more: further numbers.
        """


def make_totals(marks: torch.Tensor) -> Totals:
    """Return the totals of passes, without any yet.

    Args:
        marks: 1-d tensor on the device of the passes, see `lockstep.training.replica_check`; its
            dtype is theirs.
    """
    return _OnHost(marks) if marks.device.type == "cpu" else _OnDevice(marks)


def as_float(value: Number) -> float:
    """Return a number that may be a 0-dim tensor on the CPU; it may require a gradient."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)


class _OnHost:
    """Totals on the CPU, where reading a number takes less than adding two tensors; see
    `Totals`.
    """

    def __init__(self, marks: torch.Tensor) -> None:
        self._marks = marks
        self._loss = self._count = 0.0

    def add(self, total: torch.Tensor, count: Number) -> None:
        self._loss += as_float(total)
        self._count += as_float(count)

    def tensor(self, requests: float | None, *more: float) -> torch.Tensor:
        once = (
            [0.0] * (1 + len(self._marks))
            if requests is None
            else [requests, *self._marks.tolist()]
        )
        return torch.tensor([self._loss, self._count, *once, *more], dtype=self._marks.dtype)


class _OnDevice:
    """Totals on a device, which nothing waits for; see `Totals`."""

    def __init__(self, marks: torch.Tensor) -> None:
        self._totals = torch.nn.functional.pad(marks, (3, 0))

    def add(self, total: torch.Tensor, count: Number) -> None:
        self._totals[0].add_(total.detach())
        self._totals[1].add_(count)

    def tensor(self, requests: float | None, *more: float) -> torch.Tensor:
        # An assignment of a number would wait for the device.
        if requests is None:
            self._totals[2:].zero_()
        elif requests:
            self._totals[2].fill_(requests)
        if not more:
            return self._totals
        return torch.cat([self._totals, *(self._totals.new_full((1,), number) for number in more)])
