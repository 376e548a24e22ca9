"""How the samples of a data set are put into global batches, and these divided among workers and
their shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..parallel.nested import collated_size
from ..parallel.shards import bounds, local_range, mix
from .fetching import Collate

if TYPE_CHECKING:
    from ..communicator import Communicator

# Part of the keys of draws, so that the draws of one seed are independent;
# `lockstep.training.step.train_step` uses 2.
_ORDER = 1
_SAMPLES = 3


class PartOfBatch(NamedTuple):
    """This worker's part of a global batch.

    Attributes:
        data: the collated samples on the worker's device; with virtual workers a list with those of
            each shard.
        indices: the samples' indices in the data set, int64.
        size: number of samples.
        global_size: number of samples in the global batch.
        step: the batch's number in the epoch, from 0.
    """

    data: Any
    indices: torch.Tensor
    size: int
    global_size: int
    step: int


@dataclass
class BatchPlan:
    """What a loader was told of the batches that it makes.

    Attributes:
        comm: communicator over the workers.
        global_batch_size: samples in a global batch.
        seed: of the order and the random draws.
        shuffle: whether the samples of an epoch are shuffled.
        drop_last: whether a smaller last batch is left out.
        collate_fn: the user's function that makes a batch of a list of samples; None without one.
        virtual_workers: number of shards of a global batch; None without.
        role: what the data set is for, as messages say it; "" if that is not known.
    """

    comm: Communicator
    global_batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    collate_fn: Collate | None
    virtual_workers: int | None
    role: str = ""

    def key_of_order(self, epoch: int) -> int:
        """Return the key of the draws of an epoch's order."""
        return mix((self.seed, _ORDER, epoch))

    def key_of_samples(self, epoch: int) -> int:
        """Return the key of the draws of an epoch's samples."""
        return mix((self.seed, _SAMPLES, epoch))

    def described(self, dataset: Any) -> str:
        """Return a data set as messages name it."""
        return f"{self.role or 'the data set'} ({type(dataset).__name__})"

    def local_range(self, global_size: int) -> tuple[int, int]:
        """Return this worker's half-open range of the samples of a global batch of
        `global_size`.
        """
        return local_range(global_size, self.comm.size, self.comm.rank, self.virtual_workers)

    def shard_ranges(self, global_size: int) -> list[tuple[int, int]]:
        """Return the range of samples of each of this worker's shards."""
        assert self.virtual_workers is not None
        shards = range(*bounds(self.virtual_workers, self.comm.size, self.comm.rank))
        return [bounds(global_size, self.virtual_workers, shard) for shard in shards]

    def by_shard(self, indices: torch.Tensor, global_size: int) -> tuple[list[int], ...]:
        """Split this worker's `indices` of a global batch by shard; () without virtual workers."""
        if not self.virtual_workers:
            return ()
        samples = indices.tolist()
        ranges = self.shard_ranges(global_size)
        start = ranges[0][0]
        return tuple(samples[low - start : high - start] for low, high in ranges)

    def collated_sizes(self, part: PartOfBatch) -> tuple[int, ...] | None:
        """Return how many samples a collate function has made of a part, or of each of its shards;
        None without one.
        """
        if self.collate_fn is None:
            return None
        if not self.virtual_workers:
            return (collated_size(part.data, part.size) if part.size else 0,)
        shards = zip(part.data, self.shard_ranges(part.global_size), strict=True)
        return tuple([collated_size(data, high - low) for data, (low, high) in shards])
