"""`Loader`: this worker's part of each global batch of a data set, epoch by epoch, and the position
in it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Never, Self

from .. import arguments, communicator, observers
from ..checkpoint.numerics import NUMERICS, changes_since
from ..errors import CheckpointError, ConfigError, unexpected_argument
from ..flight_recorder import note_batch, note_data_wait
from ..other_names import in_loader
from ..parallel.shards import check_virtual_workers
from .batch_plan import BatchPlan
from .block_source import BlockSource
from .fetching import Collate
from .indexed_source import IndexedSource, SampledSource
from .iterable import substreams_of
from .iterable_source import IterableSource
from .source import Source

__all__ = ["Batch", "Loader", "check_dataset"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's part of one global batch.

    Attributes:
        data: the collated samples on the worker's device, usually (inputs, targets). If the part is
            empty, because the last batch has fewer samples than there are workers, its tensors have
            0 samples.
        indices: int64 tensor of shape (size,), the samples' indices in the data set.
        size: number of samples in this part.
        global_size: number of samples in the global batch.
        epoch: the epoch.
        step: the batch's number in the epoch, from 0.
        virtual_workers: the number of shards of the global batch, see `Loader`; `data` is then a
            list of the collated shards of this worker, with None for one without samples.
        collated: with a collate function of the user's, the number of samples that it has made of
            this part, or of each shard: it may leave some out. None if all samples are in the
            batch.
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
            TypeError: if `data` is not a tuple or list, or is divided into the shards of virtual
                workers.
        """
        if self.virtual_workers is not None:
            raise TypeError(
                "with virtual_workers, Batch.data is a list of shards: use lockstep.TrainStep for "
                "them"
            )
        if not isinstance(self.data, (tuple, list)):
            raise TypeError(
                f"Batch.data is a {type(self.data).__name__}, not a tuple: use batch.data"
            )
        return iter(self.data)


