"""The order of samples in an epoch, and this worker's part of each global batch."""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from typing_extensions import Never, Self

from .. import arguments, communicator, devices
from ..checkpoint.numerics import NUMERICS, changes_since
from ..errors import CheckpointError, ConfigError, MismatchError, unexpected_argument
from ..flight_recorder import named, note_batch
from ..other_names import in_loader
from ..parallel.fingerprints import checksum_of
from ..parallel.nested import collated_size, narrow
from ..parallel.randomness import preserve_generators
from ..parallel.shards import (
    bounds,
    check_virtual_workers,
    local_range,
    mix,
    steps_per_epoch,
)
from .fetching import (
    BatchInParts,
    BlockRequest,
    Collate,
    Fetcher,
    PartPosition,
    ReadRequest,
    Request,
    seed_draws,
    superseded_error,
    to_device,
)
from .iterable import (
    BatchSettings,
    EpochOfStream,
    PartOfBatch,
    StreamPosition,
    is_iterable,
    no_samples,
    substreams_of,
)
from .same_data import SameData

__all__ = [
    "Batch",
    "LengthBatchSampler",
    "Loader",
    "TokenBatchSampler",
    "check_dataset",
    "dataloader_batch_size",
    "dataloader_settings",
]

_log = logging.getLogger(__name__)


# --- Loader -----------------------------------------------------------------------------------------------------------

_ENDED = object()

# Part of the keys of draws, so that the draws of one seed are independent; `lockstep.training.step` uses 2.
_ORDER, _SAMPLES = 1, 3

_MAX_INT32_SAMPLES = 1 << 31

# Steps of an epoch's order that are converted together: one by one, the calls of torch take 20 µs a step. So many
# samples at most, as a batch keeps the memory of its block.
_STEPS_AT_ONCE, _SAMPLES_AT_ONCE = 64, 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's part of one global batch.

    Attributes:
        data: the collated samples on the worker's device, usually (inputs, targets). If the part is empty, because the
            last batch has fewer samples than there are workers, its tensors have 0 samples.
        indices: int64 tensor of shape (size,), the samples' indices in the data set.
        size: number of samples in this part.
        global_size: number of samples in the global batch.
        epoch: the epoch.
        step: the batch's number in the epoch, from 0.
        virtual_workers: the number of shards of the global batch, see `Loader`; `data` is then a list of the collated
            shards of this worker, with None for one without samples.
        collated: with a collate function of the user's, the number of samples that it has made of this part, or of each
            shard: it may leave some out. None if all samples are in the batch.
    """

    data: Any
    indices: torch.Tensor
    size: int
    global_size: int
    epoch: int
    step: int
    virtual_workers: int | None = None
    collated: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the elements of `data`: ``inputs, targets = batch``.

        Raises:
            TypeError: if `data` is not a tuple or list, or is divided into the shards of virtual workers.
        """
        if self.virtual_workers is not None:
            raise TypeError("with virtual_workers, Batch.data is a list of shards: use lockstep.TrainStep for them")
        if not isinstance(self.data, (tuple, list)):
            raise TypeError(f"Batch.data is a {type(self.data).__name__}, not a tuple: use batch.data")
        return iter(self.data)


