"""Loads this worker's part of each global batch of an epoch, in this process or in loader processes."""

from __future__ import annotations

import copyreg
import io
import logging
import multiprocessing
import operator
import os
import pickle
import random
import signal
import sys
import traceback
from collections import ChainMap, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from typing_extensions import Self

from .. import communicator, environment
from ..errors import CheckpointError, ConfigError, DataError, LockstepError, MismatchError
from ..flight_recorder import named, note_batch
from ..invariance.randomness import preserve_generators
from ..invariance.shards import bounds, check_virtual_workers, mix, step_range, steps_per_epoch
from .nested import map_tensors, narrow

__all__ = [
    "Batch",
    "Collate",
    "Fetcher",
    "LengthBatchSampler",
    "Loader",
    "PickledByValue",
    "Request",
    "dataloader_settings",
    "describe_exception",
    "seed_draws",
    "to_device",
]

_log = logging.getLogger(__name__)


# --- Random draws per sample ------------------------------------------------------------------------------------------

_LOW = 0xFFFFFFFF


def seed_draws(key: int, index: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy for one sample.

    It takes about 7 µs, most of it in Python's generator. Generators of the data set's own are not seeded.
    """
    mixed = mix((key, index))
    # torch.manual_seed() also seeds every backend, which takes a hundred times as long. The generators of torch and
    # NumPy are both Mersenne twisters seeded with 32 bits: the same bits would give the same numbers.
    torch.default_generator.manual_seed(mixed & _LOW)
    random.seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed >> 32)


# --- Pickling for loader processes ------------------------------------------------------------------------------------


class PickledByValue:
    """Wraps an object, to pickle it by value if plain pickle cannot find its class or functions by name.

    This applies to classes of a script or notebook in a launched worker, whose main module is not the program.

    Args:
        value: any object that plain pickle or cloudpickle can pickle.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        if _pickles_by_name(self.value):
            return PickledByValue, (self.value,)
        return _unpack, (_pack(self.value),)


class _PickleProbe(pickle.Pickler):
    """Pickles an object without the numbers in it, to see whether that works."""

    dispatch_table: ClassVar[dict[type, Any]] = {**copyreg.dispatch_table, **ForkingPickler._extra_reducers}  # type: ignore[attr-defined, misc]

    def persistent_id(self, obj: Any) -> str | None:
        array = type(obj) is np.ndarray and obj.dtype != object
        return "numbers" if array or isinstance(obj, torch.Tensor) else None


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


def _pickles_by_name(value: Any) -> bool:
    try:
        _PickleProbe(_NullFile()).dump(value)
    except (pickle.PicklingError, AttributeError):
        return False
    except TypeError:
        return True  # the object cannot be pickled; plain pickle raises the error
    return True


def _pack(value: Any) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # ForkingPickler's reducers include torch's, which send tensors through shared memory.
        dispatch_table = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpack(data: bytes) -> PickledByValue:
    """Restore an object from `_pack`; the bytes come from another process of this program."""
    return PickledByValue(pickle.loads(data))


# --- Fetching batches -------------------------------------------------------------------------------------------------

Collate = Callable[[list[Any]], Any]

_COLLATE = 1  # part of the key of a collate function's draws for a data set in blocks

Request = tuple[int, list[int] | tuple[list[int], ...]]
"""(key of the epoch's random draws, indices of the samples of a batch).

With a tuple of lists of indices, the result is a list with a collated batch for each of them, None for an empty one."""


@dataclass(frozen=True, slots=True)
class _BlockRequest:
    """Samples of a data set in blocks, not collated.

    Attributes:
        key: key of the epoch's random draws.
        indices: the samples.
        keep: the blocks to keep from now on; None for those of the request before.
    """

    key: int
    indices: list[int]
    keep: list[int] | None


@dataclass(frozen=True, slots=True)
class _BatchInParts:
    """A batch of a data set in blocks.

    Attributes:
        parts: requests for its parts, in order.
        indices: the samples, or those of each shard, which are collated separately.
    """

    parts: list[_BlockRequest]
    indices: list[int] | tuple[list[int], ...]


_AnyRequest = Request | _BatchInParts | _BlockRequest


class _Batches(Dataset[Any]):
    """A data set whose keys are requests and whose items are batches; for a `_BlockRequest`, samples as `_Packed`."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or default_collate
        self.blocks: Any = None  # reads samples, and keeps the blocks of a window
        plain = collate is None
        # Only this class itself: a subclass may transform samples.
        self.in_tensors = plain and type(dataset) is TensorDataset
        self.by_batch = plain and hasattr(dataset, "collated_batch")
        self.by_sample = not (self.in_tensors or self.by_batch)

    def __getstate__(self) -> dict[str, Any]:
        by_value = {"dataset": PickledByValue(self.dataset), "collate": PickledByValue(self.collate)}
        return {**self.__dict__, **by_value, "blocks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, dataset=state["dataset"].value, collate=state["collate"].value)

    def __getitem__(self, request: _AnyRequest) -> Any:
        try:
            if isinstance(request, _BatchInParts):
                return self.joined(request, self._from_blocks(*request.parts))
            if isinstance(request, _BlockRequest):
                return self._packed(request)
            key, indices = request
            if isinstance(indices, tuple):
                return [self._batch(key, part) if part else None for part in indices]
            return self._batch(key, indices)
        except DataError as error:
            process = get_worker_info()
            if process is None:
                raise
            # Returned, because torch would put the traceback of the loader process into the message.
            return _Failure(f"{error} (in loader process {process.id})")

    def _batch(self, key: int, indices: list[int]) -> Any:
        if self.in_tensors:
            return [tensor[indices] for tensor in self.dataset.tensors]
        if self.by_batch:
            return self.dataset.collated_batch(indices)
        return self._collated([self._sample(self.dataset, key, index) for index in indices], indices)

    def joined(self, request: _BatchInParts, samples: list[Any]) -> Any:
        """Return the samples of the parts of a batch as a batch, or as a list of shards."""
        key, rest = mix((request.parts[0].key, _COLLATE)), iter(samples)

        def collated(indices: list[int]) -> Any:
            # Draws of the collate function are the same whichever process has loaded the samples.
            seed_draws(key, indices[0])
            return self._collated(list(islice(rest, len(indices))), indices)

        if isinstance(request.indices, tuple):
            return [collated(shard) if shard else None for shard in request.indices]
        return collated(request.indices)

    def _packed(self, request: _BlockRequest) -> _Packed:
        samples = self._from_blocks(request)
        try:
            return _Packed.of(samples)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = (
                f"samples of {type(self.dataset).__name__} cannot leave a loader process: {describe_exception(error)}"
            )
            hint = "Return tensors, arrays and plain values, or use one loader process"
            raise DataError(f"{what}. {hint}") from error if environment.debugging() else None

    def _from_blocks(self, request: _BlockRequest) -> list[Any]:
        if self.blocks is None:
            self.blocks = self.dataset.reader()
        if request.keep is not None:
            self.blocks.keep(request.keep)
        return [self._sample(self.blocks, request.key, index) for index in request.indices]

    def _sample(self, source: Any, key: int, index: int) -> Any:
        seed_draws(key, index)
        try:
            return source[index]
        except LockstepError:
            raise
        except Exception as error:
            what = f"sample {index} of {type(self.dataset).__name__}: {describe_exception(error)}"
            raise DataError(what) from error if environment.debugging() else None

    def _collated(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return self.collate(samples)
        except LockstepError:
            raise
        except Exception as error:
            shown = ", ".join(map(str, indices[:5])) + (f" and {len(indices) - 5} more" if len(indices) > 5 else "")
            what = f"a batch of samples {shown} of {type(self.dataset).__name__}: {describe_exception(error)}"
            if self.collate is default_collate:
                what += ". Samples of different sizes need a collate_fn that pads them, of a Loader or a DataLoader"
            raise DataError(what) from error if environment.debugging() else None


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a loader process returns in place of a batch that cannot be made."""

    message: str


class _Tree(pickle.Pickler):
    """Pickles samples without the numbers of their tensors, which become buffers."""

    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        if not plain or obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.is_quantized:
            return NotImplemented
        numbers = obj.contiguous().reshape(-1).view(torch.uint8).numpy()  # NumPy does not have all types of torch
        return _from_bytes, (numbers, obj.dtype, obj.shape)


def _from_bytes(numbers: np.ndarray[Any, Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Samples on their way from a loader process, with all their numbers in one piece of shared memory.

    Sent one by one, each tensor would take an open file. The samples are those of this program: they are pickled as
    torch pickles batches.

    Attributes:
        tree: the pickled samples without their numbers.
        numbers: the numbers of all tensors and arrays, uint8.
        sizes: number of bytes of each tensor or array.
    """

    tree: bytes
    numbers: torch.Tensor
    sizes: list[int]

    _ALIGNMENT: ClassVar[int] = 64

    @classmethod
    def of(cls, samples: list[Any]) -> Self:
        buffers: list[pickle.PickleBuffer] = []
        tree = io.BytesIO()
        _Tree(tree, protocol=5, buffer_callback=buffers.append).dump(samples)
        views = [buffer.raw() for buffer in buffers]
        sizes = [view.nbytes for view in views]
        numbers = torch.empty(sum(map(cls._padded, sizes)), dtype=torch.uint8)
        target, at = memoryview(numbers.numpy()), 0  # type: ignore[arg-type]
        for view, size in zip(views, sizes, strict=True):
            target[at : at + size] = view
            at += cls._padded(size)
        return cls(tree.getvalue(), numbers, sizes)

    @classmethod
    def _padded(cls, size: int) -> int:
        return -(-size // cls._ALIGNMENT) * cls._ALIGNMENT

    def samples(self) -> list[Any]:
        """Return the samples, whose tensors share the memory of `numbers`."""
        source, at, views = memoryview(self.numbers.numpy()), 0, []  # type: ignore[arg-type]
        for size in self.sizes:
            views.append(source[at : at + size])
            at += self._padded(size)
        found: list[Any] = pickle.loads(self.tree, buffers=views)
        return found


def describe_exception(error: Exception) -> str:
    """Return an exception of a data set in one line, with the line of the program that raised it."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the frame here
    own = [frame for frame in frames if f"{os.sep}site-packages{os.sep}" not in frame.filename] or frames
    place = f", at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


class _RequestSampler:
    """The requests of the current epoch; replaced for each epoch, so that the loader processes can be kept."""

    def __init__(self) -> None:
        self.requests: Iterable[_AnyRequest] = ()

    def __iter__(self) -> Iterator[_AnyRequest]:
        return iter(self.requests)


class Fetcher:
    """Loads batches into CPU memory, in the order of the requests.

    Random draws of the data set are keyed by sample: they are the same in any process, and do not change the caller's
    generators.

    Args:
        dataset: has ``__getitem__(index)``, or ``collated_batch(indices)`` for a whole batch.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` if None.
        processes: number of loader processes; 0 loads in this process. They start with the first epoch and run until
            `close`.
        prefetch: maximum number of batches that loader processes load ahead; at least one for each.
        pin: put batches in page-locked memory, from which copies to a GPU overlap its computation.
        in_parts: use `fetch_in_parts`, not `fetch`: `dataset` is in blocks.

    Attributes:
        parts: number of parts of a batch that `fetch_in_parts` loads beside each other.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None, processes: int, prefetch: int, pin: bool, in_parts: bool = False
    ) -> None:
        self._batches = _Batches(dataset, collate)
        self._processes, self._prefetch, self._pin = processes, prefetch, pin
        self._in_parts, self.parts = in_parts, max(1, processes)
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = None
        self._running: Generator[Any, None, None] | None = None

    def fetch(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Return an iterator over the batches of `requests`; with loader processes, it ends an earlier iterator."""
        return self._fetch(requests, self._pin)

    def fetch_in_parts(self, requests: Iterable[_BatchInParts]) -> Iterator[Any]:
        """Return an iterator over the batches of a data set in blocks; otherwise as `fetch`.

        Of several loader processes, each has the same part of every batch, so that it reads other blocks than its
        siblings. This process puts the parts together and collates them.
        """
        if self.parts == 1:
            return self._fetch(requests, self._pin)
        return self._join(requests)

    def _join(self, requests: Iterable[_BatchInParts]) -> Iterator[Any]:
        ahead: deque[_BatchInParts] = deque()

        def of_parts() -> Iterator[_BlockRequest]:
            for request in requests:
                ahead.append(request)
                yield from request.parts

        loaded = self._fetch(of_parts(), pin=False)
        for first in loaded:
            parts = [first, *islice(loaded, self.parts - 1)]
            if len(parts) < self.parts:
                return
            samples = [sample for part in parts for sample in part.samples()]
            with preserve_generators():
                data = self._batches.joined(ahead.popleft(), samples)
            yield map_tensors(pinned, data) if self._pin else data

    def _fetch(self, requests: Iterable[_AnyRequest], pin: bool) -> Iterator[Any]:
        if not self._processes:
            return self._fetch_in_process(requests, pin)
        self._end_running()
        self._running = self._fetch_from_processes(requests)
        return self._running

    def _fetch_in_process(self, requests: Iterable[_AnyRequest], pin: bool) -> Iterator[Any]:
        # Whole batches are not seeded. Restoring the generators costs 80 µs, most of it for NumPy's.
        guard = preserve_generators if self._batches.by_sample or self._in_parts else nullcontext
        for request in requests:
            with guard():
                data = self._batches[request]
            yield map_tensors(pinned, data) if pin else data

    def _fetch_from_processes(self, requests: Iterable[_AnyRequest]) -> Generator[Any, None, None]:
        self._sampler.requests = requests
        if self._loader is None:
            self._loader = self._start()
        for data in self._loader:
            if isinstance(data, _Failure):
                raise DataError(data.message)
            yield data

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            self._batches,
            batch_size=None,
            # What a collate function returns stays as it is: by default, arrays would become tensors.
            collate_fn=_unchanged if self._in_parts else None,
            sampler=self._sampler,
            num_workers=self._processes,
            # A batch in parts is one request for each process. DataLoader gives requests to its processes in turn.
            prefetch_factor=self._prefetch if self._in_parts else self._prefetch // self._processes,
            persistent_workers=True,
            pin_memory=self._pin and not (self._in_parts and self.parts > 1),
            worker_init_fn=partial(_ignore_signals, new_group=multiprocessing.parent_process() is None),
            # A separate generator: otherwise each epoch draws a seed from the global one.
            generator=torch.Generator(),
        )

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """End the loader processes; a later `fetch` starts new ones."""
        self._end_running()
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            # Dropping the reference would do the same, unless a traceback still holds one of its frames.
            iterator._shutdown_workers()


def _unchanged(data: Any) -> Any:
    return data


def _ignore_signals(_: int, new_group: bool) -> None:
    # Ctrl-C reaches every process of the terminal, and some schedulers send SIGTERM to a whole process group. The
    # parent completes its step first, and needs this process's batches for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if new_group:  # not under a launcher: it signals only the worker, and at the end kills the worker's process group
        os.setpgid(0, 0)
        # In a background process group, writing to the terminal must not stop the process ("stty tostop").
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in page-locked memory; a sparse tensor, or one on a device, is returned unchanged."""
    dense = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if dense else tensor


def to_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy each of `batches` to `device`; on a GPU, copying a batch overlaps with computing on the previous one."""
    if device.type == "cpu":
        yield from batches
    elif device.type != "cuda":
        for data in batches:
            yield map_tensors(lambda tensor: tensor.to(device), data)
    else:
        yield from _overlapped(batches, device)


def _overlapped(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pending: tuple[Any, torch.cuda.Event] | None = None

    def wait_for_copy(data: Any, copied: torch.cuda.Event) -> Any:
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(copied)
        # The allocator must not reuse this memory for the copy stream while the consumer reads it.
        map_tensors(lambda tensor: tensor.record_stream(consumer), data)
        return data

    for data in batches:
        with torch.cuda.stream(stream):
            moved = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), data)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        if pending is not None:
            yield wait_for_copy(*pending)
        pending = moved, copied
    if pending is not None:
        yield wait_for_copy(*pending)


# --- Loader -----------------------------------------------------------------------------------------------------------

_ENDED = object()

# Part of the keys of draws, so that the draws of one seed are independent; `lockstep.training.step` uses 2.
_ORDER, _SAMPLES = 1, 3

_MAX_INT32_SAMPLES = 1 << 31


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
    """

    data: Any
    indices: torch.Tensor
    size: int
    global_size: int
    epoch: int
    step: int
    virtual_workers: int | None = None

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

    Args:
        dataset: a map-style data set: ``len(dataset)`` and ``dataset[index]``. If it has a method
            ``collated_batch(indices)``, that is called for each part, and returns it collated; no generator is seeded
            then, and the data set itself must key its random draws.
        global_batch_size: samples in one optimizer step, over all workers.
        seed: seed of the order and of the data set's random draws.
        shuffle: False keeps the data set's order in every epoch.
        drop_last: skip a last batch that is smaller than `global_batch_size`.
        num_workers: number of loader processes of each worker; 0 loads in this process.
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
    ) -> None:
        self.comm = comm or communicator.init()
        self.virtual_workers = (
            None if virtual_workers is None else check_virtual_workers(virtual_workers, self.comm.size)
        )
        self.dataset, self.samples = dataset, _length(dataset)
        self.global_batch_size, self.seed, self.shuffle, self.drop_last = global_batch_size, seed, shuffle, drop_last
        self._batch_sampler = batch_sampler
        self._in_blocks = batch_sampler is None and hasattr(dataset, "epoch_order")
        self._check(num_workers)
        prefetch = _check_prefetch(prefetch, num_workers)
        pin = self.comm.device.type == "cuda"
        self.num_workers = num_workers
        self._collate_fn = collate_fn
        self._fetcher = Fetcher(dataset, collate_fn, num_workers, prefetch, pin, in_parts=self._in_blocks)
        self._epoch, self._step = 0, 0
        self._resume_at: tuple[int, int] | None = None  # the loaded position, until its epoch starts
        self._batches_digest = 0  # of the current epoch's batches, with a batch sampler

    def _check(self, num_workers: int) -> None:
        for name, value, minimum in (
            ("global_batch_size", self.global_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("seed", self.seed, 0),
        ):
            _check_whole(name, value, minimum)
        for name, value in (("dataset", self.samples), ("global_batch_size", self.global_batch_size)):
            if value < self.comm.size:
                hint = "Use fewer workers" + (" or a larger global batch." if name == "global_batch_size" else ".")
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
        """Steps in an epoch."""
        if self._batch_sampler is not None:
            return len(self._batch_sampler)  # type: ignore[arg-type]
        return steps_per_epoch(self.samples, self.global_batch_size, self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the next epoch: epoch 0, then 1, and so on, from the loaded position in the first."""
        return self.epoch(self._epoch)

    def order(self, epoch: int) -> torch.Tensor:
        """Return the samples of an epoch in the order in which they form global batches: int64, shape (samples,)."""
        if self._batch_sampler is not None:
            return torch.tensor([index for batch in self._read_batches(epoch) for index in batch])
        if self._in_blocks:
            blocks = self._block_order(epoch)
            return torch.cat([blocks.samples(step, 0, blocks.global_size(step)) for step in range(blocks.steps)])
        return self._order(epoch).long()

    def _read_batches(self, epoch: int) -> list[list[int]]:
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
            batches = [_indices(batch) for batch in sampler]
        if len(batches) != len(self):
            raise ConfigError("batch_sampler", f"{len(self)} batches, its len()", found=f"{len(batches)}")
        for number, batch in enumerate(batches):
            if not 0 < len(batch) <= self.global_batch_size:
                expected = f"batches of 1 to {self.global_batch_size} indices (global_batch_size)"
                raise ConfigError("batch_sampler", expected, found=f"{len(batch)} in batch {number} of epoch {epoch}")
            bad = [index for index in batch if not 0 <= index < self.samples]
            if bad:
                found = f"{bad[0]} in batch {number} of epoch {epoch}"
                raise ConfigError("batch_sampler", f"indices from 0 to {self.samples - 1}", found=found)
        return batches

    def _agreed_batches(self, epoch: int) -> list[list[int]]:
        """Return the global batches of `epoch`, which are the same on all workers.

        Raises:
            MismatchError: on every worker, if they differ, or differ from those before a resume in the epoch.
        """
        batches = self._read_batches(epoch)
        digests = [mix(batch) for batch in batches]
        if self.comm.size > 1:
            with named("comparison of the batch samplers"):
                by_rank = self.comm.allgather_object(digests)
            for rank, other in enumerate(by_rank):
                if other != by_rank[0]:
                    pairs = enumerate(zip_longest(by_rank[0], other))
                    number = next(number for number, (first, second) in pairs if first != second)
                    raise MismatchError(
                        f"batch_sampler: batch {number} of epoch {epoch} differs on ranks 0 and {rank}. Let its order "
                        "depend on the epoch alone (set_epoch), or draw from the global generators of torch, Python or "
                        "NumPy, which are seeded alike on all workers."
                    )
        digest = mix(digests)
        if self._step and self._batches_digest not in (0, digest):
            raise MismatchError(
                f"batch_sampler: the batches of epoch {epoch} are others than before the run was resumed. Let its "
                "order depend on the epoch alone (set_epoch), or draw from the global generators of torch, Python or "
                "NumPy, which are seeded by the epoch."
            )
        self._batches_digest = digest
        return batches

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
        steps = range(first, len(self))
        order, fetched = self._start(epoch, steps)
        loop = mix((self.samples, self.global_batch_size, self.shuffle)) or 1
        batches = to_device(fetched, self.comm.device)
        for step in steps:
            indices, global_size = order.part(step)
            data = next(batches, _ENDED)
            if data is _ENDED:
                raise _superseded_error(epoch)
            # Before the yield, so that a state saved while the batch is used is the position after it.
            self._epoch, self._step = epoch, step + 1
            part = data if len(indices) or self.virtual_workers else narrow(data, 0, 0)
            note_batch(epoch * len(self) + step, loop=loop)
            try:
                yield Batch(part, indices, len(indices), global_size, epoch, step, self.virtual_workers)
            except GeneratorExit:  # the loop was left before its end
                note_batch(-1)
                raise
        note_batch((epoch + 1) * len(self), finished=True, loop=loop)
        self._epoch, self._step = epoch + 1, 0

    def _start(self, epoch: int, steps: range) -> tuple[_WorkerOrder | _SampledOrder | _BlockOrder, Iterator[Any]]:
        """Return the order of an epoch, and its batches in the memory of the CPU."""
        if self._in_blocks:
            self._compare_files()
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

    def _compare_files(self) -> None:
        """Check that all workers have the same files.

        Raises:
            MismatchError: on every worker, if they differ.
        """
        if self.comm.group is None:
            return
        with named("comparison of the files"):
            by_rank = self.comm.allgather_object(self.dataset.order_settings())
        for rank, other in enumerate(by_rank):
            if other != by_rank[0]:
                raise MismatchError(f"the data of ranks 0 and {rank} differ: {by_rank[0]} and {other}")

    def _requests(self, order: _WorkerOrder | _SampledOrder, epoch: int, steps: range) -> Iterator[Request]:
        key = mix((self.seed, _SAMPLES, epoch))
        for step in steps:
            indices, global_size = order.part(step)
            # An empty part still needs the shapes of samples: one sample is loaded, and removed by `narrow`.
            yield key, self._by_shard(indices, global_size) or indices.tolist() or [order.any_sample]

    def stand_in(self) -> Any:
        """Return collated data for a worker that must run a pass although it has no samples.

        It is a sample twice, because batch norm refuses a single one.
        """
        fetcher = Fetcher(self.dataset, self._collate_fn, 0, 0, pin=False)
        return next(to_device(fetcher.fetch([(0, [0, 0])]), self.comm.device))

    def local_range(self, global_size: int) -> tuple[int, int]:
        """Return this worker's half-open range of the samples of a global batch of `global_size`."""
        if self.virtual_workers:
            ranges = self._shard_ranges(global_size)
            return ranges[0][0], ranges[-1][1]
        return bounds(global_size, self.comm.size, self.comm.rank)

    def _shard_ranges(self, global_size: int) -> list[tuple[int, int]]:
        """Return the range of samples of each of this worker's shards."""
        assert self.virtual_workers is not None
        shards = range(*bounds(self.virtual_workers, self.comm.size, self.comm.rank))
        return [bounds(global_size, self.virtual_workers, shard) for shard in shards]

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
        state = {"epoch": self._epoch, "step": self._step, **self._settings()}
        return state if self._batch_sampler is None else {**state, "batches": self._batches_digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position to a saved one, from a run with any number of workers.

        Raises:
            CheckpointError: it was saved with another data set size, global batch size, seed or order.
        """
        for key, current in self._settings().items():
            if state.get(key) != current:
                saved = state.get(key)
                raise CheckpointError(
                    f"the saved position does not fit this loader: {key} was {saved!r}, here it is {current!r}"
                )
        self._resume_at = self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self._batches_digest = int(state.get("batches", 0))

    def _settings(self) -> dict[str, Any]:
        files = self.dataset.order_settings() if self._in_blocks else {}
        return {
            **dict.fromkeys(("files", "shuffle_window", "lanes")),
            **files,
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
        self._samples, self._global_batch_size = loader.samples, loader.global_batch_size
        self._full_steps = loader.samples // loader.global_batch_size  # a smaller last one may follow
        low, high = loader.local_range(loader.global_batch_size)
        start = self._full_steps * loader.global_batch_size
        self._rows = order[:0]
        if self._full_steps:
            self._rows = order[:start].view(self._full_steps, -1)[:, low:high].contiguous()
        low, high = loader.local_range(loader.samples - start)
        self._last = order[start + low : start + high].clone()
        self.any_sample = int(order[0])

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """Return this worker's samples of `step`, int64, and the size of the global batch."""
        start, stop = step_range(self._samples, self._global_batch_size, step)
        return (self._rows[step] if step < self._full_steps else self._last).long(), stop - start


class _SampledOrder:
    """This worker's part of an epoch's batches from a batch sampler; see `_WorkerOrder`."""

    def __init__(self, loader: Loader, batches: list[list[int]]) -> None:
        self._parts, self._sizes = [], list(map(len, batches))
        for batch in batches:
            low, high = loader.local_range(len(batch))
            self._parts.append(torch.tensor(batch[low:high], dtype=torch.int64))
        self.any_sample = batches[0][0]

    def part(self, step: int) -> tuple[torch.Tensor, int]:
        """Return this worker's samples of `step`, int64, and the size of the global batch."""
        return self._parts[step], self._sizes[step]


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

    def request(self, key: int, step: int) -> _BatchInParts:
        """Return the request for this worker's part of a batch, with the blocks to keep where they change."""
        indices, size = self.part(step)
        low, high = self._loader.local_range(size)
        if low == high and not self._loader.virtual_workers:
            # As for other data sets: a sample, for the shapes, which is removed by `narrow`.
            rest = [_BlockRequest(key, [], []) for _ in range(self._parts - 1)]
            return _BatchInParts([_BlockRequest(key, [0], []), *rest], [0])
        cuts = self._order.cuts(step, low, high, self._parts)
        window = self._order.window(step), low, high
        keeps = [None if window == self._kept else self._order.blocks(step, *cut).tolist() for cut in cuts]
        self._kept = window
        parts = [
            _BlockRequest(key, indices[start - low : stop - low].tolist(), keep)
            for (start, stop), keep in zip(cuts, keeps, strict=True)
        ]
        return _BatchInParts(parts, self._loader._by_shard(indices, size) or indices.tolist())


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
        _check_whole("global_batch_size", global_batch_size, 1)
        _check_whole("pool", pool, 1)
        self._lengths = torch.as_tensor(lengths)
        if self._lengths.dim() != 1 or not len(self._lengths):
            raise ConfigError("lengths", "one number for each sample", found=f"shape {list(self._lengths.shape)}")
        self.global_batch_size, self.pool = global_batch_size, pool

    def __len__(self) -> int:
        """Batches in an epoch."""
        return steps_per_epoch(len(self._lengths), self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch, in an order drawn from torch's global generator."""
        batches: list[torch.Tensor] = []
        order = torch.randperm(len(self._lengths))
        for pool in torch.split(order, self.pool * self.global_batch_size):
            by_length = pool[self._lengths[pool].argsort(stable=True)]
            batches += torch.split(by_length, self.global_batch_size)
        for number in torch.randperm(len(batches)):
            yield batches[number].tolist()


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
    sampler, batches = loader.sampler, loader.batch_sampler
    expected = "a data set, or a DataLoader with shuffle=True or shuffle=False"
    if isinstance(loader.dataset, IterableDataset):
        _length(loader.dataset)
    if batches is None:
        hint = "Pass the data set itself: Lockstep forms the batches."
        raise ConfigError(argument, expected, found="a DataLoader with batch_size=None", hint=hint)
    in_order = type(sampler) is SequentialSampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == _length(loader.dataset)
    if type(batches) is not BatchSampler or not (in_order or shuffled):
        kind = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise ConfigError(argument, expected, found=f"a DataLoader with a {kind}", hint=_instead_of(loader))
    if warns:
        _warn_of_unused(loader, batches, argument, global_batch_size)
    own_collate = loader.collate_fn is not default_collate
    return {
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn if own_collate else None,
        "shuffle": shuffled,
        "drop_last": batches.drop_last,
        "num_workers": loader.num_workers,
        "prefetch": loader.num_workers * (loader.prefetch_factor or 2) if loader.num_workers else None,
    }


def _instead_of(loader: DataLoader[Any]) -> str:
    """Return what to do instead of giving a `DataLoader` with the sampler or batch sampler that it has."""
    why = (
        "Lockstep divides each global batch among the workers itself, in an order that depends on seed and epoch alone"
    )
    if isinstance(loader.sampler, DistributedSampler):
        return f"{why}: leave a DistributedSampler out."
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{why}: lockstep.Loader(batch_sampler=) takes one that yields the indices of global batches."
    return (
        f"{why}. To keep the sampler: lockstep.Loader(dataset, global_batch_size, batch_sampler=torch.utils.data."
        "BatchSampler(sampler, global_batch_size, drop_last=False)), which draws anew in each epoch."
    )


def _warn_of_unused(loader: DataLoader[Any], batches: BatchSampler, argument: str, global_batch_size: int) -> None:
    roles = {"train": " of the training data", "validate": " of validate="}
    name = f"the DataLoader{roles.get(argument, '')}"
    if batches.batch_size != global_batch_size:
        what = "a step" if argument == "train" else "a batch of an evaluation"
        used = f"{what} has the {global_batch_size} samples of global_batch_size, over all workers"
        _log.warning("batch_size=%d of %s is not used: %s", batches.batch_size, name, used)
    if loader.worker_init_fn is not None:
        _log.warning("worker_init_fn of %s is not called: random generators are seeded for each sample", name)


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
            hint="An iterable data set cannot be indexed; give it __len__ and __getitem__.",
        ) from None


def _check_whole(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(name, f"a whole number of at least {minimum}", value)


def _check_prefetch(prefetch: int | None, num_workers: int) -> int:
    if prefetch is None:
        return 2 * num_workers
    _check_whole("prefetch", prefetch, 1)
    if prefetch < num_workers:
        raise ConfigError("prefetch", f"at least {num_workers}, one for each of the loader processes", prefetch)
    return prefetch


def _superseded_error(epoch: int) -> ConfigError:
    return ConfigError(
        "loader",
        "one epoch at a time with loader processes",
        found=f"another one, or close(), before the last batch of epoch {epoch}",
        hint="Create a separate Loader for each, e.g. for evaluation.",
    )