class Loader:
    """Loads this worker's part of each global batch of a data set, epoch by epoch.

    Every sample of an epoch is used exactly once at any number of workers: no sample is repeated to
    make parts equal. The order depends only on (seed, epoch). Parts are contiguous and differ by at
    most one sample.

    Before each ``dataset[index]`` the global generators of torch (CPU), Python and NumPy are seeded
    by (seed, epoch, index), so that augmentation is the same at any number of workers and loader
    processes, and after resuming in the middle of an epoch. Draws in `collate_fn` are reproducible
    too, but depend on how the batch is divided.

    An iterable data set has its own order, which must be the same whenever an epoch is read, and on
    every worker. Its method ``set_epoch(epoch)``, if there is one, is called first. Every worker
    reads all of it, and collates its part of each global batch, unless it is given as
    `lockstep.data.Substreams`. The global generators are seeded by (seed, epoch, number of the
    sample) before each sample. After a resume, it is read from its beginning and what was used is
    dropped, unless it has ``state_dict()`` and ``load_state_dict()``. `len()` is not known before
    the end of an epoch.

    Args:
        dataset: a map-style data set: ``len(dataset)`` and ``dataset[index]``. If it has a method
            ``collated_batch(indices)``, that is called for each part, and returns it collated; no
            generator is seeded then, and the data set itself must key its random draws. Or an
            iterable data set, see above.
        global_batch_size: samples in one optimizer step, over all workers.
        seed: seed of the order and of the data set's random draws.
        shuffle: False keeps the data set's order in every epoch. An iterable data set has its own
            order in any case; with True, as for training, less than one whole batch of it is an
            error.
        drop_last: skip a last batch that is smaller than `global_batch_size`.
        num_workers: number of loader processes of each worker; 0 loads in this process. Of an
            iterable data set, each part is read by one of them.
        prefetch: maximum number of batches that the loader processes of a worker load ahead of the
            current one; at least `num_workers`; twice that if None. On a GPU, one more is being
            copied to the device.
        comm: communicator over the workers; that of `lockstep.init()` if None.
        collate_fn: makes one batch of a list of samples; `torch.utils.data.default_collate` if
            None.
        virtual_workers: divide each global batch into this many ordered shards. Each worker gets
            consecutive shards, and each shard is collated separately, so that the result does not
            depend on the number of workers.
        batch_sampler: yields the indices of each *global* batch of an epoch, at most
            `global_batch_size` of them, and has ``len()``; such as a `LengthBatchSampler`. Its
            method ``set_epoch(epoch)``, if there is one, is called first. It is read as a whole at
            the beginning of each epoch, on every worker, with the global generators of torch,
            Python and NumPy seeded by (seed, epoch); the workers compare what they have read.

    Raises:
        ConfigError: an argument is invalid, or there are fewer samples or virtual workers than
            workers.
        TypeError: for an argument of another name; the error says what it is here.

    Examples:
        >>> import torch, lockstep
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(10, 3), torch.arange(10))
        >>> with lockstep.Loader(dataset, global_batch_size=4) as loader:
        ...     [len(targets) for inputs, targets in loader]  # of one worker, which has all samples
        [4, 4, 2]
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
            raise unexpected_argument(
                "Loader", name, in_loader(name), arguments.keyword_names(Loader)
            )
        self.shuffle = bool(arguments.flag("shuffle", shuffle))
        self.drop_last = bool(arguments.flag("drop_last", drop_last))
        self.global_batch_size = arguments.whole("global_batch_size", global_batch_size, least=1)
        self.seed = arguments.whole("seed", seed, least=0)
        num_workers = arguments.whole("num_workers", num_workers, least=0)
        if collate_fn is not None:
            arguments.function(
                "collate_fn",
                collate_fn,
                "a function that makes a batch of a list of samples",
                takes=1,
            )
        if comm is not None and (
            isinstance(comm, type) or not all(hasattr(comm, name) for name in ("rank", "size"))
        ):
            raise ConfigError("comm", "the communicator that lockstep.init() returns", comm)
        self.comm = comm or communicator.init()
        if virtual_workers is not None:
            virtual_workers = check_virtual_workers(virtual_workers, self.comm.size)
        self.virtual_workers = virtual_workers
        check_dataset(dataset, "dataset", collates=collate_fn is not None)
        _check_device(dataset, num_workers)
        self.dataset = dataset
        self.parts: dict[str, Any] = {"batch_sampler": batch_sampler, "collate_fn": collate_fn}
        self.plan = BatchPlan(
            self.comm,
            self.global_batch_size,
            self.seed,
            self.shuffle,
            self.drop_last,
            collate_fn,
            virtual_workers,
        )
        self._source = _source_of(dataset, self.plan, batch_sampler)
        self.samples = self._source.samples
        if self._source.most_processes is not None:
            num_workers = min(num_workers, self._source.most_processes)
        if prefetch is None:
            prefetch = 2 * num_workers
        elif arguments.whole("prefetch", prefetch, least=1) < num_workers:
            raise ConfigError(
                "prefetch",
                f"at least {num_workers}, one for each of the loader processes",
                prefetch,
            )
        self.num_workers = num_workers
        self._source.open(num_workers, prefetch)
        self._epoch = 0
        self._step = 0
        # the loaded position, until its epoch starts
        self._resume_at: tuple[int, int] | None = None
        # within an epoch, where a state is taken at each step
        self._settings_now: dict[str, Any] | None = None
        self._has_said_parts = False

    def __len__(self) -> int:
        """Steps in an epoch.

        Raises:
            TypeError: for an iterable data set of which no whole epoch has been read yet.
        """
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the next epoch: epoch 0, then 1, and so on, from the loaded position in the
        first.
        """
        if not torch.is_grad_enabled():
            self._say_that_parts_are_seen()
        return self.epoch(self._epoch)

    def _say_that_parts_are_seen(self) -> None:
        """Say once that a loop without gradients sees this worker's part alone: sums over it are no
        results.
        """
        if not self._has_said_parts and self.comm.size > 1 and self.comm.rank == 0:
            _log.warning(
                "%d workers: in a loop without gradients each of them gets a part of the data, so "
                "that a sum, a mean or a count over the loop is that of a part, and so are the "
                "statistics that update_bn collects. lockstep.evaluate(model, loader, metrics=...) "
                "and lockstep.predict return results of all samples; comm.allreduce sums up what "
                "the loop has counted",
                self.comm.size,
            )
        self._has_said_parts = True

    @property
    def is_iterable(self) -> bool:
        """Whether its data set can only be iterated over."""
        return isinstance(self._source, IterableSource)

    @property
    def steps(self) -> int | None:
        """Steps in an epoch; None for an iterable data set of which no whole epoch has been read
        yet.
        """
        return self._source.steps

    def order(self, epoch: int) -> torch.Tensor:
        """Return the samples of an epoch in the order in which they form global batches: int64,
        shape (samples,).

        Args:
            epoch: the number of the epoch, from 0.

        Raises:
            ConfigError: for an iterable data set.
        """
        return self._source.order(epoch)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate over this worker's part of each global batch of `epoch`.

        It starts at the first batch; at the loaded position if `load_state_dict` has just loaded
        one of this epoch.

        Args:
            epoch: the number of the epoch, from 0.

        Raises:
            ConfigError: the iterator is used after `close`, or after another epoch has started with
                the same loader processes.
        """
        batches = self._batches(epoch)
        return observers.active().batches(batches, self.comm.size, self.comm.rank)

    def _batches(self, epoch: int) -> Iterator[Batch]:
        first = (
            self._resume_at[1] if self._resume_at is not None and self._resume_at[0] == epoch else 0
        )
        self._resume_at = None
        self._epoch = epoch
        self._step = first
        loop, before = self._source.loop(epoch, first)
        parts = self._source.batches(epoch, first)
        try:
            while True:
                asked = time.monotonic()
                part = next(parts, None)
                if part is None:
                    break
                note_data_wait(asked, time.monotonic())
                if self._settings_now is None:
                    self._settings_now = self.settings()
                # Before the yield, so that a state saved while the batch is used is the position
                # after it.
                self._epoch = epoch
                self._step = part.step + 1
                note_batch(before + part.step, loop=loop)
                yield Batch(
                    part.data,
                    part.indices,
                    part.size,
                    part.global_size,
                    epoch,
                    part.step,
                    self.virtual_workers,
                    self.plan.collated_sizes(part),
                )
        except GeneratorExit:  # the loop was left before its end
            note_batch(-1)
            raise
        finally:
            self._settings_now = None
        note_batch(before + self._step, finished=True, loop=loop)
        self._source.end_epoch(epoch, self._step)
        self._epoch = epoch + 1
        self._step = 0

    def stand_in(self) -> Any:
        """Return collated data for a worker that must run a pass although it has no samples.

        It is a sample twice, because batch norm refuses a single one.
        """
        return self._source.stand_in()

    def local_range(self, global_size: int) -> tuple[int, int]:
        """Return this worker's half-open range of the samples of a global batch of
        `global_size`.

        Args:
            global_size: the number of samples in the global batch.
        """
        return self.plan.local_range(global_size)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the next batch."""
        return self._epoch, self._step

    @property
    def next_start(self) -> tuple[int, int]:
        """(epoch, step) of the first batch of the next iteration: the loaded position, or the
        beginning of the epoch, also of one that was left before its end.
        """
        return self._resume_at or (self._epoch, 0)

    @property
    def ended(self) -> bool:
        """Whether the last batch yielded was the last one of its epoch."""
        return self._source.has_ended(self._step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch yielded, and the settings it depends on (not the
        worker count).
        """
        position = {"epoch": self._epoch, "step": self._step, "ended": self.ended}
        settings = self._settings_now or self.settings()
        return {**position, **settings, "numerics": NUMERICS, **self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position to a saved one, from a run with any number of workers.

        If Lockstep deals out or draws otherwise than the one that saved it, a line in rank 0's log
        says so.

        Args:
            state: what `state_dict` has returned.

        Raises:
            CheckpointError: it was saved with another data set size, global batch size, seed or
                order.
        """
        for key, current in self.settings().items():
            if state.get(key) != current:
                saved = state.get(key)
                raise CheckpointError(
                    f"the saved position does not fit this loader: {key} was {saved!r}, here it "
                    f"is {current!r}"
                )
        if (changes := changes_since(int(state.get("numerics", 0)))) and self.comm.rank == 0:
            _log.warning("%s", changes)
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._resume_at = self._epoch, self._step
        self._source.load_state_dict(state)

    def sample_digests(self) -> dict[int, str]:
        """Return digests of some samples at fixed places, by their numbers, as another run would
        find them.

        It reads them for at most half a second, and is called before an epoch begins. Empty for an
        iterable data set.
        """
        return self._source.digests()

    def settings(self) -> dict[str, Any]:
        """Return what a position depends on; None for what a data set of this kind does not
        have.
        """
        return {
            **dict.fromkeys(("files", "shuffle_window", "lanes", "parts", "samples")),
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_sampler": None,
            **self._source.settings(),
        }

    def close(self) -> None:
        """End the loader processes, if there are any."""
        self._source.fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _source_of(
    dataset: Any, plan: BatchPlan, batch_sampler: Iterable[Sequence[int]] | None
) -> Source:
    """Return a data set as a source of batches, by its kind.

    Raises:
        ConfigError: if it does not fit the plan.
    """
    substreams = substreams_of(dataset)
    if substreams is not None:
        if batch_sampler is not None:
            hint = "An iterable data set has its own order."
            raise ConfigError(
                "batch_sampler", "None", found=type(batch_sampler).__name__, hint=hint
            )
        return IterableSource(substreams, plan)
    if batch_sampler is not None:
        return SampledSource(dataset, plan, batch_sampler)
    return (
        BlockSource(dataset, plan)
        if hasattr(dataset, "epoch_order")
        else IndexedSource(dataset, plan)
    )


def _check_device(dataset: Any, num_workers: int) -> None:
    where = getattr(dataset, "device", None)
    if num_workers and isinstance(where, torch.device) and where.type != "cpu":
        hint = "Batches are made on that device."
        raise ConfigError(
            "num_workers", f"0 for a data set in the memory of {where}", num_workers, hint
        )


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
    found = ""
    hint = ""
    if isinstance(dataset, (str, bytes, os.PathLike)):
        found = repr(dataset)
        hint = 'Files of samples are read by lockstep.data.Stream("data/*.jsonl").'
    elif isinstance(dataset, type):
        found = f"the class {dataset.__name__}"
        hint = f"Make an instance: {dataset.__name__}(...)."
    elif isinstance(dataset, Loader):
        found = f"a {type(dataset).__name__}"
        hint = "Give its data set: loader.dataset."
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        found = f"a {type(dataset).__name__} with the keys {list(dataset)[:3]}"
        hint = "Indices are whole numbers from 0."
    elif isinstance(dataset, (tuple, list)) and 1 < len(dataset) <= 3 and not collates:
        found, hint = _several(dataset)
    if found:
        raise ConfigError(argument, expected, found=found, hint=hint)


def _several(datasets: Sequence[Any]) -> tuple[str, str]:
    """Return what was found and what to do if this is no data set, but columns of one, or several
    data sets.
    """
    kind = type(datasets).__name__
    if all(isinstance(dataset, (Dataset, Loader, DataLoader)) for dataset in datasets):
        return (
            f"a {kind} of {len(datasets)} data sets",
            "fit(train, validate=test) takes them one by one.",
        )
    arrays = all(
        isinstance(dataset, (torch.Tensor, np.ndarray)) and dataset.ndim for dataset in datasets
    )
    forms = {(dataset.shape, str(dataset.dtype)) for dataset in datasets} if arrays else set()
    columns = isinstance(datasets, tuple) or (
        len(forms) > 1 and len({shape[0] for shape, _ in forms}) == 1
    )
    if not arrays or not columns:
        return "", ""
    make = "torch.utils.data.TensorDataset(inputs, targets)"
    return (
        f"a {kind} of {len(datasets)} arrays",
        f"{make} makes a data set of tensors with a row for each sample.",
    )
