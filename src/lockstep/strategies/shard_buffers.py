"""Lets every shard of a step find a model's buffers as they were before it, and puts them together afterwards."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["ShardBuffers"]


class ShardBuffers:
    """The buffers that forward passes change: running statistics of normalisation layers, and others.

    Running statistics become the mean over shards, weighted by samples, of what each shard would have left; their
    counters, and all other buffers, become what shard 0 has left. Of buffers outside normalisation layers, a copy is
    kept from the beginning, as nobody knows which of them will change; only those that do are copied again.

    Args:
        model: on its device.
        device: that.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._norms = layers
        self.nothing = torch.empty(0, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._averaged, self._counters = _Kept(self.nothing), _Kept(self.nothing)
        known = {id(layer) for layer in layers}
        places = [(m, name) for m in model.modules() if id(m) not in known for name in m._buffers]
        self._others = [_Other(*place) for place in places]

    def begin(self) -> None:
        """A step begins: what the buffers hold now is what each of its shards shall find."""
        # Of a frozen layer, in evaluation mode, nothing moves; a mean of equal numbers would round.
        buffers = [b for layer in self._norms if layer.training for b in layer.buffers(recurse=False)]
        self._averaged.keep([b for b in buffers if b.is_floating_point()])
        self._counters.keep([b for b in buffers if not b.is_floating_point()])
        for other in self._others:
            other.begin()

    def restore(self) -> None:
        """Between two shards: put back what the step began with."""
        self._averaged.restore()
        self._counters.restore()
        for other in self._others:
            other.restore()

    def others_moved(self) -> bool:
        """Whether a buffer outside normalisation layers has changed since the step began, or the last `restore`."""
        return any(other.moved() for other in self._others)

    def numbers(self, samples: int, first: bool) -> torch.Tensor:
        """After a shard's forward pass: its statistics, to be summed over all; a 1-d tensor, wide for the sums.

        Args:
            samples: of the shard; without any, nothing was changed.
            first: whether it is shard 0.
        """
        if first:
            for other in self._others:
                other.note()
        if not self._averaged.numel + self._counters.numel:
            return self.nothing
        counted = self._counters.flat()
        return torch.cat([self._averaged.flat().mul_(samples), counted if first else counted.zero_()])

    def take(self, sums: torch.Tensor, samples: int) -> None:
        """After the step: set the statistics from the `sums` of all shards' numbers, in all of so many `samples`."""
        cut = self._averaged.numel
        self._averaged.set(sums[:cut] / samples)
        self._counters.set(sums[cut:])
        for other in self._others:
            other.finish()


class _Kept:
    """Some buffers and their values at the beginning of a step, in memory that stays."""

    def __init__(self, nothing: torch.Tensor) -> None:
        self._nothing = nothing
        self._buffers: list[torch.Tensor] = []
        self._base: list[torch.Tensor] = []
        self.numel = 0

    def keep(self, buffers: list[torch.Tensor]) -> None:
        if [id(b) for b in buffers] != [id(b) for b in self._buffers]:
            self._buffers, self._base = buffers, [torch.empty_like(b) for b in buffers]
            self.numel = sum(b.numel() for b in buffers)
        if buffers:
            torch._foreach_copy_(self._base, buffers)

    def restore(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._base)

    def flat(self) -> torch.Tensor:
        if not self._buffers:
            return self._nothing.clone()
        return torch.cat([b.reshape(-1) for b in self._buffers]).to(self._nothing.dtype, copy=True)

    def set(self, values: torch.Tensor) -> None:
        if self._buffers:
            parts = torch.split(values, [b.numel() for b in self._buffers])
            torch._foreach_copy_(self._buffers, [p.view_as(b) for p, b in zip(parts, self._buffers, strict=True)])


class _Other:
    """One buffer outside normalisation layers, by its place, as a model may put another tensor there."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer, self._name = layer, name
        self._base: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None
        self._left: torch.Tensor | None = None
        self._mark = -2  # no version: the first step makes the copy

    @property
    def _now(self) -> torch.Tensor | None:
        return self._layer._buffers.get(self._name)

    def _version(self) -> int:
        return -1 if self._now is None else self._now._version

    def moved(self) -> bool:
        return self._now is not self._base or self._version() != self._mark

    def begin(self) -> None:
        if self.moved():  # since the last step ended, or in it
            self._base, self._mark = self._now, self._version()
            self._copy = None if self._now is None else self._now.clone()
        self._left = None

    def restore(self) -> None:
        if not self.moved():
            return
        self._layer._buffers[self._name] = self._base
        if self._base is not None and self._copy is not None:
            with torch.no_grad():
                self._base.copy_(self._copy)
        self._mark = self._version()

    def note(self) -> None:
        if self.moved() and self._now is not None:
            self._left = self._now.clone()

    def finish(self) -> None:
        self.restore()
        if self._left is not None and self._now is not None:
            with torch.no_grad():
                self._now.copy_(self._left)
