"""Loads samples and collates them into batches, in this process or in loader processes, and copies them to a device."""

from __future__ import annotations

import atexit
import copyreg
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import sysconfig
import threading
import traceback
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info
from typing_extensions import Self

from .. import devices, environment
from ..errors import ConfigError, DataError, LockstepError
from ..parallel.nested import map_tensors, tensors_of
from ..parallel.randomness import preserve_generators
from ..parallel.shards import mix
from ..system.processes import signal_name
from .collate_check import MAX_SAMPLES, describe_collate
from .digest import Digest
from .same_data import DigestRequest, SampleDigests, preserve_own_generators, read_digests

__all__ = [
    "BatchInParts",
    "BlockRequest",
    "Collate",
    "Fetcher",
    "PartPosition",
    "PickledByValue",
    "ReadRequest",
    "Request",
    "SamplesRead",
    "describe_exception",
    "pinned",
    "seed_draws",
    "superseded_error",
    "to_device",
]


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
    from ..pickling import Pickler, pickled

    class SharingPickler(Pickler):
        # ForkingPickler's reducers include torch's, which send tensors through shared memory.
        dispatch_table = ChainMap(ForkingPickler._extra_reducers, Pickler.dispatch_table)  # type: ignore[attr-defined]

    return pickled(value, SharingPickler)


def _unpack(data: bytes) -> PickledByValue:
    """Restore an object from `_pack`; the bytes come from another process of this program."""
    return PickledByValue(pickle.loads(data))


# --- Fetching batches -------------------------------------------------------------------------------------------------

Collate = Callable[[list[Any]], Any]

_REAP_S = 0.1  # in which the exit code of a process that has ended is known
_COLLATE = 1  # part of the key of a collate function's draws for a data set in blocks

Request = tuple[int, list[int] | torch.Tensor | tuple[list[int], ...]]
"""(key of the epoch's random draws, indices of the samples of a batch; a tensor only if the data set takes them).

With a tuple of lists of indices, the result is a list with a collated batch for each of them, None for an empty one."""


