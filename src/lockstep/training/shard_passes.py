"""The forward and backward passes of one step, a pair for each of this worker's shards."""

from __future__ import annotations

from typing import Any

import torch

from ..data.loader import Batch
from ..data.nested import map_tensors, narrow
from ..errors import ConfigError
from ..randomness import seed_shard
from ..strategies.invariant import Invariant
from .losses import LossModule
from .precision import Precision

__all__ = ["ShardPasses"]

# Bytes at which torch's own allocations begin on the CPU; libraries choose kernels by how their input lies in memory.
_ALIGN = 64

# Of a shard: the sum of its loss, what that is a sum over, a wish to stop, and buffers that have begun to move.
_OWN = 4


class ShardPasses:
    """Runs the shards of a global batch that are this worker's, and sums what they give over all workers.

    Args:
        strategy: prepared.
        seed: of dropout and the like, with the step and the shard.
    """

    def __init__(self, strategy: Invariant, seed: int) -> None:
        self._strategy, self._seed = strategy, seed

    def run(self, loss: LossModule, precision: Precision, batch: Batch, step: int, stop: bool) -> torch.Tensor:
        """Make the passes; gradients are then the sums over the global batch, divided by its samples.

        Args:
            loss: the model with its loss.
            precision: of the passes.
            batch: this worker's part of the global batch.
            step: its number.
            stop: whether this worker wants to stop.

        Returns:
            (sum of the loss, what it is a sum over, workers that want to stop) over the global batch: shape (3,).

        Raises:
            ConfigError: for a batch that is cut otherwise.
        """
        strategy, device = self._strategy, self._strategy.comm.device
        reducer, buffers = strategy.reducer, strategy.buffers
        parts = self._parts(batch)
        strategy.begin()
        for shard in reducer:
            data, size = parts[shard - reducer.here.start]
            if shard > reducer.here.start:
                buffers.restore()
            seed_shard(self._seed, step, shard, device)
            own = buffers.nothing.new_zeros(_OWN)
            scaled = self._forward(loss, precision, (data, size), batch.global_size, own) if size else None
            if shard == reducer.here[-1]:
                own[2], own[3] = float(stop), float(strategy.news())
            reducer.add(torch.cat([own, buffers.numbers(size, shard == 0)]))
            if scaled is not None:
                precision.backward(scaled)
        # Whoever draws numbers between steps draws the same on every worker.
        seed_shard(self._seed, step, strategy.shards, device)
        assert reducer.sums is not None
        strategy.end(reducer.sums[_OWN:], batch.global_size, reducer.sums[3])
        return reducer.sums[:3]

    @staticmethod
    def _forward(
        loss: LossModule, precision: Precision, part: tuple[Any, int], global_size: int, own: torch.Tensor
    ) -> torch.Tensor:
        """The part's share of the mean over the global batch; its sum and count are put into `own`."""
        with precision.autocast():
            total, count = loss(*part)
        own[0] = total.detach()
        own[1] = count
        share: torch.Tensor = total * (1 / global_size)
        return share

    def _parts(self, batch: Batch) -> list[tuple[Any, int]]:
        """(data, samples) of each of this worker's shards."""
        reducer, comm = self._strategy.reducer, self._strategy.comm
        if batch.shards != reducer.shards and (batch.shards is not None or comm.size > 1):
            hint = "Make the Loader with the same shards= as the training."
            raise ConfigError("batch", f"one in {reducer.shards} shards", f"one in {batch.shards or 'none'}", hint)
        cuts = [reducer.part(batch.global_size, shard) for shard in reducer.here]
        sizes = [cut.stop - cut.start for cut in cuts]
        data = batch.data if batch.shards else [narrow(batch.data, cut.start, cut.stop) for cut in cuts]
        return [(map_tensors(_aligned, part), size) for part, size in zip(data, sizes, strict=True)]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy where it lies otherwise in memory than a tensor of its own would."""
    strided = tensor.layout is torch.strided
    return tensor.clone() if strided and tensor.numel() and tensor.data_ptr() % _ALIGN else tensor
