"""Synchronisation of buffers that forward passes change: running statistics, and other buffers when they change."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..communicator import Communicator
from .module_sync import broadcast_tensors

__all__ = ["MutatedBuffers", "RunningStatistics"]


_ROUNDING = 1e-6

# --- Running statistics of normalisation layers -----------------------------------------------------------------------


class RunningStatistics:
    """The running means and variances of a model, packed into a vector that is summed over the workers.

    The layers of each worker see that worker's part of the batch. The result is the average of the running statistics,
    weighted by samples. Averaging at every step leaves the same bits on all workers, so that any of them can evaluate
    or save. Batch counters are taken from rank 0, which always has samples.
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
        """Write this worker's statistics times `weight`, its share of samples, into `into`, of shape (len(self),)."""
        for (buffers, slices), factor in zip(self._slices(into), (weight, float(self._is_first)), strict=True):
            if buffers:
                torch._foreach_copy_(slices, buffers)
                torch._foreach_mul_(slices, factor)

    def unpack(self, summed: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Set the statistics from the sum of all workers' vectors, and of their `weights` where it is not 1."""
        for (buffers, slices), counts in zip(self._slices(summed), (False, True), strict=True):
            if buffers and weights is not None and not counts:
                # a sum of shares that differs from 1 by rounding alone is 1
                divisor = torch.where((weights - 1).abs() < _ROUNDING, 1.0, weights)
                slices = list(torch._foreach_div(slices, divisor))
            if buffers:
                torch._foreach_copy_(buffers, slices)

    def _slices(self, vector: torch.Tensor) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return the averaged buffers and the counters, each with their slices of a vector of len(self)."""
        sizes = [buffer.numel() for buffer in (*self._averaged, *self._counters)]
        parts = iter(torch.split(vector, sizes))
        groups = (self._averaged, self._counters)
        return [(group, [next(parts).view_as(buffer) for buffer in group]) for group in groups]


# --- Other buffers that forward passes change -------------------------------------------------------------------------

Version = tuple[torch.Tensor | None, int]
"""(a buffer, its version); a forward pass may change a tensor or replace it."""


class MutatedBuffers:
    """Buffers that forward passes change on any worker; after every step all workers take rank 0's values of them.

    Most buffers are constants, such as masks and position tables, and need no broadcast. A buffer that has changed
    once is broadcast from then on. Buffers are looked up by name, because a model may replace the tensors.

    Args:
        model: the model, on the worker's device, with the same buffers on every worker.
        comm: communicator over the workers.
        at_once: broadcast a newly changed buffer in the same step, even if the host has to wait for the device.
    """

    def __init__(self, model: nn.Module, comm: Communicator, at_once: bool = False) -> None:
        layers = [m for m in model.modules() if not (isinstance(m, _NormBase) and m.track_running_stats)]
        self._keys = [(layer, name) for layer in layers for name in layer._buffers]
        self._mutated = [False] * len(self._keys)
        self._snapshot: list[Version] | None = None
        self._comm, self._steps, self._at_once = comm, 0, at_once

    def __len__(self) -> int:
        return len(self._keys)

    def _versions(self) -> list[Version]:
        buffers = [layer._buffers.get(name) for layer, name in self._keys]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]

    def snapshot(self) -> None:
        """Record the buffers' versions before a step's first forward pass; later calls in the step do nothing."""
        if self._snapshot is None:
            self._snapshot = self._versions()

    def changed(self) -> list[bool]:
        """Return which buffers have changed since `snapshot`; called after a step's last forward pass."""
        before, self._snapshot = self._snapshot or self._versions(), None
        pairs = zip(before, self._versions(), strict=True)
        return [old is not new or old_version != version for (old, old_version), (new, version) in pairs]

    def count_new(self, changed: list[bool]) -> int:
        """Return how many of the `changed` buffers are not broadcast yet; `sync` takes the sum over the workers."""
        return sum(is_changed and not known for is_changed, known in zip(changed, self._mutated, strict=True))

    def sync(self, changed: list[bool], count_new: torch.Tensor) -> None:
        """Broadcast rank 0's changed buffers, after the workers have agreed on which have changed.

        Reading `count_new` makes the host wait for the device. Off the CPU it is therefore read at steps 0, 1, 2, 4, 8
        and so on only, unless `at_once`; a buffer that first changes in between is broadcast from the next of them on.
        """
        due = self._at_once or count_new.device.type == "cpu" or self._steps & (self._steps - 1) <= 0
        self._steps += 1
        if due and not all(self._mutated) and float(count_new) > 0:
            counts = self._comm.allreduce(torch.tensor(changed, dtype=torch.float32, device=count_new.device))
            self._mutated = [known or count > 0 for known, count in zip(self._mutated, counts.tolist(), strict=True)]
        mutated = [key for key, known in zip(self._keys, self._mutated, strict=True) if known]
        buffers = [layer._buffers.get(name) for layer, name in mutated]
        broadcast_tensors([buffer for buffer in buffers if buffer is not None], self._comm)
