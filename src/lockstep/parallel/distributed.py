"""Data parallelism, a process for each device: torch averages the gradients, or one message those
of a small model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator
from ..errors import ConfigError
from ..flight_recorder import named
from .buffers import Buffers
from .invariant import Invariant
from .module_sync import check_same_layout, move_module, sync_module
from .one_bucket import OneBucket
from .strategy import MakeTotals, Strategy, Sums
from .unused_parameters import ConnectAllParameters, sparse_parameters

# The option is called `forward_sync_buffers` since torch 2.13.
_BUFFER_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


_ROUNDING = 1e-6  # of a sum of the workers' shares of samples
_MOST_TOTALS = 8  # a step's totals and the weight, see `Distributed.reduce_totals`


class Distributed(Strategy):
    """Trains one model on all workers with PyTorch's DistributedDataParallel.

    Its reducer overlaps the reduction of gradients with the backward pass (Li et al., "PyTorch
    Distributed: Experiences on accelerating data parallel training", VLDB 2020). A small model,
    whose gradients are all there only when that pass ends, is not wrapped: what a step sends is one
    message, see `OneBucket`. With a single worker nothing is sent.

    With a divided optimizer all workers have all gradients; each keeps those of its own parameters
    for the update.

    Args:
        comm: communicator over the workers.
    """

    can_shard_optimizer = True

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._ddp: DistributedDataParallel | None = None
        self._one_bucket: OneBucket | None = None
        self._buffers: Buffers | None = None
        self._in_step = False  # whether the buffers of the running step are noted
        self._sums_late = False
        self._allows_undo = False

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Return the strategy that gives the same bits at any number of workers."""
        return Invariant(self.comm, virtual_workers, threads)

    def prepare(self, model: nn.Module) -> None:
        """Move `model` to the device, broadcast rank 0's values, and check that all workers have
        the same.

        Raises:
            MismatchError: if the models differ in their parameters or buffers.
            ConfigError: if the model is on an accelerator of another type; with a divided
                optimizer, if it has other parameters than before, or sparse gradients.
        """
        if self.is_optimizer_sharded and sparse_parameters(model):
            raise ConfigError(
                "shard_optimizer",
                "a model whose gradients are dense",
                found="one with an embedding of sparse=True",
                hint="Make it with sparse=False.",
            )
        move_module(model, self.comm.device)
        sync_module(model, self.comm)
        self.choose_owners(model)
        self._make_buffers(model)

    def _make_buffers(self, model: nn.Module) -> None:
        saves = self._allows_undo or isinstance(self.comm, ElasticCommunicator)
        self._buffers = Buffers(self.with_loss(model), self.comm, saves=saves)
        self._in_step = False

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap `module`, a step's forward pass with the prepared model; gradients are *averaged*
        over the workers.

        Raises:
            MismatchError: if the workers train different parameters.
        """
        self._unwrap()
        comm = self.comm
        # sums in the memory of one host are started late
        self._sums_late = (
            comm.group is not None
            and comm.device.type == "cpu"
            and comm.world.nodes == 1
            and dist.get_backend(comm.group) == "shm"
        )
        trained = [p for p in module.parameters() if p.requires_grad]
        if self.comm.size == 1 or self.comm.is_joining or not trained:
            return module
        check_same_layout(module, self.comm)
        numbers = _MOST_TOTALS + (0 if self._buffers is None else self._buffers.most_numbers)
        if not sparse_parameters(module) and OneBucket.fits(trained, self.comm, numbers):
            self._one_bucket = OneBucket(trained, self.comm)
            return module
        no_buffer_sync: dict[str, Any] = {_BUFFER_SYNC: False}
        self._ddp = DistributedDataParallel(
            ConnectAllParameters(module),
            process_group=self.comm.group,
            **no_buffer_sync,  # `reduce_totals` averages the running statistics instead
            # `prepare` has synchronised the model, for every dtype and any strides
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        return self._ddp

    def _unwrap(self) -> None:
        if self._ddp is not None:
            # something may still refer to it, such as the frames of an error
            self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._ddp = None
        self._one_bucket = None

    def gradient_sync(self, now: bool) -> AbstractContextManager[object]:
        """Return a context manager for one pass of a step, see `Strategy.gradient_sync`."""
        if self._buffers is not None and self.comm.size > 1:
            if not self._in_step:
                self._buffers.begin()
            self._in_step = not now
        return self._ddp.no_sync() if self._ddp is not None and not now else nullcontext()

    def reduce_totals(
        self, totals: MakeTotals, weight: float, add_up: bool = True
    ) -> Callable[[], Sums]:
        """Start to sum a step's totals over the workers, together with the running statistics;
        returns a function that waits for the sums.

        The returned function also sets the averaged running statistics and broadcasts rank 0's
        other buffers that forward passes change.

        Args:
            totals: returns this worker's, with further numbers behind them.
            weight: this worker's share of the step's samples, 0 to 1.
            add_up: whether the workers' weights add up to 1; otherwise they are divided by their
                sum.
        """
        buffers = self._buffers
        first = self.comm.world.is_first
        if not buffers or self.comm.size == 1:
            return self._start_sum(totals())
        numbers = buffers.numbers_of_shard(first=first, last=True)
        if numbers is None:
            statistics = buffers.of_shard(weight, first=first, last=True)
            size = len(statistics)
            vector = torch.cat([totals(weight), statistics])
        else:
            size = len(numbers)
            vector = totals(weight, *numbers)
        wait = self._start_sum(vector)
        end = len(vector) - size - 1

        def finish() -> Sums:
            summed = wait()
            whole: Any = 1
            if not add_up and numbers is None:
                # the sum of the workers' shares, which may differ from 1 by rounding alone
                is_one = (summed[end] - 1).abs() < _ROUNDING
                whole = torch.where(is_one, 1.0, summed[end])
            sums: Sums = summed.tolist() if numbers is not None and summed.is_cpu else summed
            buffers.set(sums[end + 1 :], whole)
            return sums[:end]

        return finish

    def _start_sum(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum a small vector over the workers; returns a function that waits for the sum.

        With a small model the gradients are averaged there as well. In shared memory the sum starts
        when it is waited for: an all-reduce in the background wakes a thread, which then takes
        turns with the backward pass for the interpreter, and that takes ten times as long as the
        all-reduce.
        """
        if self._one_bucket is not None:
            return partial(_call_named, self.backward_name, self._one_bucket.average, vector)
        if self._sums_late:
            return partial(_call_named, self.totals_name, self.comm.allreduce, vector)
        return self.comm.iallreduce(vector).wait

    @override
    def allow_undo(self, model: nn.Module) -> None:
        self._allows_undo = True
        self._make_buffers(model)

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
        self._unwrap()  # what is there holds the old group
        self._make_buffers(model)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those changed outside of steps."""
        if self._buffers is not None:
            self._buffers.broadcast()


def _call_named(
    name: str, collective: Callable[[torch.Tensor], torch.Tensor], vector: torch.Tensor
) -> torch.Tensor:
    with named(name):
        return collective(vector)
