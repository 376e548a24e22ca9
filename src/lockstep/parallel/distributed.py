"""Data parallelism with one process per device: gradients are averaged by DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..communicator import Communicator
from .buffers import MutatedBuffers, RunningStatistics
from .invariant import Invariant, ShardBuffers
from .module_sync import broadcast_tensors, sync_module
from .strategy import Strategy
from .unused_parameters import ConnectAllParameters

__all__ = ["Distributed"]

# The option is called `forward_sync_buffers` since torch 2.13.
_BUFFER_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Distributed(Strategy):
    """Trains one model on all workers with PyTorch's DistributedDataParallel.

    Its reducer overlaps the reduction of gradients with the backward pass (Li et al., "PyTorch Distributed: Experiences
    on accelerating data parallel training", VLDB 2020). With a single worker nothing is wrapped and nothing is sent.

    Args:
        comm: communicator over the workers.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._ddp: DistributedDataParallel | None = None
        self._statistics: RunningStatistics | None = None
        self._buffers: MutatedBuffers | None = None
        self._model: nn.Module | None = None
        self._saved: ShardBuffers | None = None  # in an elastic job

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Return the strategy that gives the same bits at any number of workers."""
        return Invariant(self.comm, virtual_workers, threads)

    def prepare(self, model: nn.Module) -> None:
        """Move `model` to the device, broadcast rank 0's values, and check that all workers have the same.

        Raises:
            MismatchError: if the models differ in their parameters or buffers.
        """
        self._model = model.to(self.comm.device)
        sync_module(model, self.comm)
        self._synchronise_buffers(model)

    def _synchronise_buffers(self, model: nn.Module) -> None:
        self._statistics = self._buffers = None
        if self.comm.size > 1:
            everything = self.with_loss(model)
            self._statistics = RunningStatistics(everything, self.comm.world.is_first)
            self._buffers = MutatedBuffers(everything, self.comm)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap `module`, a step's forward pass with the prepared model; gradients are *averaged* over the workers."""
        if self.comm.size == 1 or self.comm.is_joining or not any(p.requires_grad for p in module.parameters()):
            return module
        no_buffer_sync: dict[str, Any] = {_BUFFER_SYNC: False}
        self._ddp = DistributedDataParallel(
            ConnectAllParameters(module),
            process_group=self.comm.group,
            **no_buffer_sync,  # `reduce_totals` averages the running statistics instead
            init_sync=False,  # `prepare` has synchronised the model, for every dtype and any strides
            gradient_as_bucket_view=True,
        )
        return self._ddp

    def gradient_sync(self, now: bool) -> AbstractContextManager[object]:
        """Return a context manager for one pass of a step, see `Strategy.gradient_sync`."""
        if self._buffers is not None:
            self._buffers.snapshot()
        return self._ddp.no_sync() if self._ddp is not None and not now else nullcontext()

    def reduce_totals(self, totals: torch.Tensor, weight: float, add_up: bool = True) -> Callable[[], torch.Tensor]:
        """Start to sum a step's `totals` over the workers, together with the running statistics.

        See `Strategy.reduce_totals`. The returned function also sets the averaged running statistics and broadcasts
        rank 0's other buffers that forward passes change.
        """
        statistics, buffers = self._statistics, self._buffers
        if statistics is None or buffers is None or not (statistics or buffers):
            return self.comm.iallreduce(totals).wait
        changed, size = buffers.changed(), len(totals)
        vector = totals.new_empty(size + 2 + len(statistics))
        vector[:size] = totals
        vector[size], vector[size + 1] = buffers.count_new(changed), weight
        statistics.pack(weight, vector[size + 2 :])
        wait = self.comm.iallreduce(vector).wait

        def finish() -> torch.Tensor:
            summed = wait()
            statistics.unpack(summed[size + 2 :], None if add_up else summed[size + 1])
            buffers.sync(changed, summed[size])
            return summed[:size]

        return finish

    def begin_step(self) -> None:
        """Save the buffers that the forward pass may change."""
        if self._saved is None and self._model is not None:
            self._saved = ShardBuffers(self.with_loss(self._model), self.comm.device)
        if self._saved is not None:
            self._saved.begin()

    def abandon_step(self) -> None:
        """Restore the buffers."""
        if self._saved is not None:
            self._saved.restore()

    def regroup(self, model: nn.Module) -> None:
        """Adapt to the communicator's new workers."""
        if self._ddp is not None:
            # something may still refer to it, such as the frames of an error
            self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._ddp = None  # it holds the old group
        self._synchronise_buffers(model)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those changed outside of steps."""
        if self._model is not None and self.comm.size > 1:
            broadcast_tensors(self.with_loss(self._model).buffers(), self.comm)
