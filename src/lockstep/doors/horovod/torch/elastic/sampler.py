"""Deals a data set's samples out to ranks whose number may change within an epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch.utils.data

from ...common.basics import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Samples in an order that all ranks share, of which each rank takes every size-th, without those that are done.

    All ranks have the same number of samples: where it does not divide evenly, the first ones come again. A training
    calls `record_batch` after each batch and `set_epoch` at the end of each epoch, and gives the sampler to a
    `TorchState`.

    Args:
        dataset: has a length.
        shuffle: whether the order is another one in each epoch.
        seed: of that; the same on all ranks.

    Attributes:
        epoch: its number.
        num_replicas, rank: number of ranks and this rank, as of the last `reset`.
        remaining_indices: what was still to be done then, in the order of all ranks.
        num_samples: this rank's share of it.
        total_size: all ranks' shares.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self._others: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`, with nothing done; to be called at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self._others = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that all ranks have done their batches up to the one with this number.

        Args:
            batch_idx: counted from 0 since the sampler was last iterated over from its beginning.
            batch_size: of every batch, on one rank.
        """
        done = min((batch_idx + 1) * batch_size, self.num_samples) * self.num_replicas
        if done > 0 and self._places:
            self.processed_num = max(self.processed_num, self._places[min(done, len(self._places)) - 1] + 1)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has done the samples `indices`; a `TorchState` tells the other ranks."""
        self._others.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in batch `batch_idx`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    @property
    def processed_indices(self) -> set[int]:
        """What is known to be done in this epoch."""
        return self._others.union(self._order()[: self.processed_num])

    def state_dict(self) -> dict[str, Any]:
        """Epoch, how many samples of its order are done, and those that are done besides."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": set(self._others)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with as many ranks as there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self._others = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deal out what is left, with as many ranks as there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = self._order()
        self._places = [n for n in range(self.processed_num, len(order)) if order[n] not in self._others]
        self.remaining_indices = [order[place] for place in self._places]
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
