"""Deals out the global batches of an epoch: to each worker its part, to no worker another's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .. import communicator
from ..errors import CheckpointError, ConfigError
from ..recorder import note_batch
from ..shard_count import shard_count
from ..shards import bounds, mix, step_range, steps_per_epoch
from .fetch import Collate, Fetcher, Request, to_device
from .nested import narrow

__all__ = ["Batch", "Loader"]

_ENDED = object()

# What a key is for goes into it, so that the draws of one seed are unrelated; 2 is that of `lockstep.training.step`.
_ORDER, _SAMPLES = 1, 3

_MOST_IN_32_BITS = 1 << 31  # samples, whose numbers then fit


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
        shards: into how many shards the global batch is cut, see `Loader`; `data` is then a list with what has been
            collated for each of this worker's shards, and None for one without samples.
    """

    data: Any
    indices: torch.Tensor
    size: int
    global_size: int
    epoch: int
    step: int
    shards: int | None = None


class Loader:
    """The global batches of a data set, epoch by epoch, of which this worker gets its part.

    Every sample of an epoch is dealt out exactly once, whatever the number of workers: nothing is repeated to make
    parts even. The order depends on (seed, epoch) alone. Parts are contiguous and differ by one sample at most.

    Before each ``dataset[index]`` the global generators of torch (CPU), Python and NumPy are seeded by (seed, epoch,
    index), so that augmentation is the same at any number of workers and loader processes, and after going on from
    the middle of an epoch. Draws in `collate` repeat as well, but depend on how the batch is cut.

    Args:
        dataset: a map-style data set: ``len(dataset)`` and ``dataset[index]``. One with a method
            ``collated_batch(indices)`` is asked for a whole part at once, already collated; nothing is seeded then,
            and random draws must be keyed by the data set itself.
        global_batch: samples in one optimizer step, over all workers.
        seed: of the order, and of random draws of the data set.
        shuffle: False keeps the data set's own order in every epoch.
        drop_last: leave out a last batch that is smaller than `global_batch`.
        num_workers: processes that load ahead, for each worker; 0 loads in this process.
        prefetch: at most this many batches are ready or in the making in loader processes ahead of the one in use,
            for each worker; at least `num_workers`, and twice that when None. On a GPU one more is on its way there.
        comm: the workers; those of `lockstep.init()` when None.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` when None.
        shards: cut each global batch into so many ordered shards, of which each worker gets a contiguous run, each
            collated by itself: what comes out does not depend on the number of workers. True is 8.

    Raises:
        ConfigError: for values that cannot be used, among them fewer samples or shards than workers.
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
        prefetch: int | None = None,
        comm: communicator.Communicator | None = None,
        collate: Collate | None = None,
        shards: int | None = None,
    ) -> None:
        self.comm = comm or communicator.init()
        self.shards = None if shards is None else shard_count(shards, self.comm.size)
        self.dataset, self.samples = dataset, _length(dataset)
        self.global_batch, self.seed, self.shuffle, self.drop_last = global_batch, seed, shuffle, drop_last
        self._check(num_workers)
        prefetch = _prefetch(prefetch, num_workers)
        pin = self.comm.device.type == "cuda"
        self._fetcher = Fetcher(dataset, collate, num_workers, prefetch, pin)
        self._epoch, self._step = 0, 0
        self._begin_at: tuple[int, int] | None = None  # a loaded position, until its epoch is begun

    def _check(self, num_workers: int) -> None:
        for name, value, least in (
            ("global_batch", self.global_batch, 1),
            ("num_workers", num_workers, 0),
            ("seed", self.seed, 0),
        ):
            _check_whole(name, value, least)
        for name, value in (("dataset", self.samples), ("global_batch", self.global_batch)):
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
        return self._order(epoch).long()

    def _order(self, epoch: int) -> torch.Tensor:
        """`order` in as few bytes as its numbers need; the dtype changes no draw of `randperm`."""
        dtype = torch.int32 if self.samples <= _MOST_IN_32_BITS else torch.int64
        if not self.shuffle:
            return torch.arange(self.samples, dtype=dtype)
        # PyTorch's CPU generator looks at the low 32 bits of a seed only.
        generator = torch.Generator().manual_seed(mix((self.seed, _ORDER, epoch)) & 0xFFFFFFFF)
        return torch.randperm(self.samples, generator=generator, dtype=dtype)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """This worker's part of each global batch of `epoch`: from its beginning, or once from a loaded position.

        Raises:
            ConfigError: when it is asked for more after `close`, or after a later epoch has taken over the loader
                processes.
        """
        first = self._begin_at[1] if self._begin_at is not None and self._begin_at[0] == epoch else 0
        self._begin_at = None
        self._epoch, self._step = epoch, first
        order, steps = _OwnOrder(self, self._order(epoch)), range(first, len(self))
        loop = mix((self.samples, self.global_batch)) or 1
        arriving = to_device(self._fetcher.fetch(self._requests(order, epoch, steps)), self.comm.device)
        for step in steps:
            indices, whole = order.part(step)
            data = next(arriving, _ENDED)
            if data is _ENDED:
                raise _taken_over(epoch)
            # Before the batch is handed out: whoever saves after using it saves the position behind it.
            self._epoch, self._step = epoch, step + 1
            part = data if len(indices) or self.shards else narrow(data, 0, 0)
            note_batch(step, loop=loop)
            yield Batch(part, indices, len(indices), whole, epoch, step, self.shards)
        note_batch(len(self), finished=True, loop=loop)
        self._epoch, self._step = epoch + 1, 0

    def _requests(self, order: _OwnOrder, epoch: int, steps: range) -> Iterator[Request]:
        key = mix((self.seed, _SAMPLES, epoch))
        for step in steps:
            indices, whole = order.part(step)
            # A part without samples still needs their shapes: any one sample is fetched, and cut away again.
            yield key, self._cut(indices, whole) or indices.tolist() or [order.spare]

    def own_range(self, whole: int) -> tuple[int, int]:
        """The half-open range of a global batch of `whole` samples that is this worker's."""
        if self.shards:
            cuts = self._bounds(whole)
            return cuts[0][0], cuts[-1][1]
        return bounds(whole, self.comm.size, self.comm.rank)

    def _bounds(self, whole: int) -> list[tuple[int, int]]:
        """Which of a global batch's samples are those of each of this worker's shards."""
        assert self.shards is not None
        run = range(*bounds(self.shards, self.comm.size, self.comm.rank))
        return [bounds(whole, self.shards, shard) for shard in run]

    def _cut(self, indices: torch.Tensor, whole: int) -> tuple[list[int], ...]:
        """This worker's `indices` of a global batch, shard by shard; () where there are no shards."""
        if not self.shards:
            return ()
        samples, cuts = indices.tolist(), self._bounds(whole)
        return tuple(samples[low - cuts[0][0] : high - cuts[0][0]] for low, high in cuts)

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