class Loader:
    """Loads this worker's part of each global batch of a data set, epoch by epoch.

    Every sample of an epoch is used exactly once at any number of workers: no sample is repeated to make parts equal.
    The order depends only on (seed, epoch). Parts are contiguous and differ by at most one sample.

    Before each ``dataset[index]`` the global generators of torch (CPU), Python and NumPy are seeded by (seed, epoch,
    index), so that augmentation is the same at any number of workers and loader processes, and after resuming in the
    middle of an epoch. Draws in `collate_fn` are reproducible too, but depend on how the batch is divided.

    An iterable data set has its own order, which must be the same whenever an epoch is read, and on every worker. Its
    method ``set_epoch(epoch)``, if there is one, is called first. Every worker reads all of it, and collates its part
    of each global batch, unless it is given as `lockstep.data.Substreams`. The global generators are seeded by (seed,
    epoch, number of the sample) before each sample. After a resume, it is read from its beginning and what was used is
    dropped, unless it has ``state_dict()`` and ``load_state_dict()``. `len()` is not known before the end of an epoch.

    Args:
        dataset: a map-style data set: ``len(dataset)`` and ``dataset[index]``. If it has a method
            ``collated_batch(indices)``, that is called for each part, and returns it collated; no generator is seeded
            then, and the data set itself must key its random draws. Or an iterable data set, see above.
        global_batch_size: samples in one optimizer step, over all workers.
        seed: seed of the order and of the data set's random draws.
        shuffle: False keeps the data set's order in every epoch. An iterable data set has its own order in any case;
            with True, as for training, less than one whole batch of it is an error.
        drop_last: skip a last batch that is smaller than `global_batch_size`.
        num_workers: number of loader processes of each worker; 0 loads in this process. Of an iterable data set, each
            part is read by one of them.
        prefetch: maximum number of batches that the loader processes of a worker load ahead of the current one; at
        least
            `num_workers`; twice that if None. On a GPU, one more is being copied to the device.
        comm: communicator over the workers; that of `lockstep.init()` if None.
        collate_fn: makes one batch of a list of samples; `torch.utils.data.default_collate` if None.
        virtual_workers: divide each global batch into this many ordered shards. Each worker gets consecutive shards,
            and each shard is collated separately, so that the result does not depend on the number of workers.
        batch_sampler: yields the indices of each *global* batch of an epoch, at most `global_batch_size` of them, and
            has ``len()``; such as a `LengthBatchSampler`. Its method ``set_epoch(epoch)``, if there is one, is called
            first. It is read as a whole at the beginning of each epoch, on every worker, with the global generators of
            torch, Python and NumPy seeded by (seed, epoch); the workers compare what they have read.

    Raises:
        ConfigError: an argument is invalid, or there are fewer samples or virtual workers than workers.
        TypeError: for an argument of another name; the error says what it is here.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int | None = None,
        comm: communicator.Communicator | None = None,
        collate_fn: Collate | None = None,
        virtual_workers: int | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            name = next(iter(unknown))
            raise unexpected_argument("Loader", name, in_loader(name), arguments.keyword_names(Loader))
        self.shuffle = bool(arguments.flag("shuffle", shuffle))
        self.drop_last = bool(arguments.flag("drop_last", drop_last))
        self.global_batch_size = arguments.whole("global_batch_size", global_batch_size, least=1)
        self.seed = arguments.whole("seed", seed, least=0)
        num_workers = arguments.whole("num_workers", num_workers, least=0)
        if collate_fn is not None:
            arguments.function("collate_fn", collate_fn, "a function that makes a batch of a list of samples", takes=1)
        if comm is not None and (isinstance(comm, type) or not all(hasattr(comm, name) for name in ("rank", "size"))):
            raise ConfigError("comm", "the communicator that lockstep.init() returns", comm)
        self.comm = comm or communicator.init()
        self.virtual_workers = (
            None if virtual_workers is None else check_virtual_workers(virtual_workers, self.comm.size)
        )
        check_dataset(dataset, "dataset", collates=collate_fn is not None)
        self._substreams = substreams_of(dataset)
        # Of an iterable data set their number is known when it ends.
        self.dataset, self.samples = dataset, 0 if self._substreams is not None else _length(dataset)
        self._batch_sampler = batch_sampler
        self._in_blocks = batch_sampler is None and hasattr(dataset, "epoch_order")
        self._check(num_workers)
        if self._substreams is not None:
            num_workers = min(num_workers, self._substreams.parts)
        if prefetch is None:
            prefetch = 2 * num_workers
        elif arguments.whole("prefetch", prefetch, least=1) < num_workers:
            raise ConfigError("prefetch", f"at least {num_workers}, one for each of the loader processes", prefetch)
        pin = devices.pins_memory(self.comm.device)
        self.num_workers = num_workers
        self._collate_fn = collate_fn
        in_parts = self._in_blocks or self._substreams is not None
        source = dataset if self._substreams is None else self._substreams
        self._fetcher = Fetcher(source, collate_fn, num_workers, prefetch, pin, in_parts)
        self._epoch, self._step = 0, 0
        self._resume_at: tuple[int, int] | None = None  # the loaded position, until its epoch starts
        self._settings_now: dict[str, Any] | None = None  # within an epoch, where a state is taken at each step
        self._batches_digest = 0  # of the current epoch's batches, with a batch sampler
        self._stream = StreamPosition()  # that of the next batch, of an iterable data set
        self._steps: int | None = None  # of an epoch of an iterable data set, when one has been read
        self.role = ""  # what the data set is for, as messages say it: set by who was given the loader
        self._same_data: SameData | None = None  # compares the data sets of the workers
        self._compared: Any = None  # a reference to the process group whose ranks do that
        self._is_other_length_said = False
        self._has_said_parts = False

    def _check(self, num_workers: int) -> None:
        where = getattr(self.dataset, "device", None)
        if num_workers and isinstance(where, torch.device) and where.type != "cpu":
            hint = "Batches are made on that device."
            raise ConfigError("num_workers", f"0 for a data set in the memory of {where}", num_workers, hint)
        if self._substreams is not None:
            self._check_stream(self._substreams.parts)
            return
        for name, value in (("dataset", self.samples), ("global_batch_size", self.global_batch_size)):
            if value < self.comm.size:
                hint = "Use fewer workers" + (" or a larger global batch." if name == "global_batch_size" else ".")
                hint = hint if value else f"This {type(self.dataset).__name__} is empty."
                raise ConfigError(name, f"at least one sample for each of {self.comm.size} workers", value, hint)
        if self._batch_sampler is not None:
            self._check_batch_sampler(self._batch_sampler)
            return
        if self.drop_last and self.samples < self.global_batch_size:
            raise ConfigError(
                "global_batch_size",
                f"at most the {self.samples} samples of the data set with drop_last",
                self.global_batch_size,
            )
        if self._in_blocks and self.samples < self.global_batch_size and self.shuffle:
            raise ConfigError("global_batch_size", f"at most the samples of {self.dataset}", self.global_batch_size)
        if self.samples < self.global_batch_size and self.shuffle and self.comm.rank == 0:
            what = "global_batch_size=%d is more than the %d samples of the data set: an epoch is a single step"
            _log.warning(what, self.global_batch_size, self.samples)

    def _check_stream(self, parts: int) -> None:
        if self._batch_sampler is not None:
            hint = "An iterable data set has its own order."
            raise ConfigError("batch_sampler", "None", found=type(self._batch_sampler).__name__, hint=hint)
        if (least := max(self.comm.size, parts)) > self.global_batch_size:
            what = f"{parts} parts of the data set" if least == parts else f"{least} workers"
            expected = f"at least one sample for each of {what}"
            raise ConfigError("global_batch_size", expected, self.global_batch_size)

    def _check_batch_sampler(self, sampler: Any) -> None:
        if self.drop_last or not self.shuffle:
            hint = "The batch sampler alone determines the order and the last batch."
            found = "drop_last=True" if self.drop_last else "shuffle=False"
            raise ConfigError("batch_sampler", "neither drop_last nor shuffle=False beside it", found=found, hint=hint)
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            expected = "an iterable of lists of indices with len(), such as lockstep.data.LengthBatchSampler"
            raise ConfigError("batch_sampler", expected, found=type(sampler).__name__)
        if len(sampler) < 1:
            raise ConfigError("batch_sampler", "at least one batch in an epoch", found="none")

    def __len__(self) -> int:
        """Steps in an epoch.

        Raises:
            TypeError: for an iterable data set of which no whole epoch has been read yet.
        """
        if self._substreams is not None:
            if self._steps is None:
                name = self._substreams.name
                raise TypeError(
                    f"the number of steps in an epoch of {name} is not known before its end: it is iterable"
                )
            return self._steps
        if self._batch_sampler is not None:
            return len(self._batch_sampler)  # type: ignore[arg-type]
        return steps_per_epoch(self.samples, self.global_batch_size, self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the next epoch: epoch 0, then 1, and so on, from the loaded position in the first."""
        if not torch.is_grad_enabled():
            self._say_that_parts_are_seen()
        return self.epoch(self._epoch)

    def _say_that_parts_are_seen(self) -> None:
        """Say once that a loop without gradients sees this worker's part alone: sums over it are no results."""
        if not self._has_said_parts and self.comm.size > 1 and self.comm.rank == 0:
            _log.warning(
                "%d workers: in a loop without gradients each of them gets a part of the data, so that a sum, a mean "
                "or a count over the loop is that of a part. lockstep.evaluate(model, loader, metrics=...) and "
                "lockstep.predict return results of all samples; comm.allreduce sums up what the loop has counted",
                self.comm.size,
            )
        self._has_said_parts = True

    @property
    def parts(self) -> dict[str, Any]:
        """What it was given to make batches of the data set's samples, by argument; None for what it was not."""
        return {"batch_sampler": self._batch_sampler, "collate_fn": self._collate_fn}

    @property
    def is_iterable(self) -> bool:
        """Whether its data set can only be iterated over."""
        return self._substreams is not None

    @property
    def steps(self) -> int | None:
        """Steps in an epoch; None for an iterable data set of which no whole epoch has been read yet."""
        return self._steps if self._substreams is not None else len(self)

    def order(self, epoch: int) -> torch.Tensor:
        """Return the samples of an epoch in the order in which they form global batches: int64, shape (samples,).

        Raises:
            ConfigError: for an iterable data set.
        """
        if self._substreams is not None:
            raise ConfigError(
                "dataset", "a map-style data set, whose samples have indices", found=self._substreams.name
            )
        if self._batch_sampler is not None:
            return self._read_batches(epoch).indices.long()
        if self._in_blocks:
            blocks = self._block_order(epoch)
            return torch.cat([blocks.samples(step, 0, blocks.global_size(step)) for step in range(blocks.steps)])
        return self._order(epoch).long()

    def _read_batches(self, epoch: int) -> _Batches:
        """Read the global batches of `epoch` from the batch sampler.

        Raises:
            ConfigError: for another number of batches than its length, or a batch that is empty, too large, or has
                something other than indices of the data set.
        """
        sampler: Any = self._batch_sampler
        with preserve_generators():
            seed_draws(mix((self.seed, _ORDER, epoch)), 0)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            # lists of millions of numbers would take seconds
            own = type(sampler) in (LengthBatchSampler, TokenBatchSampler)
            batches = _Batches.of(sampler.tensors() if own else [_indices(batch) for batch in sampler])
        if len(batches.sizes) != len(self):
            raise ConfigError("batch_sampler", f"{len(self)} batches, its len()", found=f"{len(batches.sizes)}")
        wrong = (batches.sizes < 1) | (batches.sizes > self.global_batch_size)
        if wrong.any():
            number = int(wrong.int().argmax())
            expected = f"batches of 1 to {self.global_batch_size} indices (global_batch_size)"
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

    def _agreed_batches(self, epoch: int) -> _Batches:
        """Return the global batches of `epoch`, which are the same on all workers.

        Raises:
            MismatchError: on every worker, if they differ, or differ from those before a resume in the epoch.
        """
        batches = self._read_batches(epoch)
        small = self.samples <= _MAX_INT32_SAMPLES
        batches.indices = batches.indices.to(torch.int32 if small else torch.int64)
        digest = int(checksum_of([batches.indices, batches.sizes])) or 1
        if self.comm.size > 1:
            with named("comparison of the batch samplers"):
                if len(set(self.comm.allgather_object(digest))) > 1:
                    self._raise_differing_batches(epoch, batches)
        if self._step and self._batches_digest not in (0, digest):
            raise MismatchError(
                f"batch_sampler: the batches of epoch {epoch} are others than before the run was resumed. Let its "
                "order depend on the epoch alone (set_epoch), or draw from the global generators of torch, Python or "
                "NumPy, which are seeded by the epoch."
            )
        self._batches_digest = digest
        return batches

    def _raise_differing_batches(self, epoch: int, batches: _Batches) -> NoReturn:
        by_rank = self.comm.allgather_object([mix(batch.tolist()) for batch in batches.tensors()])
        for rank, other in enumerate(by_rank):
            pairs = enumerate(zip_longest(by_rank[0], other))
            number = next((number for number, (first, second) in pairs if first != second), None)
            if number is not None:
                raise MismatchError(
                    f"batch_sampler: batch {number} of epoch {epoch} differs on ranks 0 and {rank}. Let its order "
                    "depend on the epoch alone (set_epoch), or draw from the global generators of torch, Python or "
                    "NumPy, which are seeded alike on all workers."
                )
        raise AssertionError("equal batches have equal digests")

    def _order(self, epoch: int) -> torch.Tensor:
        """Return `order` in the smallest dtype; `randperm` draws the same numbers with any dtype."""
        dtype = torch.int32 if self.samples <= _MAX_INT32_SAMPLES else torch.int64
        if not self.shuffle:
            return torch.arange(self.samples, dtype=dtype)
        # PyTorch's CPU generator uses only the low 32 bits of a seed.
        generator = torch.Generator().manual_seed(mix((self.seed, _ORDER, epoch)) & 0xFFFFFFFF)
        return torch.randperm(self.samples, generator=generator, dtype=dtype)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate over this worker's part of each global batch of `epoch`.

        It starts at the first batch; at the loaded position if `load_state_dict` has just loaded one of this epoch.

        Raises:
            ConfigError: the iterator is used after `close`, or after another epoch has started with the same loader
                processes.
        """
        first = self._resume_at[1] if self._resume_at is not None and self._resume_at[0] == epoch else 0
        self._resume_at = None
        self._epoch, self._step = epoch, first
        if self._substreams is not None:
            yield from self._epoch_of_stream(epoch, self._stream if first else StreamPosition())
            return
        steps = range(first, len(self))
        order, fetched = self._start(epoch, steps)
        loop = mix((self.samples, self.global_batch_size, self.shuffle)) or 1
        batches, before = to_device(fetched, self.comm.device), epoch * len(self)
        self._settings_now = self._settings()
        try:
            for step in steps:
                indices, global_size = order.part(step)
                size = indices.shape[0]
                data = next(batches, _ENDED)
                if data is _ENDED:
                    raise superseded_error(epoch)
                # Before the yield, so that a state saved while the batch is used is the position after it.
                self._epoch, self._step = epoch, step + 1
                part = data if size or self.virtual_workers else narrow(data, 0, 0, 1)
                collated = None if self._collate_fn is None else self._collated_sizes(part, size, global_size)
                note_batch(before + step, loop=loop)
                yield Batch(part, indices, size, global_size, epoch, step, self.virtual_workers, collated)
        except GeneratorExit:  # the loop was left before its end
            note_batch(-1)
            raise
        finally:
            self._settings_now = None
        note_batch((epoch + 1) * len(self), finished=True, loop=loop)
        self._epoch, self._step = epoch + 1, 0

    def _epoch_of_stream(self, epoch: int, start: StreamPosition) -> Iterator[Batch]:
        """Iterate over the batches of an iterable data set from `start` on; see `epoch`."""
        source = self._substreams
        assert source is not None
        key, step = mix((self.seed, _SAMPLES, epoch)), start.step
        loop = mix((epoch, self.global_batch_size, step)) or 1
        parts: deque[PartOfBatch] = deque()
        settings = BatchSettings(
            self.global_batch_size, self.comm, self.virtual_workers, self.drop_last, self.shuffle, self.role
        )

        def loaded() -> Iterator[Any]:
            for part in EpochOfStream(settings, source, self._fetcher, epoch, key, start):
                parts.append(part._replace(samples=[]))
                yield self._collated(key, part)

        for data in to_device(loaded(), self.comm.device):
            part = parts.popleft()
            self._epoch, self._step, self._stream = epoch, part.position.step, part.position
            step, size = part.position.step - 1, part.high - part.low
            indices = torch.arange(part.low, part.high) + step * self.global_batch_size
            note_batch(step, loop=loop)
            collated = self._collated_sizes(data, size, part.global_size)
            try:
                yield Batch(data, indices, size, part.global_size, epoch, step, self.virtual_workers, collated)
            except GeneratorExit:  # the loop was left before its end
                note_batch(-1)
                raise
        steps = self._step
        note_batch(steps, finished=True, loop=loop)
        if self._steps not in (None, steps) and self.comm.rank == 0:
            _log.warning("epoch %d has %d steps, the one before had %d", epoch, steps, self._steps)
        self._steps, self._epoch, self._step, self._stream = steps, epoch + 1, 0, StreamPosition()

    def _collated(self, key: int, part: PartOfBatch) -> Any:
        """Return this worker's part of a batch, or its shards, in the memory of the CPU."""
        first = (part.position.step - 1) * self.global_batch_size

        def collated(low: int, high: int) -> Any:
            numbers = list(range(first + low, first + high))
            return self._fetcher.collated(key, part.samples[low - part.low : high - part.low], numbers)

        if self.virtual_workers:
            ranges = self._shard_ranges(part.global_size)
            return [collated(low, high) if low < high else None for low, high in ranges]
        if part.low < part.high:
            return collated(part.low, part.high)
        sample = part.samples[0] if part.samples else self._any_sample()
        return narrow(self._fetcher.collated(key, [sample], [first]), 0, 0, 1)

    def _any_sample(self) -> Any:
        """Return a sample of an iterable data set, for the shapes.

        Raises:
            DataError: there is none.
        """
        assert self._substreams is not None
        reader, parts = self._substreams.reader(), range(self._substreams.parts)
        with preserve_generators():
            for part in parts:
                (found,) = reader.read(ReadRequest(0, 0, 0, [(PartPosition(part, 0), 1)]))
                if found.samples:
                    return found.samples[0]
        raise no_samples(self._substreams.name, self.role)

    def _start(self, epoch: int, steps: range) -> tuple[_WorkerOrder | _SampledOrder | _BlockOrder, Iterator[Any]]:
        """Return the order of an epoch, and its batches in the memory of the CPU."""
        self._compare_data(epoch)
        if self._in_blocks:
            blocks = self._block_order(epoch)
            key = mix((self.seed, _SAMPLES, epoch))
            return blocks, self._fetcher.fetch_in_parts(blocks.request(key, step) for step in steps)
        order = (
            _WorkerOrder(self, self._order(epoch))
            if self._batch_sampler is None
            else _SampledOrder(self, self._agreed_batches(epoch))
        )
        return order, self._fetcher.fetch(self._requests(order, epoch, steps))

    def _block_order(self, epoch: int) -> _BlockOrder:
        order = self.dataset.epoch_order(self.global_batch_size, self.seed, epoch, self.shuffle)
        return _BlockOrder(self, order, self._fetcher.parts)

    def _compare_data(self, epoch: int) -> None:
        """Check that all workers have the same data set in this epoch.

        Not in the constructor: a loader that is made on one worker alone, and not read there, is none of the others'
        business. A worker that joins an elastic job compares with the others once it is in their group.

        Raises:
            MismatchError: on every worker, if they differ.
        """
        length = self._length_now()
        group = self.comm.group
        if group is None or self.comm.size == 1:
            return
        if self._in_blocks:
            self._compare_files()
        if self._same_data is None or self._compared() is not group:
            collates = self._collate_fn is not None and not self.virtual_workers
            read = self._fetcher.digests
            self._same_data = SameData(self.comm, self._described, read, self._in_blocks, collates)
            self._compared = weakref.ref(group)
        settings = {"global_batch_size": self.global_batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last}
        if self.shuffle:  # without, the seed is that of random draws alone
            settings["seed"] = self.seed
        self._same_data.check(settings, length, mix((self.seed, _SAMPLES, epoch)))

    def _length_now(self) -> int:
        """Return the length of the data set; say so if it is another one than when the loader was made."""
        length = _length(self.dataset)
        if length != self.samples and self.comm.rank == 0 and not self._is_other_length_said:
            self._is_other_length_said = True
            what = "%s has %d samples now, and had %d when its loader was made: so many are used. Make another loader"
            _log.warning(what, self._described, length, self.samples)
        return length

    @property
    def _described(self) -> str:
        return f"{self.role or 'the data set'} ({type(self.dataset).__name__})"

    def _compare_files(self) -> None:
        """Check that all workers have the same files.

        Raises:
            MismatchError: on every worker, if they differ.
        """
        with named("comparison of the files"):
            by_rank = self.comm.allgather_object(self.dataset.order_settings())
        for rank, other in enumerate(by_rank):
            if other != by_rank[0]:
                raise MismatchError(f"the data of ranks 0 and {rank} differ: {by_rank[0]} and {other}")

    def _requests(self, order: _WorkerOrder | _SampledOrder, epoch: int, steps: range) -> Iterator[Request]:
        key = mix((self.seed, _SAMPLES, epoch))
        if isinstance(order, _WorkerOrder) and not self.virtual_workers:
            for requested in order.requested(steps, self._fetcher.takes_tensors):
                yield key, requested
            return
        for step in steps:
            indices, global_size = order.part(step)
            # An empty part still needs the shapes of samples: one sample is loaded, and removed by `narrow`.
            yield key, self._by_shard(indices, global_size) or indices.tolist() or [order.any_sample]

    def stand_in(self) -> Any:
        """Return collated data for a worker that must run a pass although it has no samples.

        It is a sample twice, because batch norm refuses a single one.
        """
        if self._substreams is not None:
            data = self._fetcher.collated(0, [self._any_sample()] * 2, [0, 0])
            return next(to_device([data], self.comm.device))
        fetcher = Fetcher(self.dataset, self._collate_fn, 0, 0, pin=False)
        return next(to_device(fetcher.fetch([(0, [0, 0])]), self.comm.device))

    def local_range(self, global_size: int) -> tuple[int, int]:
        """Return this worker's half-open range of the samples of a global batch of `global_size`."""
        return local_range(global_size, self.comm.size, self.comm.rank, self.virtual_workers)

    def _shard_ranges(self, global_size: int) -> list[tuple[int, int]]:
        """Return the range of samples of each of this worker's shards."""
        assert self.virtual_workers is not None
        shards = range(*bounds(self.virtual_workers, self.comm.size, self.comm.rank))
        return [bounds(global_size, self.virtual_workers, shard) for shard in shards]

    def _collated_sizes(self, data: Any, size: int, global_size: int) -> tuple[int, ...] | None:
        """Return `Batch.collated` for the data of a part with `size` samples."""
        if self._collate_fn is None:
            return None
        if not self.virtual_workers:
            return (collated_size(data, size) if size else 0,)
        ranges = zip(data, self._shard_ranges(global_size), strict=True)
        return tuple([collated_size(shard, high - low) for shard, (low, high) in ranges])

    def _by_shard(self, indices: torch.Tensor, global_size: int) -> tuple[list[int], ...]:
        """Split this worker's `indices` of a global batch by shard; () without virtual workers."""
        if not self.virtual_workers:
            return ()
        samples, ranges = indices.tolist(), self._shard_ranges(global_size)
        start = ranges[0][0]
        return tuple(samples[low - start : high - start] for low, high in ranges)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the next batch."""
        return self._epoch, self._step

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch yielded, and the settings it depends on (not the worker count)."""
        position = {"epoch": self._epoch, "step": self._step, "ended": self.ended}
        state = {**position, **(self._settings_now or self._settings()), "numerics": NUMERICS}
        if self._substreams is not None:
            return {**state, "stream": self._stream._asdict()}
        return state if self._batch_sampler is None else {**state, "batch_order": self._batches_digest}

    @property
    def ended(self) -> bool:
        """Whether the last batch yielded was the last one of its epoch."""
        return self._stream.ended if self._substreams is not None else self._step >= len(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position to a saved one, from a run with any number of workers.

        If Lockstep deals out or draws otherwise than the one that saved it, a line in rank 0's log says so.

        Raises:
            CheckpointError: it was saved with another data set size, global batch size, seed or order.
        """
        for key, current in self._settings().items():
            if state.get(key) != current:
                saved = state.get(key)
                raise CheckpointError(
                    f"the saved position does not fit this loader: {key} was {saved!r}, here it is {current!r}"
                )
        if (changes := changes_since(int(state.get("numerics", 0)))) and self.comm.rank == 0:
            _log.warning("%s", changes)
        self._resume_at = self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self._batches_digest = int(state.get("batch_order", 0))
        self._stream = StreamPosition(**state["stream"]) if self._step and "stream" in state else StreamPosition()

    def _settings(self) -> dict[str, Any]:
        files = self.dataset.order_settings() if self._in_blocks else {}
        return {
            **dict.fromkeys(("files", "shuffle_window", "lanes")),
            **files,
            "parts": None if self._substreams is None else self._substreams.parts,
            "samples": self.samples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_sampler": None if self._batch_sampler is None else type(self._batch_sampler).__name__,
        }

    def close(self) -> None:
        """End the loader processes, if there are any."""
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WorkerOrder:
    """This worker's part of an epoch's order, from which the samples of each step are sliced.

    It takes 4 bytes per sample, divided by the number of workers; Python lists for an epoch would take some 40.

    Args:
        loader: the loader.
        order: the order of the epoch; with several workers, it is not kept.

    Attributes:
        any_sample: the index of some sample.
    """

    def __init__(self, loader: Loader, order: torch.Tensor) -> None:
        self._global_batch_size = loader.global_batch_size
        self._full_steps = loader.samples // loader.global_batch_size  # a smaller last one may follow
        low, high = loader.local_range(loader.global_batch_size)
        start = self._full_steps * loader.global_batch_size
        self._rows = order[:0]
        if self._full_steps:
            self._rows = order[:start].view(self._full_steps, -1)[:, low:high].contiguous()
        self._last_size = loader.samples - start
        low, high = loader.local_range(self._last_size)
        self._last = order[start + low : start + high].clone()
        self.any_sample = int(order[0])
        self._at_once = max(1, min(_STEPS_AT_ONCE, _SAMPLES_AT_ONCE // max(1, self._rows.shape[-1])))
        self._first, self._block = 0, tuple[torch.Tensor, ...]()  # the rows of some steps from the first one on, int64

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """Return this worker's samples of `step`, int64, and the size of the global batch."""
        if step >= self._full_steps:
            return self._last.long(), self._last_size
        at = step - self._first
        if not 0 <= at < len(self._block):
            self._first, at = step, 0
            self._block = self._rows[step : step + self._at_once].long().unbind()
        return self._block[at], self._global_batch_size

    def requested(self, steps: range, as_tensors: bool) -> Iterator[list[int] | torch.Tensor]:
        """Yield this worker's samples of each of `steps`; some sample where it has none, for the shapes.

        They are asked for ahead of `part`, by the batches that are loaded ahead.
        """
        step, full = steps.start, min(steps.stop, self._full_steps)
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
        self.indices, self.sizes, self.ends = indices, sizes, sizes.cumsum(0)

    @classmethod
    def of(cls, batches: Sequence[Any]) -> _Batches:
        """Return batches that are given as lists of indices or as tensors of them."""
        sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.int64)
        if batches and isinstance(batches[0], torch.Tensor):
            return cls(torch.cat(list(batches)), sizes)
        return cls(torch.tensor([index for batch in batches for index in batch], dtype=torch.int64), sizes)

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the indices of each batch."""
        return torch.split(self.indices, self.sizes.tolist())


class _SampledOrder:
    """This worker's part of an epoch's batches from a batch sampler; see `_WorkerOrder`."""

    def __init__(self, loader: Loader, batches: _Batches) -> None:
        self._loader, self._indices = loader, batches.indices
        self._sizes, self._ends = batches.sizes.tolist(), batches.ends.tolist()
        self.any_sample = int(self._indices[0])

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """Return this worker's samples of `step`, int64, and the size of the global batch."""
        size = self._sizes[step]
        start = self._ends[step] - size
        low, high = self._loader.local_range(size)
        return self._indices[start + low : start + high].long(), size


