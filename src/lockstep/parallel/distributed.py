"""Data parallelism with one process per device: gradients are averaged by DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator
from ..flight_recorder import named
from .buffers import Buffers
from .invariant import Invariant
from .module_sync import move_module, sync_module
from .strategy import Strategy
from .unused_parameters import ConnectAllParameters

__all__ = ["Distributed"]

# The option is called `forward_sync_buffers` since torch 2.13.
_BUFFER_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


# A sum of the workers' shares of samples differs from 1 by no more than this.
_ROUNDING = 1e-6


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
        self._buffers: Buffers | None = None
        self._in_step = False  # whether the buffers of the running step are noted
        self._sums_late = _is_in_shared_memory(comm)

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Return the strategy that gives the same bits at any number of workers."""
        return Invariant(self.comm, virtual_workers, threads)

    def prepare(self, model: nn.Module) -> None:
        """Move `model` to the device, broadcast rank 0's values, and check that all workers have the same.

        Raises:
            MismatchError: if the models differ in their parameters or buffers.
            ConfigError: if the model is on an accelerator of another type.
        """
        move_module(model, self.comm.device)
        sync_module(model, self.comm)
        self._make_buffers(model)

    def _make_buffers(self, model: nn.Module) -> None:
        saves = isinstance(self.comm, ElasticCommunicator)
        self._buffers, self._in_step = Buffers(self.with_loss(model), self.comm, saves=saves), False

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
        if self._buffers is not None and self.comm.size > 1:
            if not self._in_step:
                self._buffers.begin()
            self._in_step = not now
        return self._ddp.no_sync() if self._ddp is not None and not now else nullcontext()

    def reduce_totals(self, totals: torch.Tensor, weight: float, add_up: bool = True) -> Callable[[], torch.Tensor]:
        """Start to sum a step's `totals` over the workers, together with the running statistics.

        See `Strategy.reduce_totals`. The returned function also sets the averaged running statistics and broadcasts
        rank 0's other buffers that forward passes change.
        """
        buffers = self._buffers
        if not buffers or self.comm.size == 1:
            return self._start_sum(totals)
        own = buffers.of_shard(weight, first=self.comm.world.is_first, last=True)
        size = len(totals)
        wait = self._start_sum(torch.cat([totals, totals.new_full((1,), weight), own]))

        def finish() -> torch.Tensor:
            summed = wait()
            weights = summed[size]
            # A sum of shares that differs from 1 by rounding alone is 1.
            whole = torch.where((weights - 1).abs() < _ROUNDING, 1.0, weights)
            buffers.set(summed[size + 1 :], 1 if add_up else whole)
            return summed[:size]

        return finish

    def _start_sum(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum a small vector over the workers; returns a function that waits for the sum.

        In shared memory it starts when it is waited for: an all-reduce in the background wakes a thread, which then
        takes turns with the backward pass for the interpreter, and that takes ten times as long as the all-reduce.
        """
        if not self._sums_late:
            return self.comm.iallreduce(vector).wait

        def start_and_wait() -> torch.Tensor:
            with named(self.totals_name):
                return self.comm.allreduce(vector)

        return start_and_wait

    def begin_step(self) -> None:
        """Save the buffers that the forward pass may change."""
        if self._buffers is not None:
            self._buffers.begin()
            self._in_step = True

    def abandon_step(self) -> None:
        """Restore the buffers."""
        if self._buffers is not None:
            self._buffers.restore()
            self._in_step = False

    def regroup(self, model: nn.Module) -> None:
        """Adapt to the communicator's new workers."""
        if self._ddp is not None:
            # something may still refer to it, such as the frames of an error
            self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._ddp = None  # it holds the old group
        self._make_buffers(model)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those changed outside of steps."""
        if self._buffers is not None:
            self._buffers.broadcast()


def _is_in_shared_memory(comm: Communicator) -> bool:
    """Return whether the collectives of the workers run in the memory of one host, in a job of fixed size."""
    if type(comm) is not Communicator or comm.group is None or comm.device.type != "cpu" or comm.world.nodes > 1:
        return False
    return bool(dist.get_backend(comm.group) == "shm")
