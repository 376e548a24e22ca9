"""Iterable data sets, and how their parts are read in the process that loads."""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker
from typing_extensions import override

from .. import arguments, environment
from ..errors import ConfigError, DataError, LockstepError
from ..parallel.shards import mix
from .digest import Digest, digest_of
from .fetching import Request, Samples, describe_exception
from .sample_draws import seed_draws


class Substreams(IterableDataset[Any]):
    """An iterable data set in a fixed number of parts, so that workers read it together and not
    each the whole.

    The parts are those that as many loader processes of torch's `DataLoader` would read: while part
    `s` is read, ``torch.utils.data.get_worker_info()`` says that this is loader process `s` of
    `parts`, whatever processes there are. Data sets of `datasets` and webdataset divide their files
    by that; one of your own should as well, or else each part has all samples.

    Each global batch has equally many samples of each part, in the order of the parts. The samples
    that are left when the first part ends are read by the workers that have been reading their
    parts, and sent to the others.

    Args:
        dataset: the iterable data set.
        parts: number of parts. The order of the samples depends on it, so it is a property of the
            data and not of the cluster: choose one that many numbers of workers divide, such as 8
            or 24.

    Raises:
        ConfigError: `parts` is invalid, or the data set has fewer files than that.
    """

    def __init__(self, dataset: Any, parts: int) -> None:
        parts = arguments.whole("parts", parts, least=1)
        if isinstance(dataset, DataLoader) or not is_iterable(dataset):
            raise ConfigError("dataset", "an iterable data set", found=type(dataset).__name__)
        if iter_is_itself(dataset):
            hint = "Each epoch reads it anew: give an object whose __iter__ makes a new iterator."
            raise ConfigError(
                "dataset", "an iterable data set", found=f"a {type(dataset).__name__}", hint=hint
            )
        files = getattr(dataset, "num_shards", None)
        if isinstance(files, int) and parts > max(1, files):
            raise ConfigError(
                "parts", f"at most {files}, the number of files of the data set", parts
            )
        if getattr(dataset, "_distributed", None) is not None:
            hint = (
                "Leave split_dataset_by_node out: Lockstep divides each global batch among the "
                "workers."
            )
            raise ConfigError(
                "dataset", "the whole data set on every worker", found="a part of it", hint=hint
            )
        self.dataset = dataset
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    @property
    def name(self) -> str:
        """The class of the data set, for messages."""
        return type(self.dataset).__name__

    def reader(self) -> _Reader:
        """Return what reads the parts in one process."""
        return _Reader(self)


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set can only be iterated over."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def iter_is_itself(dataset: Any) -> bool:
    """Return whether `dataset` is an iterator, such as a generator, which can be read only once."""
    return isinstance(dataset, Iterator)


