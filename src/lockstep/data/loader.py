"""Deals out the global batches of an epoch: to each worker its part, to no worker another's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import communicator
from ..errors import CheckpointError, ConfigError
from ..shards import bounds, mix, step_range, steps_per_epoch
from .fetch import Collate, Fetcher, to_device
from .nested import narrow

__all__ = ["Batch", "Loader"]

_ORDER = 1  # what a key is for goes into it, so that the order and other draws of one seed are unrelated


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's part of one global batch.

    Attributes:
        data: the collated samples on the worker's device, usually (inputs, targets). Where the part is empty, because
            the last batch has fewer samples than there are workers, its tensors have 0 samples.
        indices: int64 tensor of shape (size,), the samples' places in the data set.
        size: samples in this part.
        global_size: samples in the global batch.
        epoch: the epoch that this batch belongs to.
        step: its number in that epoch, from 0.
    """

    data: Any
    indices: torch.Tensor
    size: int
    global_size: int
    epoch: int
    step: int


class Loader:
    """The global batches of a data set, epoch by epoch, of which this worker gets its part.

    Every sample of an epoch is dealt out exactly once, whatever the number of workers: nothing is repeated to make
    parts even. The order depends on (seed, epoch) alone. Parts are contiguous and differ by one sample at most.

    Args:
        dataset: a map-style data set: ``len(dataset)`` and ``dataset[index]``; with a method ``batch(indices)`` that
            returns many samples collated, it is asked for all at once.
        global_batch: samples in one optimizer step, over all workers.
        seed: of the order.
        shuffle: False keeps the data set's own order in every epoch.
        drop_last: leave out a last batch that is smaller than `global_batch`.
        num_workers: processes that load ahead; 0 loads in this process.
        prefetch: at most this many batches are loaded or copied to the device ahead of their use.
        comm: the workers; those of `lockstep.init()` when None.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` when None.

    Raises:
        ConfigError: for values that cannot be used, among them fewer samples than workers.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        comm: communicator.Communicator | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.comm = comm or communicator.init()
        self.dataset, self.samples = dataset, _length(dataset)
        self.global_batch, self.seed, self.shuffle, self.drop_last = global_batch, seed, shuffle, drop_last
        self._prefetch = prefetch
        self._check(num_workers)
        pin = self.comm.device.type == "cuda"
        self._fetcher = Fetcher(dataset, collate, num_workers, prefetch, pin)
        self._epoch, self._step = 0, 0
        self._begin_at: tuple[int, int] | None = None  # a loaded position, until its epoch is begun

    def _check(self, num_workers: int) -> None:
        for name, value, least in (
            ("global_batch", self.global_batch, 1),
            ("num_workers", num_workers, 0),
            ("prefetch", self._prefetch, 1),
            ("seed", self.seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(name, f"a whole number of at least {least}", value)
        for name, value in (("the data set", self.samples), ("global_batch", self.global_batch)):
            if value < self.comm.size:
                hint = "Use fewer workers" + (" or a larger global batch." if name == "global_batch" else ".")
                raise ConfigError(name, f"at least one sample for each of {self.comm.size} workers", value, hint)
        if self.drop_last and self.samples < self.global_batch:
            raise ConfigError(
                "global_batch",
                f"at most the {self.samples} samples of the data set with drop_last",
                self.global_batch,
            )

    def __len__(self) -> int:
        """Steps in an epoch."""
        return steps_per_epoch(self.samples, self.global_batch, self.drop_last)

    def order(self, epoch: int) -> torch.Tensor:
        """The samples of an epoch in the order in which global batches take them: int64, shape (samples,)."""
        if not self.shuffle:
            return torch.arange(self.samples)
        # PyTorch's CPU generator looks at the low 32 bits of a seed only.
        generator = torch.Generator().manual_seed(mix((self.seed, _ORDER, epoch)) & 0xFFFFFFFF)
        return torch.randperm(self.samples, generator=generator)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """This worker's part of each global batch of `epoch`: from its beginning, or once from a loaded position."""
        first = self._begin_at[1] if self._begin_at is not None and self._begin_at[0] == epoch else 0
        self._begin_at = None
        order, steps = self.order(epoch), range(first, len(self))
        parts = [self._part(order, step) for step in steps]
        self._epoch, self._step = epoch, first
        # A part without samples still needs their shapes: any one sample is fetched, and cut away again.
        lists = (indices.tolist() or [int(order[0])] for indices, _ in parts)
        host = self._fetcher.fetch(lists)
        arrived = to_device(host, self.comm.device, self._prefetch)
        for step, (indices, whole), data in zip(steps, parts, arrived, strict=True):
            # Before the batch is handed out: whoever saves after using it saves the position behind it.
            self._step = step + 1
            part = data if len(indices) else narrow(data, 0, 0)
            yield Batch(part, indices, len(indices), whole, epoch, step)
        self._epoch, self._step = epoch + 1, 0

    def _part(self, order: torch.Tensor, step: int) -> tuple[torch.Tensor, int]:
        start, stop = step_range(self.samples, self.global_batch, step)
        low, high = bounds(stop - start, self.comm.size, self.comm.rank)
        return order[start + low : start + high], stop - start

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the next batch."""
        return self._epoch, self._step

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch handed out, and what it depends on; no worker count in it."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, taken with any number of workers.

        Raises:
            CheckpointError: when it was taken with another data set size, global batch, seed or order.
        """
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                raise CheckpointError(
                    f"the saved position does not fit this loader: {key} was {state.get(key)!r}, here it is {ours!r}"
                )
        self._begin_at = self._epoch, self._step = int(state["epoch"]), int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def close(self) -> None:
        """End the loader processes, if there are any."""
        self._fetcher.close()


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            "dataset",
            "a map-style data set, with len() and indexing",
            type(dataset).__name__,
            "A stream has no order that could be dealt out; give it a length and an index.",
        ) from None
