"""Data parallelism with one process a device: every worker has the model, gradients are summed in the backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..communicator import Communicator
from .base import Strategy
from .buffers import MovingBuffers
from .consistency import broadcast_all, make_same
from .invariant import Invariant
from .reaching import ReachingAll
from .statistics import RunningStatistics

__all__ = ["Distributed"]

# The name of the option up to torch 2.12, and since then.
_BUFFER_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Distributed(Strategy):
    """Trains one model on all workers with PyTorch's DistributedDataParallel.

    Its reducer overlaps the sum of gradients with the backward pass (Li et al., "PyTorch Distributed: Experiences on
    accelerating data parallel training", VLDB 2020). Alone, nothing is wrapped and nothing is sent.

    Args:
        comm: the workers.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._ddp: DistributedDataParallel | None = None
        self._statistics: RunningStatistics | None = None
        self._buffers: MovingBuffers | None = None
        self._model: nn.Module | None = None

    def in_shards(self, shards: int, threads: int | None) -> Strategy:
        """The same bits at any number of workers."""
        return Invariant(self.comm, shards, threads)

    def prepare(self, model: nn.Module) -> None:
        """Bring rank 0's values of `model` to every worker, and see that all are the same then.

        Raises:
            MismatchError: when the models differ in their parameters or buffers.
        """
        self._model = model.to(self.comm.device)
        make_same(model, self.comm)
        if self.comm.size > 1:
            self._statistics = RunningStatistics(model, self.comm.world.is_first)
            self._buffers = MovingBuffers(model, self.comm)

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module`, a step's forward pass around the prepared model, with its gradients *averaged* over workers."""
        if self.comm.size == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        no_buffer_sync: dict[str, Any] = {_BUFFER_SYNC: False}
        self._ddp = DistributedDataParallel(
            ReachingAll(module),
            process_group=self.comm.group,
            **no_buffer_sync,  # the running statistics are merged instead; see `reduce_step`
            init_sync=False,  # `prepare` has done it, for every dtype and any strides
            gradient_as_bucket_view=True,
        )
        return self._ddp

    def reducing(self, now: bool) -> AbstractContextManager[object]:
        """Around one of several passes of a step: whether its gradients are reduced now, or added up until later."""
        if self._buffers is not None:
            self._buffers.watch()
        return self._ddp.no_sync() if self._ddp is not None and not now else nullcontext()

    def reduce_step(self, totals: torch.Tensor, weight: float) -> Callable[[], torch.Tensor]:
        """Start summing a step's `totals` over the workers, with the running statistics of normalisation layers.

        Called between the last forward pass and its backward, so that it runs beside it. Calling what is returned
        waits for the sums of `totals`, sets the merged statistics and gives all rank 0's other buffers that move.

        Args:
            totals: 1-d floating tensor.
            weight: this worker's share of the step's samples, 0 to 1.
        """
        statistics, buffers = self._statistics, self._buffers
        if statistics is None or buffers is None or not (statistics or buffers):
            return self.comm.allreduce_async(totals)
        moved, own = buffers.moved(), len(totals)
        numbers = totals.new_empty(own + 1 + len(statistics))
        numbers[:own] = totals
        numbers[own] = buffers.news(moved)
        statistics.pack(weight, numbers[own + 1 :])
        wait = self.comm.allreduce_async(numbers)

        def finish() -> torch.Tensor:
            summed = wait()
            statistics.unpack(summed[own + 1 :])
            buffers.sync(moved, summed[own])
            return summed[:own]

        return finish

    def sync_buffers(self) -> None:
        """Give every worker rank 0's buffers, also those that something else than a step has changed."""
        if self._model is not None and self.comm.size > 1:
            broadcast_all(self._model.buffers(), self.comm)