def substreams_of(dataset: Any) -> Substreams | None:
    """Return an iterable data set as `Substreams`, in one part unless it says more; None for any
    other data set.
    """
    if isinstance(dataset, Substreams):
        return dataset
    return Substreams(dataset, 1) if is_iterable(dataset) else None


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
class SamplesRead:
    """What a `ReadRequest` has found of one part.

    Attributes:
        part: its number.
        count: number of samples read; fewer than asked for at its end.
        samples: those to be returned; one of them, for its shapes, if none is.
        state: the data set's own `state_dict` after them; None without one.
        first: a digest of the part's first sample; None if that was not read.
        digests: those of the samples that are compared, by number; empty but for the first that are
            read.
    """

    part: int
    count: int
    samples: list[Any]
    state: Any = None
    first: int | None = None
    digests: dict[int, Digest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadRequest(Request):
    """Asks for the next samples of parts of an iterable data set.

    Attributes:
        run: tells this reading of an epoch from others; with a new one all parts are opened again.
        epoch: the epoch.
        key: key of its random draws.
        parts: for each part, where to begin if it is not open, and the number of samples to read.
        keep: returns for the number of samples read the range of those to return; None to return
            all.
        compared: which of the samples that are read first are compared among the workers, by
            number.
    """

    run: int
    epoch: int
    key: int
    parts: list[tuple[PartPosition, int]]
    keep: Callable[[int], tuple[int, int]] | None = None
    compared: frozenset[int] = frozenset()

    gives_samples: ClassVar[bool] = True

    @override
    def load(self, samples: Samples) -> list[SamplesRead]:
        read: list[SamplesRead] = samples.reader().read(self)
        return read


class _Reader:
    """Reads parts of a data set, each from where the last request left it.

    Args:
        source: the data set.
    """

    def __init__(self, source: Substreams) -> None:
        self._source = source
        self._epoch = -1
        self._open: dict[int, _OpenPart] = {}

    def read(self, request: ReadRequest) -> list[SamplesRead]:
        """Read the next samples of each part that is asked for.

        Raises:
            DataError: the data set raises an exception, or has fewer samples than were read before.
        """
        if request.run != self._epoch:
            self._epoch = request.run
            self._open = {}
        samples = []
        for start, count in request.parts:
            part = self._open.get(start.part)
            if part is None:
                part = self._open[start.part] = _OpenPart(self._source, start, request)
            samples.append(part.take(count, request.keep, request.compared))
        return samples


class _OpenPart:
    """A part of a data set that is being read."""

    def __init__(self, source: Substreams, start: PartPosition, request: ReadRequest) -> None:
        self._source = source
        self._number = start.part
        self._dataset = _own_copy(source)
        self._stateful = _keeps_position(self._dataset)
        self._key = mix((request.key, start.part))
        self._samples = 0
        self._first: int | None = None
        self._was_read = False
        self._start(request.epoch, start)
        skipped = len(self._read(start.samples - self._samples, lambda _: None))
        if self._samples < start.samples:
            problem = (
                f"{self._name}: {self._samples} samples, where {start.samples} had been read "
                f"before the run was resumed ({skipped} of them again). It must yield the same "
                "samples whenever an epoch of it is read"
            )
            raise DataError(problem)

    @property
    def _name(self) -> str:
        parts = self._source.parts
        return self._source.name + (f" (part {self._number} of {parts})" if parts > 1 else "")

    def _start(self, epoch: int, start: PartPosition) -> None:
        seed_draws(mix((self._key, _OPENING)), 0)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if start.state is not None and self._stateful:
            self._dataset.load_state_dict(start.state)
            self._samples = start.state_at
        with self._as_a_loader_process():
            self._iterator = self._guarded(lambda: iter(self._dataset))

    def take(
        self,
        count: int,
        keep: Callable[[int], tuple[int, int]] | None,
        compared: frozenset[int] = frozenset(),
    ) -> SamplesRead:
        """Read the next `count` samples, fewer at the end, and return the range that `keep` gives
        for their number.
        """
        before = self._samples
        digests = {}
        samples = self._read(count, lambda sample: sample)
        if not self._was_read:
            digests = {
                before + number: digest_of(samples[number])
                for number in compared
                if number < len(samples)
            }
        self._was_read = True
        low, high = keep(len(samples)) if keep is not None else (0, len(samples))
        shown = samples[low:high] or samples[:1]  # one for its shapes, though none is asked for
        state = self._dataset.state_dict() if self._stateful else None
        return SamplesRead(self._number, len(samples), shown, state, self._first, digests)

    def _read(self, count: int, kept: Callable[[Any], Any]) -> list[Any]:
        samples: list[Any] = []
        with self._as_a_loader_process():
            for _ in range(count):
                seed_draws(self._key, self._samples)
                sample = self._guarded(lambda: next(self._iterator, _END))
                if sample is _END:
                    break
                if not self._samples:
                    self._first = _digest(sample)
                self._samples += 1
                samples.append(kept(sample))
        return samples

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except LockstepError:
            raise
        except Exception as error:
            problem = f"{self._name}: sample {self._samples}: {describe_exception(error)}"
            raise DataError(problem) from error if environment.debugging() else None

    @contextmanager
    def _as_a_loader_process(self) -> Iterator[None]:
        """Let the data set see the part that is read as its loader process, and the only worker."""
        number = self._number
        parts = self._source.parts
        info = None
        if parts > 1:
            seed = self._key & 0x7FFFFFFF
            info = torch_worker.WorkerInfo(
                id=number, num_workers=parts, seed=seed, dataset=self._dataset
            )
        before = torch_worker._worker_info
        torch_worker._worker_info = info
        try:
            with _webdataset_sees(number, parts):
                yield
        finally:
            torch_worker._worker_info = before


_END = object()

_OPENING = 1  # part of the key of the draws of a data set's __iter__


def _own_copy(source: Substreams) -> Any:
    """Return the data set, or a copy where it would keep the position of what is read in itself."""
    if source.parts > 1:
        return copy.deepcopy(source.dataset)
    return (
        copy.copy(source.dataset) if hasattr(source.dataset, "load_state_dict") else source.dataset
    )


@contextmanager
def _webdataset_sees(part: int, parts: int) -> Iterator[None]:
    """Let webdataset, where it is used, see one worker: its `split_by_node` would leave files
    out.
    """
    module = sys.modules.get("webdataset.utils")
    if module is None:
        yield
        return
    before = module.pytorch_worker_info
    module.pytorch_worker_info = lambda group=None: (0, 1, part, parts)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.pytorch_worker_info = before  # type: ignore[attr-defined]


def _keeps_position(dataset: Any) -> bool:
    """Return whether the data set's own `state_dict` leads back to exactly the next sample.

    That of `datasets` leaves out what is in a shuffle buffer; such a data set is read again from
    its beginning.
    """
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        inner = pending.pop()
        if type(inner).__name__.startswith("BufferShuffled"):
            return False
        if inner is not None:
            pending += [
                getattr(inner, "ex_iterable", None),
                *(getattr(inner, "ex_iterables", None) or ()),
            ]
    return True


def _digest(sample: Any) -> int:
    """Return a number that depends on the values of a sample, the same in every process."""

    def text(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            return str(value.dtype), tuple(value.shape), zlib.crc32(value.float().numpy().tobytes())
        if isinstance(value, np.ndarray):
            numbers = (
                zlib.crc32(np.ascontiguousarray(value).tobytes()) if value.dtype != object else 0
            )
            return str(value.dtype), value.shape, numbers
        if isinstance(value, Mapping):
            return [(str(key), text(item)) for key, item in value.items()]
        if isinstance(value, (tuple, list)):
            return [text(item) for item in value]
        return (
            value
            if isinstance(value, (str, bytes, int, float, bool, type(None)))
            else type(value).__name__
        )

    return zlib.crc32(repr(text(sample)).encode(errors="replace"))
