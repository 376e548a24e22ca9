"""Data sets whose samples have indices: an epoch's order, shuffled or from a batch sampler, and a
worker's part.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, Protocol

import torch
from typing_extensions import override

from ..errors import ConfigError, MismatchError
from ..flight_recorder import named
from ..parallel.fingerprints import checksum_of
from ..parallel.nested import narrow
from ..parallel.randomness import preserve_generators
from ..parallel.shards import mix, steps_per_epoch
from .batch_plan import BatchPlan, PartOfBatch
from .batch_samplers import LengthBatchSampler, TokenBatchSampler, index_dtype
from .device_copies import to_device
from .fetching import BatchRequest, Fetcher, superseded_error
from .same_data import SameData, digests_of_some
from .sample_draws import seed_draws
from .source import Source

_log = logging.getLogger(__name__)

_ENDED = object()

# Steps of an epoch's order that are converted together: one by one, the calls of torch take 20 µs a
# step. So many samples at most, as a batch keeps the memory of its block.
_STEPS_AT_ONCE = 64
_SAMPLES_AT_ONCE = 4096


class Order(Protocol):
    """This worker's part of the order of an epoch."""

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """Return this worker's samples of `step`, int64, and the size of the global batch."""
        ...


class IndexedSource(Source):
    """A map-style data set, in an order that depends on (seed, epoch) alone; without `shuffle` in
    its own.

    Args:
        dataset: the data set.
        plan: of the batches.

    Raises:
        ConfigError: for a data set without a length, or fewer samples than workers.
    """

    # Whether a sample may cost the reading of a block of them.
    _in_blocks = False

    def __init__(self, dataset: Any, plan: BatchPlan) -> None:
        super().__init__(dataset, plan)
        self.samples = length_of(dataset)
        self._same_data: SameData | None = None  # compares the data sets of the workers
        self._compared: Any = None  # a reference to the process group whose ranks do that
        self._is_other_length_said = False
        for name, value in (
            ("dataset", self.samples),
            ("global_batch_size", plan.global_batch_size),
        ):
            if value < plan.comm.size:
                hint = "Use fewer workers" + (
                    " or a larger global batch." if name == "global_batch_size" else "."
                )
                hint = hint if value else f"This {type(dataset).__name__} is empty."
                raise ConfigError(
                    name, f"at least one sample for each of {plan.comm.size} workers", value, hint
                )
        self._check()

    def _check(self) -> None:
        """Check what the plan says of the order.

        Raises:
            ConfigError: if it does not fit the data set.
        """
        plan = self.plan
        self._check_drop_last()
        if self.samples < plan.global_batch_size and plan.shuffle and plan.comm.rank == 0:
            problem = (
                "global_batch_size=%d is more than the %d samples of the data set: an epoch is a "
                "single step"
            )
            _log.warning(problem, plan.global_batch_size, self.samples)

    def _check_drop_last(self) -> None:
        if self.plan.drop_last and self.samples < self.plan.global_batch_size:
            raise ConfigError(
                "global_batch_size",
                f"at most the {self.samples} samples of the data set with drop_last",
                self.plan.global_batch_size,
            )

    @property
    @override
    def steps(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return steps_per_epoch(self.samples, self.plan.global_batch_size, self.plan.drop_last)

    @override
    def has_ended(self, step: int) -> bool:
        return step >= len(self)

    @override
    def settings(self) -> Mapping[str, Any]:
        return {"samples": self.samples}

    def loop(self, epoch: int, first: int) -> tuple[int, int]:
        """Return loop 0, which all epochs are, and the batches before this epoch."""
        plan = self.plan
        return mix((self.samples, plan.global_batch_size, plan.shuffle)) or 1, epoch * len(self)

    @override
    def order(self, epoch: int) -> torch.Tensor:
        return self._permutation(epoch).long()

    def _permutation(self, epoch: int) -> torch.Tensor:
        """Return the order in the smallest dtype; `randperm` draws the same numbers with any
        dtype.
        """
        dtype = index_dtype(self.samples)
        if not self.plan.shuffle:
            return torch.arange(self.samples, dtype=dtype)
        # PyTorch's CPU generator uses only the low 32 bits of a seed.
        generator = torch.Generator().manual_seed(self.plan.key_of_order(epoch) & 0xFFFFFFFF)
        return torch.randperm(self.samples, generator=generator, dtype=dtype)

    def batches(self, epoch: int, first: int) -> Iterator[PartOfBatch]:
        """Yield this worker's part of each global batch of an epoch, from step `first` on.

        Raises:
            ConfigError: if the loader processes serve another epoch meanwhile.
            MismatchError: on every worker, if the workers' data sets differ.
        """
        self._compare_data(epoch)
        order, loaded = self._start(epoch, range(first, len(self)))
        arriving = to_device(loaded, self.plan.comm.device)
        for step in range(first, len(self)):
            indices, global_size = order.part(step)
            size = indices.shape[0]
            data = next(arriving, _ENDED)
            if data is _ENDED:
                raise superseded_error(epoch)
            whole = size or self.plan.virtual_workers
            yield PartOfBatch(
                data if whole else narrow(data, 0, 0, 1), indices, size, global_size, step
            )

    def _start(self, epoch: int, steps: range) -> tuple[Order, Iterator[Any]]:
        """Return this worker's part of an epoch's order, and its batches in the memory of the
        CPU.
        """
        order = _WorkerOrder(self.plan, self._permutation(epoch))
        key = self.plan.key_of_samples(epoch)
        if self.plan.virtual_workers:
            return order, self.fetcher.fetch(self._requests(key, order, steps, order.any_sample))
        requested = order.requested(steps, self.fetcher.takes_tensors)
        return order, self.fetcher.fetch(BatchRequest(key, indices) for indices in requested)

    def _requests(
        self, key: int, order: Order, steps: range, any_sample: int
    ) -> Iterator[BatchRequest]:
        """Yield the requests for steps one by one, with their shards.

        An empty part still needs the shapes of samples: one sample is loaded, and removed by
        `narrow`.
        """
        for step in steps:
            indices, global_size = order.part(step)
            yield BatchRequest(
                key, self.plan.by_shard(indices, global_size) or indices.tolist() or [any_sample]
            )

    @override
    def stand_in(self) -> Any:
        fetcher = Fetcher(self._dataset, self.plan.collate_fn, 0, 0, pin=False)
        return next(to_device(fetcher.fetch([BatchRequest(0, [0, 0])]), self.plan.comm.device))

    # The workers compare their data at the beginning of each epoch.

    def _compare_data(self, epoch: int) -> None:
        """Check that all workers have the same data set in this epoch.

        Not in the constructor: a loader that is made on one worker alone, and not read there, is
        none of the others' business. A worker that joins an elastic job compares with the others
        once it is in their group.

        Raises:
            MismatchError: on every worker, if they differ.
        """
        plan = self.plan
        length = self._length_now()
        group = plan.comm.group
        if group is None or plan.comm.size == 1:
            return
        self._compare_files()
        if self._same_data is None or self._compared() is not group:
            collates = plan.collate_fn is not None and not plan.virtual_workers
            described = plan.described(self._dataset)
            self._same_data = SameData(
                plan.comm, described, self.fetcher.load, self._in_blocks, collates
            )
            self._compared = weakref.ref(group)
        settings = {
            "global_batch_size": plan.global_batch_size,
            "shuffle": plan.shuffle,
            "drop_last": plan.drop_last,
        }
        if plan.shuffle:  # without, the seed is that of random draws alone
            settings["seed"] = plan.seed
        self._same_data.check(settings, length, plan.key_of_samples(epoch))

    @override
    def digests(self) -> dict[int, str]:
        return digests_of_some(self.fetcher.load, length_of(self._dataset), self._in_blocks)

    def _compare_files(self) -> None:
        """Check that all workers have the same files, if the data set has some."""

    def _length_now(self) -> int:
        """Return the length of the data set; say so if it is another one than when the loader was
        made.
        """
        length = length_of(self._dataset)
        if length != self.samples and self.plan.comm.rank == 0 and not self._is_other_length_said:
            self._is_other_length_said = True
            problem = (
                "%s has %d samples now, and had %d when its loader was made: so many are used. "
                "Make another loader"
            )
            _log.warning(problem, self.plan.described(self._dataset), length, self.samples)
        return length


class SampledSource(IndexedSource):
    """A map-style data set whose global batches are those of a batch sampler.

    Args:
        dataset: the data set.
        plan: of the batches.
        batch_sampler: see `Loader`.

    Raises:
        ConfigError: for an invalid batch sampler.
    """

    def __init__(
        self, dataset: Any, plan: BatchPlan, batch_sampler: Iterable[Sequence[int]]
    ) -> None:
        self._sampler: Any = batch_sampler
        self._digest = 0  # of the current epoch's batches
        super().__init__(dataset, plan)

    def _check(self) -> None:
        plan = self.plan
        sampler = self._sampler
        if plan.drop_last or not plan.shuffle:
            hint = "The batch sampler alone determines the order and the last batch."
            found = "drop_last=True" if plan.drop_last else "shuffle=False"
            raise ConfigError(
                "batch_sampler",
                "neither drop_last nor shuffle=False beside it",
                found=found,
                hint=hint,
            )
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            expected = (
                "an iterable of lists of indices with len(), such as "
                "lockstep.data.LengthBatchSampler"
            )
            raise ConfigError("batch_sampler", expected, found=type(sampler).__name__)
        if len(sampler) < 1:
            raise ConfigError("batch_sampler", "at least one batch in an epoch", found="none")

    def __len__(self) -> int:
        return len(self._sampler)

    @override
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "batch_sampler": type(self._sampler).__name__}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batch_order": self._digest}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._digest = int(state.get("batch_order", 0))

    @override
    def order(self, epoch: int) -> torch.Tensor:
        return self._read(epoch).indices.long()

    def _start(self, epoch: int, steps: range) -> tuple[Order, Iterator[Any]]:
        order = _SampledOrder(self.plan, self._agreed_batches(epoch, is_resumed=steps.start > 0))
        key = self.plan.key_of_samples(epoch)
        return order, self.fetcher.fetch(self._requests(key, order, steps, order.any_sample))

    def _read(self, epoch: int) -> _Batches:
        """Read the global batches of `epoch` from the batch sampler.

        Raises:
            ConfigError: for another number of batches than its length, or a batch that is empty,
                too large, or has something other than indices of the data set.
        """
        sampler = self._sampler
        most = self.plan.global_batch_size
        with preserve_generators():
            seed_draws(self.plan.key_of_order(epoch), 0)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            # lists of millions of numbers would take seconds
            is_own = type(sampler) in (LengthBatchSampler, TokenBatchSampler)
            batches = _Batches.of(
                sampler.tensors() if is_own else [_indices(batch) for batch in sampler]
            )
        if len(batches.sizes) != len(self):
            raise ConfigError(
                "batch_sampler", f"{len(self)} batches, its len()", found=f"{len(batches.sizes)}"
            )
        wrong = (batches.sizes < 1) | (batches.sizes > most)
        if wrong.any():
            number = int(wrong.int().argmax())
            expected = f"batches of 1 to {most} indices (global_batch_size)"
            found = f"{int(batches.sizes[number])} in batch {number} of epoch {epoch}"
            raise ConfigError("batch_sampler", expected, found=found)
        lowest, highest = torch.aminmax(batches.indices)
        if lowest < 0 or highest >= self.samples:
            bad = (batches.indices < 0) | (batches.indices >= self.samples)
            place = int(bad.int().argmax())
            number = int(torch.searchsorted(batches.ends, place, right=True))
            found = f"{int(batches.indices[place])} in batch {number} of epoch {epoch}"
            raise ConfigError("batch_sampler", f"indices from 0 to {self.samples - 1}", found=found)
        return batches

    def _agreed_batches(self, epoch: int, is_resumed: bool) -> _Batches:
        """Return the global batches of `epoch`, which are the same on all workers.

        Args:
            epoch: the epoch.
            is_resumed: whether some of its batches were used before a resume.

        Raises:
            MismatchError: on every worker, if they differ, or differ from those before a resume in
                the epoch.
        """
        comm = self.plan.comm
        batches = self._read(epoch)
        batches.indices = batches.indices.to(index_dtype(self.samples))
        digest = int(checksum_of([batches.indices, batches.sizes])) or 1
        if comm.size > 1:
            with named("comparison of the batch samplers"):
                if len(set(comm.allgather_object(digest))) > 1:
                    self._raise_differing_batches(epoch, batches)
        if is_resumed and self._digest not in (0, digest):
            raise MismatchError(
                f"batch_sampler: the batches of epoch {epoch} are others than before the run was "
                "resumed. Let its order depend on the epoch alone (set_epoch), or draw from the "
                "global generators of torch, Python or NumPy, which are seeded by the epoch."
            )
        self._digest = digest
        return batches

    def _raise_differing_batches(self, epoch: int, batches: _Batches) -> NoReturn:
        by_rank = self.plan.comm.allgather_object(
            [mix(batch.tolist()) for batch in batches.tensors()]
        )
        for rank, other in enumerate(by_rank):
            pairs = enumerate(zip_longest(by_rank[0], other))
            number = next((number for number, (first, second) in pairs if first != second), None)
            if number is not None:
                raise MismatchError(
                    f"batch_sampler: batch {number} of epoch {epoch} differs on ranks 0 and "
                    f"{rank}. Let its order depend on the epoch alone (set_epoch), or draw from "
                    "the global generators of torch, Python or NumPy, which are seeded alike on "
                    "all workers."
                )
        raise AssertionError("equal batches have equal digests")