class _BlockOrder:
    """This worker's part of an epoch's order of a data set in blocks, step by step; see `_WorkerOrder`.

    Args:
        loader: the loader.
        order: a `StreamOrder`.
        parts: number of parts into which this worker's part of a batch is divided, one for each loader process.
    """

    def __init__(self, loader: Loader, order: Any, parts: int) -> None:
        self._loader, self._order, self._parts = loader, order, parts
        self._ahead: dict[int, torch.Tensor] = {}
        self._kept: tuple[int, int, int] | None = None
        self.steps = steps_per_epoch(loader.samples, loader.global_batch_size)

    def global_size(self, step: int) -> int:
        """Return the size of the global batch."""
        size: int = self._order.batch_size(step)
        return size

    def samples(self, step: int, low: int, high: int) -> torch.Tensor:
        """Return the samples [low, high) of a global batch, int64."""
        return torch.from_numpy(self._order.part(step, low, high))

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """Return this worker's samples of `step`, int64, and the size of the global batch."""
        size = self.global_size(step)
        indices = self._ahead.pop(step, None)
        if indices is None:
            # Each step is asked for twice: for its request, and when its batch is used.
            indices = self._ahead[step] = self.samples(step, *self._loader.local_range(size))
        return indices, size

    def request(self, key: int, step: int) -> BatchInParts:
        """Return the request for this worker's part of a batch, with the blocks to keep where they change."""
        indices, size = self.part(step)
        low, high = self._loader.local_range(size)
        if low == high and not self._loader.virtual_workers:
            # As for other data sets: a sample, for the shapes, which is removed by `narrow`.
            rest = [BlockRequest(key, [], []) for _ in range(self._parts - 1)]
            return BatchInParts([BlockRequest(key, [0], []), *rest], [0])
        cuts = self._order.cuts(step, low, high, self._parts)
        window = self._order.window(step), low, high
        keeps = [None if window == self._kept else self._order.blocks(step, *cut).tolist() for cut in cuts]
        self._kept = window
        parts = [
            BlockRequest(key, indices[start - low : stop - low].tolist(), keep)
            for (start, stop), keep in zip(cuts, keeps, strict=True)
        ]
        return BatchInParts(parts, self._loader._by_shard(indices, size) or indices.tolist())