@dataclass(frozen=True, slots=True)
class BlockRequest:
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
class BatchInParts:
    """A batch of a data set in blocks.

    Attributes:
        parts: requests for its parts, in order.
        indices: the samples, or those of each shard, which are collated separately.
    """

    parts: list[BlockRequest]
    indices: list[int] | tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class PartPosition:
    """Where to begin to read a part of an iterable data set.

    Attributes:
        part: its number.
        samples: number of samples of it that lie before.
        state: the data set's own `state_dict` at or before that position; None without one.
        state_at: number of samples before that state.
    """

    part: int
    samples: int
    state: Any = None
    state_at: int = 0


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Asks for the next samples of parts of an iterable data set.

    Attributes:
        run: tells this reading of an epoch from others; with a new one all parts are opened again.
        epoch: the epoch.
        key: key of its random draws.
        parts: for each part, where to begin if it is not open, and the number of samples to read.
        keep: returns for the number of samples read the range of those to return; None to return all.
        compared: which of the samples that are read first are compared among the workers, by number.
    """

    run: int
    epoch: int
    key: int
    parts: list[tuple[PartPosition, int]]
    keep: Callable[[int], tuple[int, int]] | None = None
    compared: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SamplesRead:
    """What a `ReadRequest` has found of one part.

    Attributes:
        part: its number.
        count: number of samples read; fewer than asked for at its end.
        samples: those to be returned; one of them, for its shapes, if none is.
        state: the data set's own `state_dict` after them; None without one.
        first: a digest of the part's first sample; None if that was not read.
        digests: those of the samples that are compared, by number; empty but for the first that are read.
    """

    part: int
    count: int
    samples: list[Any]
    state: Any = None
    first: int | None = None
    digests: dict[int, Digest] = field(default_factory=dict)


_AnyRequest = Request | BatchInParts | BlockRequest | ReadRequest | DigestRequest


class _Batches(Dataset[Any]):
    """A data set whose keys are requests and whose items are batches; for a `BlockRequest`, samples as `_Packed`."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or default_collate
        self.reader: Any = None  # of a data set in blocks, or an iterable one
        plain = collate is None
        # Only this class itself: a subclass may transform samples.
        self.in_tensors = plain and type(dataset) is TensorDataset
        self.by_batch = plain and hasattr(dataset, "collated_batch")
        self.by_sample = not (self.in_tensors or self.by_batch)
        # Others may expect a list. It is said of the method, which a subclass may replace.
        says_so = self.by_batch and getattr(dataset.collated_batch, "takes_tensors", False)
        self.takes_tensors = self.in_tensors or says_so

    def __getstate__(self) -> dict[str, Any]:
        by_value = {"dataset": PickledByValue(self.dataset), "collate": PickledByValue(self.collate)}
        return {**self.__dict__, **by_value, "reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, dataset=state["dataset"].value, collate=state["collate"].value)

    def __getitem__(self, request: _AnyRequest) -> Any:
        try:
            if type(request) is tuple:
                key, indices = request
                if isinstance(indices, tuple):
                    return [self._batch(key, part) if part else None for part in indices]
                return self._batch(key, indices)
            if isinstance(request, BatchInParts):
                return self.joined(request, self._from_blocks(*request.parts))
            if isinstance(request, BlockRequest):
                return self._packed(self._from_blocks(request))
            if isinstance(request, ReadRequest):
                found = self._read(request)
                return found if get_worker_info() is None else self._packed(found)
            assert isinstance(request, DigestRequest)
            return self._digests(request)
        except LockstepError as error:
            process = get_worker_info()
            if process is None:
                raise
            # Returned, because torch would put the traceback of the loader process into the message.
            return _Failure(f"{error} (in loader process {process.id})")

    def _batch(self, key: int, indices: list[int] | torch.Tensor) -> Any:
        if self.in_tensors:
            return [tensor[indices] for tensor in self.dataset.tensors]
        if self.by_batch:
            return self.dataset.collated_batch(indices)
        assert isinstance(indices, list)
        return self.collated([self._sample(self.dataset, key, index) for index in indices], indices)

    def joined(self, request: BatchInParts, samples: list[Any]) -> Any:
        """Return the samples of the parts of a batch as a batch, or as a list of shards."""
        key, rest = mix((request.parts[0].key, _COLLATE)), iter(samples)

        def collated(indices: list[int]) -> Any:
            # Draws of the collate function are the same whichever process has loaded the samples.
            seed_draws(key, indices[0])
            return self.collated(list(islice(rest, len(indices))), indices)

        if isinstance(request.indices, tuple):
            return [collated(shard) if shard else None for shard in request.indices]
        return collated(request.indices)

    def _packed(self, samples: list[Any]) -> _Packed:
        try:
            return _Packed.of(samples)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = (
                f"samples of {type(self.dataset).__name__} cannot leave a loader process: {describe_exception(error)}"
            )
            hint = "Return tensors, arrays and plain values, or use one loader process"
            raise DataError(f"{what}. {hint}") from error if environment.debugging() else None

    def _read(self, request: ReadRequest) -> list[SamplesRead]:
        if self.reader is None:
            self.reader = self.dataset.reader()
        found: list[SamplesRead] = self.reader.read(request)
        return found

    def _digests(self, request: DigestRequest) -> SampleDigests:
        """Read samples as for a batch, and leave no trace of it in random generators or the blocks that are kept."""
        source = self.dataset.reader() if hasattr(self.dataset, "reader") else self.dataset

        kept: dict[int, Any] = {}  # samples to collate

        def read(index: int) -> Any:
            seed_draws(request.key, index)
            sample = self._any_form(source, index)
            if request.collates and len(kept) < MAX_SAMPLES:
                kept[index] = sample
            return sample

        with preserve_generators(), preserve_own_generators((self.dataset, self.collate)):
            found = read_digests(request, read)
            if not request.collates:
                return found
            seed = partial(seed_draws, mix((request.key, _COLLATE)))
            collated = describe_collate(self.collate, list(kept.values()), _copies, seed)
            return replace(found, collated=collated)

    def _any_form(self, source: Any, index: int) -> Any:
        """Return a sample, as a batch of one where only batches are made."""
        if hasattr(source, "__getitem__") or not self.by_batch:
            with suppress(NotImplementedError):  # of torch's Dataset
                return source[index]
        return source.collated_batch([index])

    def _from_blocks(self, request: BlockRequest) -> list[Any]:
        if self.reader is None:
            self.reader = self.dataset.reader()
        if request.keep is not None:
            self.reader.keep(request.keep)
        return [self._sample(self.reader, request.key, index) for index in request.indices]

    def _sample(self, source: Any, key: int, index: int) -> Any:
        seed_draws(key, index)
        try:
            return source[index]
        except LockstepError:
            raise
        except Exception as error:
            what = f"sample {index} of {type(self.dataset).__name__}: {describe_exception(error)}"
            raise DataError(what) from error if environment.debugging() else None

    def collated(self, samples: list[Any], indices: list[int]) -> Any:
        """Return samples as a batch; `indices` are their numbers, for messages."""
        try:
            return self.collate(samples)
        except LockstepError:
            raise
        except Exception as error:
            shown = ", ".join(map(str, indices[:5])) + (f" and {len(indices) - 5} more" if len(indices) > 5 else "")
            what = f"a batch of samples {shown} of {type(self.dataset).__name__}: {describe_exception(error)}"
            if self.collate is default_collate:
                what += ". Samples of different sizes need a collate_fn that pads them, of a Loader or a DataLoader"
            elif any(sample is None for sample in samples):
                what += ". A collate_fn that leaves samples out is to return None for a part of which none are left"
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


def _copies(samples: list[Any]) -> list[Any]:
    """Return copies of samples. `copy.deepcopy` would copy the whole data set, if their tensors are views of its."""
    return _Packed.of(samples).samples()


def describe_exception(error: Exception) -> str:
    """Return an exception of a data set in one line, with the line of the program that raised it."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the frame here
    own = [frame for frame in frames if not _is_of_a_library(frame.filename)] or frames
    place = f", at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_OWN = f"{Path(__file__).parents[1]}{os.sep}"


def _is_of_a_library(file: str) -> bool:
    """Return whether a file belongs to an installed package, to Python or to Lockstep, and not to the program."""
    return f"{os.sep}site-packages{os.sep}" in file or file.startswith((*_STANDARD, _OWN, "<frozen "))


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
        in_parts: use `fetch_in_parts` for a `dataset` in blocks, or `fetch_parts` for an iterable one; not `fetch`.

    Attributes:
        parts: number of parts of a batch that `fetch_in_parts` loads beside each other.
        takes_tensors: whether requests may have their indices as tensors, which takes less than lists.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None, processes: int, prefetch: int, pin: bool, in_parts: bool = False
    ) -> None:
        self._batches = _Batches(dataset, collate)
        self._processes, self._prefetch, self._pin = processes, prefetch, pin
        self._in_parts, self.parts = in_parts, max(1, processes)
        self.takes_tensors = not processes and self._batches.takes_tensors  # lists are sent to processes sooner
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = None
        self._running: Generator[Any, None, None] | None = None

    def fetch(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Return an iterator over the batches of `requests`; with loader processes, it ends an earlier iterator."""
        return self._fetch(requests, self._pin)

    def fetch_in_parts(self, requests: Iterable[BatchInParts]) -> Iterator[Any]:
        """Return an iterator over the batches of a data set in blocks; otherwise as `fetch`.

        Of several loader processes, each has the same part of every batch, so that it reads other blocks than its
        siblings. This process puts the parts together and collates them.
        """
        if self.parts == 1:
            return self._fetch(requests, self._pin)
        return self._join(requests)

    def fetch_parts(self, requests: Iterable[ReadRequest]) -> Iterator[list[SamplesRead]]:
        """Return an iterator over what is read of an iterable data set; otherwise as `fetch`.

        Requests go to the loader processes in turn, and each process keeps the parts that it has opened.
        """
        for found in self._fetch(requests, pin=False):
            yield found.samples() if isinstance(found, _Packed) else found

    def digests(self, request: DigestRequest) -> SampleDigests:
        """Read samples for a comparison where `fetch` reads them: in the first loader process, if there is any.

        This process does not read then: files that a data set opens when it is first read would be shared with all
        loader processes, and so would the positions in them.
        """
        (found,) = self._fetch([request], pin=False)
        assert isinstance(found, SampleDigests)
        return found

    def collated(self, key: int, samples: list[Any], indices: list[int]) -> Any:
        """Return samples as a batch, with the random draws of the collate function keyed by its first sample.

        Args:
            key: of the epoch's random draws.
            samples: at least one.
            indices: their numbers.
        """
        with preserve_generators():
            seed_draws(mix((key, _COLLATE)), indices[0])
            data = self._batches.collated(samples, indices)
        return map_tensors(pinned, data) if self._pin else data

    def _join(self, requests: Iterable[BatchInParts]) -> Iterator[Any]:
        ahead: deque[BatchInParts] = deque()

        def of_parts() -> Iterator[BlockRequest]:
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
        is_seeded, batches = self._batches.by_sample or self._in_parts, self._batches
        for request in requests:
            if is_seeded:
                with preserve_generators():
                    data = batches[request]
            else:
                data = batches[request]
            yield map_tensors(pinned, data) if pin else data

    def _fetch_from_processes(self, requests: Iterable[_AnyRequest]) -> Generator[Any, None, None]:
        self._sampler.requests = requests
        if self._loader is None:
            self._loader = self._start()
            _with_processes.add(self)
        loaded = iter(self._loader)
        while True:
            try:
                data = next(loaded)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # of torch, or of a pipe, when a process has ended
                message = _describe_dead_process(self._loader)
                if message is None:
                    raise
                raise DataError(message) from error if environment.debugging() else None
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
            worker_init_fn=partial(_prepare_process, new_group=multiprocessing.parent_process() is None),
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


# Those whose loader processes may run. Where an exception ends the program within an epoch, nobody closes them; the
# processes pass over the first SIGTERM, with which multiprocessing ends them, and it would wait for them for ever.
_with_processes: weakref.WeakSet[Fetcher] = weakref.WeakSet()


@atexit.register  # after that of multiprocessing, so it is called before
def _close_all() -> None:
    for fetcher in list(_with_processes):
        fetcher.close()


def _describe_dead_process(loader: DataLoader[Any]) -> str | None:
    """Return which loader process has died, and how; None if all are alive."""
    for number, process in enumerate(getattr(getattr(loader, "_iterator", None), "_workers", ())):
        with suppress(RuntimeError):  # from torch's handler of SIGCHLD, which raises wherever this process is
            process.join(_REAP_S)
        code = process.exitcode
        if code is None:
            continue
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        which = f"loader process {number} of {loader.num_workers} (PID {process.pid})"
        memory = " If that was for want of memory, use fewer loader processes or a smaller prefetch."
        return f"{which} {how} while it loaded samples.{memory if code == -signal.SIGKILL else ''}"
    return None


def superseded_error(epoch: int) -> ConfigError:
    """Return the error of an iterator whose loader processes serve another epoch, or have ended."""
    return ConfigError(
        "loader",
        "one epoch at a time with loader processes",
        found=f"another one, or close(), before the last batch of epoch {epoch}",
        hint="Create a separate Loader for each, e.g. for evaluation.",
    )


def _unchanged(data: Any) -> Any:
    return data


def _prepare_process(_: int, new_group: bool) -> None:
    """Let a loader process ignore signals that are meant for its parent, and end with it."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # Its parent in the system is a fork server (the default since Python 3.14), which lives as long as it does;
        # torch looks only for that.
        threading.Thread(target=_end_with, args=(parent,), name="lockstep loader parent", daemon=True).start()
    # Ctrl-C reaches every process of the terminal, and SIGTERM of Slurm every process of a step. The parent completes
    # its step first, and needs this process's batches for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _pass_over_once)
    if new_group:  # not under a launcher: it signals only the worker, and at the end kills the worker's process group
        os.setpgid(0, 0)
        # In a background process group, writing to the terminal must not stop the process ("stty tostop").
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _pass_over_once(number: int, _frame: FrameType | None) -> None:
    # The next one ends this process: that of multiprocessing, when the parent exits and this process hangs.
    signal.signal(number, signal.SIG_DFL)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in page-locked memory; a sparse tensor, or one on a device, is returned unchanged."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and _has_one_memory(tensor) else tensor


def _has_one_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is not made of several others, as sparse and nested ones are."""
    return tensor.layout == torch.strided and not tensor.is_nested


def to_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy each of `batches` to `device`; where it has streams, this overlaps with computing on the previous batch."""
    if device.type == "cpu":
        return iter(batches)
    if devices.has_streams(device):
        return _overlapped(batches, device)
    return (map_tensors(lambda tensor: tensor.to(device), data) for data in batches)


def _overlapped(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    stream = devices.new_stream(device)
    pending: tuple[Any, Any] | None = None

    def copy_ahead(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True) if _has_one_memory(tensor) else tensor

    def wait_for_copy(data: Any, copied: Any) -> Any:
        consumer = devices.current_stream(device)
        consumer.wait_event(copied)

        def hand_over(tensor: torch.Tensor) -> torch.Tensor:
            if not _has_one_memory(tensor):
                return tensor.to(device)
            # The allocator must not reuse this memory for the copy stream while the consumer reads it.
            tensor.record_stream(consumer)
            return tensor

        return map_tensors(hand_over, data)

    for data in batches:
        tensors = tensors_of(data)
        if tensors and all(tensor.device == device for tensor in tensors):  # made there, as by `ImageSet.to`
            if pending is not None:
                yield wait_for_copy(*pending)
                pending = None
            yield data
            continue
        with devices.in_stream(device, stream):
            moved = map_tensors(copy_ahead, data)
        copied = devices.record_event(device, stream)
        if pending is not None:
            yield wait_for_copy(*pending)
        pending = moved, copied
    if pending is not None:
        yield wait_for_copy(*pending)
