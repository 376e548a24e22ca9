"""The forward and backward passes of one step, in which a worker goes through its part of the batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..data.loader import Batch
from ..data.nested import split
from ..strategies.base import Strategy
from ..strategies.invariant import Invariant
from .precision import Precision
from .shard_passes import ShardPasses

__all__ = ["Passes", "make_passes"]


class Passes(Protocol):
    """What makes a step's passes."""

    def run(
        self, loss: Any, precision: Precision, batch: Batch, step: int, stop: bool, marks: torch.Tensor
    ) -> torch.Tensor:
        """Make them; gradients are then the sums over the global batch, divided by its samples.

        Args:
            loss: (data, samples) → (sum of the loss, what it is a sum over), as the strategy has wrapped it.
            precision: of the passes.
            batch: this worker's part of the global batch.
            step: its number.
            stop: whether this worker wants to stop.
            marks: numbers that are summed over the workers too, 1-d.

        Returns:
            (sum of the loss, what it is a sum over, workers that want to stop, sums of marks) over the global batch:
            1-d.
        """


def make_passes(strategy: Strategy, seed: int, accumulate: int) -> Passes:
    """The passes that `strategy` wants; `seed` is that of dropout, `accumulate` the number of passes."""
    return ShardPasses(strategy, seed) if isinstance(strategy, Invariant) else WholePasses(strategy, accumulate)


class WholePasses:
    """One pass over this worker's part of a batch, or several to save memory, reduced with the last.

    Args:
        strategy: prepared.
        accumulate: how many.
    """

    def __init__(self, strategy: Strategy, accumulate: int) -> None:
        self._strategy, self._accumulate = strategy, accumulate

    def run(
        self, loss: Any, precision: Precision, batch: Batch, step: int, stop: bool, marks: torch.Tensor
    ) -> torch.Tensor:
        """See `Passes`."""
        strategy, totals = self._strategy, torch.nn.functional.pad(marks, (3, 0))
        if stop:
            totals[2] = 1
        # The reduction averages over workers: times their number it is the sum that the mean over samples needs.
        scale = strategy.comm.size / batch.global_size
        parts = split(batch.data, batch.size, self._accumulate)
        for number, (data, size) in enumerate(parts):
            last = number == len(parts) - 1
            with strategy.reducing(now=last):
                with precision.autocast():
                    total, count = loss(data, size)
                totals[0] += total.detach()
                totals[1] += count
                if last:
                    finish = strategy.reduce_step(totals, batch.size / batch.global_size)
                precision.backward(total * scale)
        return finish()