def _indices(batch: Any) -> list[int]:
    """Return the indices of a batch from a batch sampler.

    Raises:
        ConfigError: if it is not a list of whole numbers.
    """
    try:
        return [operator.index(index) for index in batch]
    except TypeError:
        expected = "lists of indices, one for each global batch"
        raise ConfigError("batch_sampler", expected, found=f"{type(batch).__name__}: {batch!r:.60}") from None


class LengthBatchSampler:
    """Global batches of samples of similar lengths, so that little is padded; for `Loader(batch_sampler=)`.

    Samples are shuffled, each pool of consecutive ones is sorted by length and cut into batches, and the batches are
    shuffled. Every sample is used once in an epoch, and only one batch may be smaller than the others.

    Args:
        lengths: the length of each sample, by index.
        global_batch_size: samples in a batch, over all workers.
        pool: number of batches that are sorted together; more make lengths more similar, and the order less random.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, lengths: Sequence[int], global_batch_size: int, pool: int = 50) -> None:
        self.global_batch_size = arguments.whole("global_batch_size", global_batch_size, least=1)
        self.pool = arguments.whole("pool", pool, least=1)
        self._lengths = _as_lengths(lengths)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return steps_per_epoch(len(self._lengths), self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch, in an order drawn from torch's global generator."""
        return (batch.tolist() for batch in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return what iterating yields as tensors of shape (samples of the batch,)."""
        batches: list[torch.Tensor] = []
        order = _permutation(len(self._lengths))
        for pool in torch.split(order, self.pool * self.global_batch_size):
            by_length = pool.index_select(0, _stable_order(self._lengths.index_select(0, pool)))
            batches += torch.split(by_length, self.global_batch_size)
        return [batches[number] for number in torch.randperm(len(batches)).tolist()]


class TokenBatchSampler:
    """Global batches of about the same number of tokens: of few long samples or of many short ones.

    Samples are sorted by length, and cut into batches that have at most so many tokens when they are padded to their
    longest sample. Each epoch shuffles samples of the same length, and the batches; every sample is used once.

    Args:
        lengths: the tokens of each sample, by index.
        global_batch_tokens: tokens in a batch with the padding, over all workers, at most.

    Attributes:
        global_batch_size: samples in the batch with the most; the `Loader` and the `Trainer` need it.

    Raises:
        ConfigError: an argument is invalid, or a sample has more tokens than a batch may have.
    """

    def __init__(self, lengths: Sequence[int], global_batch_tokens: int) -> None:
        global_batch_tokens = arguments.whole("global_batch_tokens", global_batch_tokens, least=1)
        self._lengths = _as_lengths(lengths)
        in_order = self._lengths.sort().values.tolist()
        if in_order[0] < 1 or in_order[-1] > global_batch_tokens:
            index = int((self._lengths.argmin() if in_order[0] < 1 else self._lengths.argmax()).item())
            found = f"{int(self._lengths[index])} tokens in sample {index}"
            raise ConfigError("lengths", f"numbers from 1 to {global_batch_tokens} (global_batch_tokens)", found=found)
        self._sizes, size = [], 0
        for length in in_order:
            if (size + 1) * length > global_batch_tokens:
                self._sizes.append(size)
                size = 0
            size += 1
        self._sizes.append(size)
        self.global_batch_size, self.global_batch_tokens = max(self._sizes), global_batch_tokens

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch, in an order drawn from torch's global generator."""
        return (batch.tolist() for batch in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return what iterating yields as tensors of shape (samples of the batch,)."""
        shuffled = _permutation(len(self._lengths))
        by_length = shuffled.index_select(0, _stable_order(self._lengths.index_select(0, shuffled)))
        batches = torch.split(by_length, self._sizes)
        return [batches[number] for number in torch.randperm(len(batches)).tolist()]


def _as_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """Return lengths as a tensor; of 16 bits if they fit, which are sorted in a tenth of the time."""
    found = torch.as_tensor(lengths)
    if found.dim() != 1 or not len(found):
        raise ConfigError("lengths", "one number for each sample", found=f"shape {list(found.shape)}")
    limits = torch.iinfo(torch.int16)
    whole = not found.is_floating_point() and found.dtype is not torch.bool
    small = whole and limits.min <= int(found.min()) and int(found.max()) <= limits.max
    return found.to("cpu", torch.int16) if small else found


def _permutation(samples: int) -> torch.Tensor:
    """Return a permutation from torch's global generator in the smallest dtype; the numbers are those of int64."""
    return torch.randperm(samples, dtype=torch.int32 if samples <= _MAX_INT32_SAMPLES else torch.int64)


def _stable_order(lengths: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts `lengths`; NumPy's stable sort of 16 bits is a radix sort."""
    if lengths.dtype is torch.int16:
        return torch.from_numpy(np.argsort(lengths.numpy(), kind="stable"))
    return lengths.argsort(stable=True)


# --- Settings of a DataLoader of torch --------------------------------------------------------------------------------


def dataloader_settings(
    loader: DataLoader[Any], argument: str, global_batch_size: int, warns: bool = True
) -> dict[str, Any]:
    """Return the arguments of a `Loader` that loads the same samples as a `DataLoader` of torch.

    Its data set, collate function, order, drop_last and number of processes are used. Its batch size is not: all
    workers share the global batch.

    Args:
        loader: the `DataLoader`.
        argument: the argument that it was given as; that of training data is "train".
        global_batch_size: of the `Loader`.
        warns: whether to log warnings of what is not used: another batch size, a `worker_init_fn`.

    Raises:
        ConfigError: if it has a sampler or a batch sampler of its own, whose order cannot be divided among workers,
            or does not form batches.
    """
    batches = loader.batch_sampler
    # Of a loader that was given a BatchSampler, the sampler and drop_last are the defaults, which are not used.
    own = batches if type(batches) is BatchSampler else loader
    sampler = own.sampler
    expected = "a data set, or a DataLoader with shuffle=True or shuffle=False"
    if batches is None:
        hint = "Pass the data set itself: Lockstep forms the batches."
        raise ConfigError(argument, expected, found="a DataLoader with batch_size=None", hint=hint)
    own_collate = loader.collate_fn is not default_collate
    iterable = is_iterable(loader.dataset)
    in_order = type(sampler) is SequentialSampler and len(sampler) == _length(loader.dataset)
    shuffled = (
        argument == "train"
        if iterable
        else type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == _length(loader.dataset)
    )
    if not iterable and (type(batches) is not BatchSampler or not (in_order or shuffled)):
        kind = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise ConfigError(argument, expected, found=f"a DataLoader with a {kind}", hint=_instead_of(loader))
    if warns:
        _warn_of_unused(loader, argument, global_batch_size)
    return {
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn if own_collate else None,
        "shuffle": shuffled,
        "drop_last": own.drop_last,
        "num_workers": loader.num_workers,
        "prefetch": loader.num_workers * (loader.prefetch_factor or 2) if loader.num_workers else None,
    }


def dataloader_batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples of a batch of a `DataLoader`; None where its batches have no fixed one."""
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is BatchSampler else loader.batch_size


def _instead_of(loader: DataLoader[Any]) -> str:
    """Return what to do instead of giving a `DataLoader` with the sampler or batch sampler that it has."""
    why = (
        "Lockstep divides each global batch among the workers itself, in an order that depends on seed and epoch alone"
    )
    batches = loader.batch_sampler
    if isinstance(batches.sampler if type(batches) is BatchSampler else loader.sampler, DistributedSampler):
        return f"{why}: leave a DistributedSampler out."
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{why}: lockstep.Loader(batch_sampler=) takes one that yields the indices of global batches."
    return (
        f"{why}. To keep the sampler: lockstep.Loader(dataset, global_batch_size, batch_sampler=torch.utils.data."
        "BatchSampler(sampler, global_batch_size, drop_last=False)), which draws anew in each epoch."
    )


def _warn_of_unused(loader: DataLoader[Any], argument: str, global_batch_size: int) -> None:
    roles = {"train": " of the training data", "validate": " of validate="}
    name = f"the DataLoader{roles.get(argument, '')}"
    if (size := dataloader_batch_size(loader)) != global_batch_size:
        what = "a step" if argument == "train" else "a batch of an evaluation"
        used = f"{what} has the {global_batch_size} samples of global_batch_size, over all workers"
        _log.warning("batch_size=%s of %s is not used: %s", size, name, used)
    if loader.worker_init_fn is not None:
        _log.warning("worker_init_fn of %s is not called: random generators are seeded for each sample", name)


def check_dataset(dataset: Any, argument: str, collates: bool = False) -> None:
    """Check that what was given as a data set is none of the other things that data come in.

    Args:
        dataset: what was given.
        argument: the argument that it was given as, for the error.
        collates: whether it has a collate function of its own, which may take samples of any kind.

    Raises:
        ConfigError: it says what to give instead.
    """
    expected = "a data set, with len() and indexing, or an iterable one"
    found, hint = "", ""
    if isinstance(dataset, (str, bytes, os.PathLike)):
        found, hint = repr(dataset), 'Files of samples are read by lockstep.data.Stream("data/*.jsonl").'
    elif isinstance(dataset, type):
        found, hint = f"the class {dataset.__name__}", f"Make an instance: {dataset.__name__}(...)."
    elif isinstance(dataset, Loader):
        found, hint = f"a {type(dataset).__name__}", "Give its data set: loader.dataset."
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        found, hint = (
            f"a {type(dataset).__name__} with the keys {list(dataset)[:3]}",
            "Indices are whole numbers from 0.",
        )
    elif isinstance(dataset, (tuple, list)) and 1 < len(dataset) <= 3 and not collates:
        found, hint = _several(dataset)
    if found:
        raise ConfigError(argument, expected, found=found, hint=hint)


def _several(given: Sequence[Any]) -> tuple[str, str]:
    """Return what was found and what to do if this is no data set, but columns of one, or several data sets."""
    kind = type(given).__name__
    if all(isinstance(each, (Dataset, Loader, DataLoader)) for each in given):
        return f"a {kind} of {len(given)} data sets", "fit(train, validate=test) takes them one by one."
    arrays = all(isinstance(each, (torch.Tensor, np.ndarray)) and each.ndim for each in given)
    forms = {(each.shape, str(each.dtype)) for each in given} if arrays else set()
    columns = isinstance(given, tuple) or (len(forms) > 1 and len({shape[0] for shape, _ in forms}) == 1)
    if not arrays or not columns:
        return "", ""
    make = "torch.utils.data.TensorDataset(inputs, targets)"
    return f"a {kind} of {len(given)} arrays", f"{make} makes a data set of tensors with a row for each sample."


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise ConfigError(
            "dataset",
            "a map-style data set, with len() and indexing, or an iterable one",
            found=type(dataset).__name__,
        ) from None
