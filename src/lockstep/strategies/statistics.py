"""Keeps the running statistics of normalisation layers the same on all workers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """The running means and variances of a model, as numbers to be summed over the workers.

    Each worker's layers see their own part of the batch. The average of the running statistics, weighted by samples,
    is what one worker's layers would have with statistics per part; taking it at every step leaves all workers with
    the same bits, so that any of them can evaluate or save. Counters of batches are taken from rank 0, which always
    has a part.
    """

    def __init__(self, model: nn.Module, is_first: bool) -> None:
        layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._averaged = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._counters = [buffer for buffer in buffers if not buffer.is_floating_point()]
        self._is_first = is_first

    def __len__(self) -> int:
        return sum(buffer.numel() for buffer in (*self._averaged, *self._counters))

    def pack(self, weight: float, into: torch.Tensor) -> None:
        """Write this worker's share into `into`, a floating vector of len(self); `weight` is its share of samples."""
        for (buffers, places), factor in zip(self._places(into), (weight, float(self._is_first)), strict=True):
            if buffers:
                torch._foreach_copy_(places, buffers)
                torch._foreach_mul_(places, factor)

    def unpack(self, summed: torch.Tensor) -> None:
        """Take over the sum of all workers' shares."""
        for buffers, places in self._places(summed):
            if buffers:
                torch._foreach_copy_(buffers, places)

    def _places(self, vector: torch.Tensor) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The averaged buffers and the counters, each with their places in a vector of len(self)."""
        sizes = [buffer.numel() for buffer in (*self._averaged, *self._counters)]
        parts = iter(torch.split(vector, sizes))
        groups = (self._averaged, self._counters)
        return [(group, [next(parts).view_as(buffer) for buffer in group]) for group in groups]
