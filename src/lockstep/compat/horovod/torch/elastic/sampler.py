"""`ElasticSampler`: distributes the samples of a data set over ranks whose number may change within
an epoch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch.utils.data

from ...common.basics import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A sampler whose order is the same on all ranks; rank r takes every size-th unprocessed
    sample, beginning at r.

    All ranks get the same number of samples: if the number is not divisible, the first samples are
    repeated. The training calls `record_batch` after each batch and `set_epoch` at the end of each
    epoch, and passes the sampler to a `TorchState`.

    Args:
        dataset: the data set; only its length is used.
        shuffle: whether to shuffle the samples differently in each epoch.
        seed: the seed of the shuffle, the same on all ranks.

    Attributes:
        epoch: the current epoch.
        num_replicas: the number of ranks at the last `reset`.
        rank: this rank at the last `reset`.
        remaining_indices: the samples that were unprocessed at the last `reset`, in the order of
            all ranks.
        num_samples: the number of samples for this rank.
        total_size: the number of samples for all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self.processed_num = 0
        # processed samples that `processed_num` does not count
        self._other_indices: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start epoch `epoch` with no sample processed; to be called at the end of the previous
        epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self._other_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed their batches up to and including `batch_idx`.

        Args:
            batch_idx: the index of the batch in the current iteration over the sampler.
            batch_size: the number of samples of every batch, on one rank.
        """
        processed = min((batch_idx + 1) * batch_size, self.num_samples) * self.num_replicas
        if processed > 0 and self._positions:
            last = self._positions[min(processed, len(self._positions)) - 1]
            self.processed_num = max(self.processed_num, last + 1)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed the samples `indices`; `TorchState` shares them with
        the other ranks.
        """
        self._other_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's samples in batch `batch_idx`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    @property
    def processed_indices(self) -> set[int]:
        """The samples that are known to be processed in this epoch."""
        return self._other_indices.union(self._order()[: self.processed_num])

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of processed samples in its order, and the other processed
        samples.
        """
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": set(self._other_indices),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state, for the current number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self._other_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Distribute the unprocessed samples over the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = self._order()
        self._positions = [
            n for n in range(self.processed_num, len(order)) if order[n] not in self._other_indices
        ]
        self.remaining_indices = [order[position] for position in self._positions]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _order(self) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
