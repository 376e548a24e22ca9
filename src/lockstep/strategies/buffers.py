"""Finds the buffers outside normalisation layers that a model changes while it runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..communicator import Communicator
from .consistency import broadcast_all

__all__ = ["MovingBuffers"]

Mark = tuple[torch.Tensor | None, int]


class MovingBuffers:
    """The buffers that a forward pass has changed on any worker; all of them take rank 0's values after every step.

    Most buffers are constants, such as masks and tables of positions, and sending those would only cost. A buffer that
    has moved once counts as moving from then on. They are looked up by name, as a model may put new tensors in their
    places.

    Args:
        model: on the worker's device, with the same buffers on every worker.
        comm: the workers.
        at_once: take up what begins to move in the very step, also where that makes the host wait for a device.
    """

    def __init__(self, model: nn.Module, comm: Communicator, at_once: bool = False) -> None:
        layers = [m for m in model.modules() if not (isinstance(m, _NormBase) and m.track_running_stats)]
        self._places = [(layer, name) for layer in layers for name in layer._buffers]
        self._moving = [False] * len(self._places)
        self._marks: list[Mark] | None = None
        self._comm, self._steps, self._at_once = comm, 0, at_once

    def __len__(self) -> int:
        return len(self._places)

    def _marked(self) -> list[Mark]:
        found = [layer._buffers.get(name) for layer, name in self._places]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in found]

    def watch(self) -> None:
        """Called before each forward pass: remember how the buffers are before a step's first one."""
        if self._marks is None:
            self._marks = self._marked()

    def moved(self) -> list[bool]:
        """Called after a step's last forward pass: which buffers have changed since `watch`."""
        before, self._marks = self._marks or self._marked(), None
        return [old is not new or was != now for (old, was), (new, now) in zip(before, self._marked(), strict=True)]

    def news(self, moved: list[bool]) -> int:
        """How many of those that have `moved` did not count as moving; the workers' sum of it goes to `sync`."""
        return sum(now and not known for now, known in zip(moved, self._moving, strict=True))

    def sync(self, moved: list[bool], news: torch.Tensor) -> None:
        """Give every worker rank 0's moving buffers, after those that moved here and elsewhere have been agreed on.

        To look at `news` would make the host wait for a device at every step; there it is done at steps 0, 1, 2, 4, 8
        and so on only, unless `at_once`. What begins to move in between is taken up at the next of them.
        """
        due = self._at_once or news.device.type == "cpu" or self._steps & (self._steps - 1) <= 0
        self._steps += 1
        if due and not all(self._moving) and float(news) > 0:
            seen = self._comm.allreduce(torch.tensor(moved, dtype=torch.float32, device=news.device))
            self._moving = [known or count > 0 for known, count in zip(self._moving, seen.tolist(), strict=True)]
        buffers = [layer._buffers.get(name) for (layer, name), it in zip(self._places, self._moving, strict=True) if it]
        broadcast_all([buffer for buffer in buffers if buffer is not None], self._comm)