class _WorkerOrder(Order):
    """This worker's part of an epoch's order, from which the samples of each step are sliced.

    It takes 4 bytes per sample, divided by the number of workers; Python lists for an epoch would
    take some 40.

    Args:
        plan: of the batches.
        order: the order of the epoch; with several workers, it is not kept.

    Attributes:
        any_sample: the index of some sample.
    """

    def __init__(self, plan: BatchPlan, order: torch.Tensor) -> None:
        samples = order.shape[0]
        self._global_batch_size = plan.global_batch_size
        self._full_steps = samples // plan.global_batch_size  # a smaller last one may follow
        low, high = plan.local_range(plan.global_batch_size)
        start = self._full_steps * plan.global_batch_size
        self._rows = order[:0]
        if self._full_steps:
            self._rows = order[:start].view(self._full_steps, -1)[:, low:high].contiguous()
        self._last_size = samples - start
        low, high = plan.local_range(self._last_size)
        self._last = order[start + low : start + high].clone()
        self.any_sample = int(order[0])
        self._at_once = max(
            1, min(_STEPS_AT_ONCE, _SAMPLES_AT_ONCE // max(1, self._rows.shape[-1]))
        )
        self._first = 0
        # the rows of some steps from the first one on, int64
        self._block: tuple[torch.Tensor, ...] = ()

    @override
    def part(self, step: int) -> tuple[torch.Tensor, int]:
        if step >= self._full_steps:
            return self._last.long(), self._last_size
        at = step - self._first
        if not 0 <= at < len(self._block):
            at = 0
            self._first = step
            self._block = self._rows[step : step + self._at_once].long().unbind()
        return self._block[at], self._global_batch_size

    def requested(self, steps: range, as_tensors: bool) -> Iterator[list[int] | torch.Tensor]:
        """Yield this worker's samples of each of `steps`; some sample where it has none, for the
        shapes.

        They are asked for ahead of `part`, by the batches that are loaded ahead.
        """
        step = steps.start
        full = min(steps.stop, self._full_steps)
        while step < full:
            rows = self._rows[step : min(step + self._at_once, full)]
            if not rows.shape[1]:
                yield from [[self.any_sample]] * rows.shape[0]
            elif as_tensors:
                yield from rows.long().unbind()
            else:
                yield from rows.tolist()
            step += rows.shape[0]
        if step < steps.stop:
            yield self._last.tolist() or [self.any_sample]


class _Batches:
    """The batches of an epoch.

    Args:
        indices: of all batches, one after the other, int64.
        sizes: of the batches, int64.

    Attributes:
        ends: where each batch ends among `indices`.
    """

    def __init__(self, indices: torch.Tensor, sizes: torch.Tensor) -> None:
        self.indices = indices
        self.sizes = sizes
        self.ends = sizes.cumsum(0)

    @classmethod
    def of(cls, batches: Sequence[Any]) -> _Batches:
        """Return batches that are given as lists of indices or as tensors of them."""
        sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.int64)
        if batches and isinstance(batches[0], torch.Tensor):
            return cls(torch.cat(list(batches)), sizes)
        return cls(
            torch.tensor([index for batch in batches for index in batch], dtype=torch.int64), sizes
        )

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the indices of each batch."""
        return torch.split(self.indices, self.sizes.tolist())


class _SampledOrder(Order):
    """This worker's part of an epoch's batches from a batch sampler; see `_WorkerOrder`."""

    def __init__(self, plan: BatchPlan, batches: _Batches) -> None:
        self._plan = plan
        self._indices = batches.indices
        self._sizes = batches.sizes.tolist()
        self._ends = batches.ends.tolist()
        self.any_sample = int(self._indices[0])

    @override
    def part(self, step: int) -> tuple[torch.Tensor, int]:
        size = self._sizes[step]
        start = self._ends[step] - size
        low, high = self._plan.local_range(size)
        return self._indices[start + low : start + high].long(), size


def _indices(batch: Any) -> list[int]:
    """Return the indices of a batch from a batch sampler.

    Raises:
        ConfigError: if it is not a list of whole numbers.
    """
    try:
        return [operator.index(index) for index in batch]
    except TypeError:
        expected = "lists of indices, one for each global batch"
        raise ConfigError(
            "batch_sampler", expected, found=f"{type(batch).__name__}: {batch!r:.60}"
        ) from None


def length_of(dataset: Any) -> int:
    """Return the number of samples of a map-style data set.

    Raises:
        ConfigError: if it has none.
    """
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise ConfigError(
            "dataset",
            "a map-style data set, with len() and indexing, or an iterable one",
            found=type(dataset).__name__,
        ) from None