class _OwnOrder:
    """This worker's part of an epoch's order: the only thing that is held for the whole epoch.

    What a step takes is cut out of it when it is asked for. Lists of Python's numbers for an epoch would take some 40
    bytes a sample; this takes 4, divided by the number of workers.

    Args:
        loader: whose worker it is.
        order: of the epoch; not kept, where there are several workers.

    Attributes:
        spare: any one sample.
    """

    def __init__(self, loader: Loader, order: torch.Tensor) -> None:
        self._samples, self._global_batch = loader.samples, loader.global_batch
        self._full = loader.samples // loader.global_batch  # steps; what is left over may be one more
        low, high = loader.own_range(loader.global_batch)
        start = self._full * loader.global_batch
        self._rows = order[:start].view(self._full, -1)[:, low:high].contiguous() if self._full else order[:0]
        low, high = loader.own_range(loader.samples - start)
        self._last = order[start + low : start + high].clone()
        self.spare = int(order[0])

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """The samples that this worker computes in `step`, int64, and how many all workers do."""
        start, stop = step_range(self._samples, self._global_batch, step)
        return (self._rows[step] if step < self._full else self._last).long(), stop - start


def _length(dataset: Any) -> int:
    try:
        if isinstance(dataset, IterableDataset):
            raise TypeError
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise ConfigError(
            "dataset",
            "a map-style data set, with len() and indexing",
            found=type(dataset).__name__,
            hint="A stream has no order that could be dealt out; give it a length and an index.",
        ) from None


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, f"a whole number of at least {least}", value)


def _prefetch(asked: int | None, num_workers: int) -> int:
    if asked is None:
        return 2 * num_workers
    _check_whole("prefetch", asked, 1)
    if asked < num_workers:
        raise ConfigError("prefetch", f"at least {num_workers}, one for each of the loader processes", asked)
    return asked


def _taken_over(epoch: int) -> ConfigError:
    return ConfigError(
        "loader",
        "one epoch at a time where loader processes are shared",
        found=f"another one, or close(), before the last batch of epoch {epoch}",
        hint="Make a Loader for each, e.g. one more to evaluate with.",
    )
