"""Iterable data sets: which of their samples form a global batch, and how each worker reads its part."""

from __future__ import annotations

import copy
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from .. import arguments, environment
from ..activity import Activity
from ..errors import ConfigError, DataError, LockstepError, MismatchError
from ..flight_recorder import named, note_batch
from ..parallel.shards import bounds, local_range, mix
from .digest import Digest, differences, digest_of
from .fetching import (
    Fetcher,
    PartPosition,
    ReadRequest,
    SamplesRead,
    describe_exception,
    seed_draws,
    superseded_error,
)
from .same_data import places, say_difference

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = [
    "BatchSettings",
    "EpochOfStream",
    "PartOfBatch",
    "StreamPosition",
    "Substreams",
    "is_iterable",
    "no_samples",
    "substreams_of",
]


class Substreams(IterableDataset[Any]):
    """An iterable data set in a fixed number of parts, so that workers read it together and not each the whole.

    The parts are those that as many loader processes of torch's `DataLoader` would read: while part `s` is read,
    ``torch.utils.data.get_worker_info()`` says that this is loader process `s` of `parts`, whatever processes there
    are. Data sets of `datasets` and webdataset divide their files by that; one of your own should as well, or else
    each part has all samples.

    Each global batch has equally many samples of each part, in the order of the parts. The samples that are left when
    the first part ends are read by the workers that have been reading their parts, and sent to the others.

    Args:
        dataset: the iterable data set.
        parts: number of parts. The order of the samples depends on it, so it is a property of the data and not of the
            cluster: choose one that many numbers of workers divide, such as 8 or 24.

    Raises:
        ConfigError: `parts` is invalid, or the data set has fewer files than that.
    """

    def __init__(self, dataset: Any, parts: int) -> None:
        parts = arguments.whole("parts", parts, least=1)
        if isinstance(dataset, DataLoader) or not is_iterable(dataset):
            raise ConfigError("dataset", "an iterable data set", found=type(dataset).__name__)
        if iter_is_itself(dataset):
            hint = "Each epoch reads it anew: give an object whose __iter__ makes a new iterator."
            raise ConfigError("dataset", "an iterable data set", found=f"a {type(dataset).__name__}", hint=hint)
        files = getattr(dataset, "num_shards", None)
        if isinstance(files, int) and parts > max(1, files):
            raise ConfigError("parts", f"at most {files}, the number of files of the data set", parts)
        if getattr(dataset, "_distributed", None) is not None:
            hint = "Leave split_dataset_by_node out: Lockstep divides each global batch among the workers."
            raise ConfigError("dataset", "the whole data set on every worker", found="a part of it", hint=hint)
        self.dataset, self.parts = dataset, parts

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
    """Return an iterable data set as `Substreams`, in one part unless it says more; None for any other data set."""
    if isinstance(dataset, Substreams):
        return dataset
    return Substreams(dataset, 1) if is_iterable(dataset) else None


# --- Reading, in the process that loads -----------------------------------------------------------------------------


class _Reader:
    """Reads parts of a data set, each from where the last request left it.

    Args:
        source: the data set.
    """

    def __init__(self, source: Substreams) -> None:
        self._source, self._epoch = source, -1
        self._open: dict[int, _OpenPart] = {}

    def read(self, request: ReadRequest) -> list[SamplesRead]:
        """Read the next samples of each part that is asked for.

        Raises:
            DataError: the data set raises an exception, or has fewer samples than were read before.
        """
        if request.run != self._epoch:
            self._epoch, self._open = request.run, {}
        found = []
        for start, count in request.parts:
            part = self._open.get(start.part)
            if part is None:
                part = self._open[start.part] = _OpenPart(self._source, start, request)
            found.append(part.take(count, request.keep, request.compared))
        return found


class _OpenPart:
    """A part of a data set that is being read."""

    def __init__(self, source: Substreams, start: PartPosition, request: ReadRequest) -> None:
        self._source, self._number = source, start.part
        self._dataset = _own_copy(source)
        self._stateful = _keeps_position(self._dataset)
        self._key, self._samples = mix((request.key, start.part)), 0
        self._first: int | None = None
        self._was_read = False
        self._start(request.epoch, start)
        skipped = len(self._read(start.samples - self._samples, lambda _: None))
        if self._samples < start.samples:
            what = (
                f"{self._name}: {self._samples} samples, where {start.samples} had been read before the run was "
                f"resumed ({skipped} of them again). It must yield the same samples whenever an epoch of it is read"
            )
            raise DataError(what)

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
        self, count: int, keep: Callable[[int], tuple[int, int]] | None, compared: frozenset[int] = frozenset()
    ) -> SamplesRead:
        """Read the next `count` samples, fewer at the end, and return the range that `keep` gives for their number."""
        before, digests = self._samples, {}
        samples = self._read(count, lambda sample: sample)
        if not self._was_read:
            digests = {before + number: digest_of(samples[number]) for number in compared if number < len(samples)}
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
            what = f"{self._name}: sample {self._samples}: {describe_exception(error)}"
            raise DataError(what) from error if environment.debugging() else None

    @contextmanager
    def _as_a_loader_process(self) -> Iterator[None]:
        """Let the data set see the part that is read as its loader process, and the only worker."""
        number, parts = self._number, self._source.parts
        info = None
        if parts > 1:
            seed = self._key & 0x7FFFFFFF
            info = torch_worker.WorkerInfo(id=number, num_workers=parts, seed=seed, dataset=self._dataset)
        before, torch_worker._worker_info = torch_worker._worker_info, info
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
    return copy.copy(source.dataset) if hasattr(source.dataset, "load_state_dict") else source.dataset


@contextmanager
def _webdataset_sees(part: int, parts: int) -> Iterator[None]:
    """Let webdataset, where it is used, see one worker: its `split_by_node` would leave files out."""
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

    That of `datasets` leaves out what is in a shuffle buffer; such a data set is read again from its beginning.
    """
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        inner = pending.pop()
        if type(inner).__name__.startswith("BufferShuffled"):
            return False
        if inner is not None:
            pending += [getattr(inner, "ex_iterable", None), *(getattr(inner, "ex_iterables", None) or ())]
    return True


def _digest(sample: Any) -> int:
    """Return a number that depends on the values of a sample, the same in every process."""

    def text(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            return str(value.dtype), tuple(value.shape), zlib.crc32(value.float().numpy().tobytes())
        if isinstance(value, np.ndarray):
            numbers = zlib.crc32(np.ascontiguousarray(value).tobytes()) if value.dtype != object else 0
            return str(value.dtype), value.shape, numbers
        if isinstance(value, Mapping):
            return [(str(key), text(each)) for key, each in value.items()]
        if isinstance(value, (tuple, list)):
            return [text(each) for each in value]
        return value if isinstance(value, (str, bytes, int, float, bool, type(None))) else type(value).__name__

    return zlib.crc32(repr(text(sample)).encode(errors="replace"))


# --- Global batches, in the process that trains ----------------------------------------------------------------------

_AHEAD = 4  # batches on which the workers agree at once
_COMPARISON = "comparison of the samples"
_COMPARED = 32  # samples of the first batch, or of a part, that are compared


class StreamPosition(NamedTuple):
    """A position between two global batches of an epoch, independent of the number of workers.

    Attributes:
        step: number of batches before it.
        ended: whether no batch follows.
        tail: number of batches before the first part ended; None before that.
        first: a digest of the epoch's first sample; None if it is not known.
        state_step: number of batches before `states`.
        states: the data set's own `state_dict` for each part; None without any.
    """

    step: int = 0
    ended: bool = False
    tail: int | None = None
    first: int | None = None
    state_step: int = 0
    states: list[Any] | None = None

    def of_part(self, part: int, share: int) -> PartPosition:
        """Return where to read a part on that gives `share` samples to each batch."""
        batches = self.step if self.tail is None else self.tail
        if self.states is None or self.states[part] is None:
            return PartPosition(part, batches * share)
        return PartPosition(part, batches * share, self.states[part], self.state_step * share)


class PartOfBatch(NamedTuple):
    """This worker's part of a global batch of an iterable data set.

    Attributes:
        samples: its samples; or one for its shapes, if it has none and knows any.
        low: number of the first of them in the global batch.
        high: number behind the last of them.
        global_size: samples in the global batch.
        position: the position behind the batch.
    """

    samples: list[Any]
    low: int
    high: int
    global_size: int
    position: StreamPosition


class BatchSettings(NamedTuple):
    """How the samples of an iterable data set are put into global batches, and these divided.

    Attributes:
        size: samples in a global batch.
        comm: communicator over the workers.
        virtual_workers: number of shards of a global batch, None without.
        drop_last: whether a smaller last batch is left out.
        needs_whole: whether less than one whole batch is an error.
        role: what the data set is for, for messages; "" if that is not known.
    """

    size: int
    comm: Communicator
    virtual_workers: int | None
    drop_last: bool
    needs_whole: bool
    role: str = ""


def no_samples(name: str, role: str) -> DataError:
    """Return the error for an iterable data set without samples."""
    return DataError(f"{name}: no samples{f' in {role}' if role else ''}")


class EpochOfStream:
    """This worker's parts of the global batches of an epoch of an iterable data set.

    With one part, every worker reads all samples and uses its own; workers compare samples of the first batch, and the
    number of them. With several parts, a worker reads those that its samples come from; workers that read the same part
    compare what they read first. The workers agree on the number of batches to come of which each part has its share.
    When a part has ended, whoever reads a part sends what is left.

    Args:
        settings: of the global batches.
        source: the data set.
        fetcher: reads the parts.
        epoch: the epoch.
        key: key of its random draws.
        start: where to begin.
    """

    _runs = 0

    def __init__(
        self,
        settings: BatchSettings,
        source: Substreams,
        fetcher: Fetcher,
        epoch: int,
        key: int,
        start: StreamPosition,
    ) -> None:
        EpochOfStream._runs += 1
        self._size, self._comm, virtual_workers, self._drop_last, self._needs_whole, self._role = settings
        self._source, self._epoch, self._start = source, epoch, start
        self._range = partial(local_range, workers=self._comm.size, virtual_workers=virtual_workers)
        self._cuts = [bounds(self._size, source.parts, part) for part in range(source.parts)]
        self._mine = self._parts_of(self._comm.rank)
        earlier = {part for rank in range(self._comm.rank) for part in self._parts_of(rank)}
        self._sent = [part for part in self._mine if part not in earlier]  # by this worker, at the end
        self._buffers: dict[int, deque[SamplesRead]] = {part: deque() for part in self._mine}
        self._open = set(self._mine)  # the parts that have not ended
        self._states: dict[int, Any] = {}  # of the parts, behind the last batch
        self._ended, self._first = False, start.first
        self._any: list[Any] = []  # a sample, once there was one
        self._digests: dict[int, dict[int, Digest]] = {}  # of the samples that were read first, by part
        self._processes = fetcher.parts
        self._reads = fetcher.fetch_parts(self._requests(EpochOfStream._runs, epoch, key))

    def _parts_of(self, rank: int) -> list[int]:
        """Return the parts from which the samples of a worker come."""
        low, high = self._range(self._size, rank=rank)
        return [part for part, (start, stop) in enumerate(self._cuts) if max(low, start) < min(high, stop)]

    def __iter__(self) -> Iterator[PartOfBatch]:
        held: PartOfBatch | None = None
        for batch in () if self._start.ended else self._batches():
            if held is not None:
                yield held
            held = batch
        self._ended = True
        if held is not None:
            yield held._replace(position=held.position._replace(ended=True))

    def _batches(self) -> Iterator[PartOfBatch]:
        batches = self._of_one_part() if self._source.parts == 1 else self._of_several_parts()
        for batch in batches:
            if self._is_short(batch):
                return
            self._any = batch.samples[:1] or self._any
            yield batch if batch.samples else batch._replace(samples=self._any)

    def _is_short(self, batch: PartOfBatch) -> bool:
        """Return whether a batch is a last one that is left out.

        Raises:
            DataError: there is no whole batch.
        """
        if batch.global_size == self._size:
            return False
        if batch.position.step == 1 and (self._drop_last or self._needs_whole):
            what = f"{self._source.name}: {batch.global_size} samples, less than one global batch of {self._size}"
            raise DataError(what)
        return self._drop_last

    # --- reading ------------------------------------------------------------------------------------------------------

    def _requests(self, run: int, epoch: int, key: int) -> Iterator[ReadRequest]:
        """Yield requests without end, for each process in turn the next share of each of its parts."""
        keep = partial(self._range, rank=self._comm.rank) if self._source.parts == 1 else None
        requests = []
        for process in range(self._processes):
            parts = self._mine[slice(*bounds(len(self._mine), self._processes, process))]
            shares = [(part, self._share(part)) for part in parts]
            starts = [(self._start.of_part(part, share), share) for part, share in shares]
            requests.append(ReadRequest(run, epoch, key, starts, keep, self._compared_samples()))
        while not self._ended:
            yield from requests

    def _compared_samples(self) -> frozenset[int]:
        """Return which of the samples that are read first of a part are compared."""
        if self._comm.group is None or self._comm.size == 1:
            return frozenset()
        most = max(self._share(part) for part in range(self._source.parts))
        return frozenset(places(most, _COMPARED))

    def _share(self, part: int) -> int:
        start, stop = self._cuts[part]
        return stop - start

    def _read(self) -> list[SamplesRead]:
        """Return what the loader processes have read for another batch."""
        found = []
        for _ in range(self._processes):
            with Activity(f"lockstep: reading {self._source.name}{self._again()}"):
                read = next(self._reads, None)
            if read is None:
                raise superseded_error(self._epoch)
            found += read
        for each in found:
            if each.first is not None and not each.part:
                self._note_first(each.first)
            if each.digests:
                self._digests[each.part] = each.digests
        return found

    def _again(self) -> str:
        batches = self._start.step if self._any == [] else 0
        return f" up to batch {batches}, where the run is resumed" if batches else ""

    def _note_first(self, first: int) -> None:
        if self._first is None:
            self._first = first
        elif self._first != first:
            what = (
                f"{self._source.name}: its first sample is another one than before the run was resumed. It must yield "
                "the same samples whenever an epoch of it is read: give what is shuffled a seed"
            )
            raise DataError(what)

    def _gather(self, value: Any, what: str) -> list[Any]:
        if self._comm.group is None:
            return [value]
        note_batch(-1)  # not that of torch's DataLoader in which samples are read
        with named(what):
            return self._comm.allgather_object(value)

    # --- one part -----------------------------------------------------------------------------------------------------

    def _of_one_part(self) -> Iterator[PartOfBatch]:
        step, count = self._start.step, self._size
        while count == self._size:
            (read,) = self._read()
            if step == self._start.step:
                self._compare_first(read)
            count = read.count
            if count:
                step += 1
                states = None if read.state is None else [read.state]
                position = StreamPosition(step, first=self._first, state_step=step, states=states)
                low, high = self._range(count, rank=self._comm.rank)
                yield PartOfBatch(read.samples, low, high, count, position)
        if not step:
            raise no_samples(self._source.name, self._role)
        self._compare((step, count), "the number of its samples")

    def _compare(self, value: Any, what: str) -> None:
        """Check that all workers have read the same.

        Raises:
            MismatchError: on every worker, if they have not.
        """
        for rank, other in enumerate(self._gather(value, _COMPARISON)):
            if other != value:
                raise self._differs(what, self._comm.rank, rank)

    def _differs(self, what: str, one: int, other: int) -> MismatchError:
        return MismatchError(
            f"{self._source.name}: {what} differs on ranks {one} and {other}. Each worker reads the whole data set, "
            "and uses its part of each global batch: it must not be divided by rank, and what is shuffled needs a seed "
            "that is the same on all workers."
        )

    def _compare_first(self, read: SamplesRead) -> None:
        """Check that all workers have read the same first batch.

        Raises:
            MismatchError: on every worker, if they have not.
        """
        if self._comm.group is None:
            return
        gathered = self._gather((read.count, self._digests), _COMPARISON)
        self._compare_digests([digests for _, digests in gathered])
        for rank, (count, _) in enumerate(gathered):
            if count != gathered[0][0]:
                raise self._differs("the number of its samples", 0, rank)

    def _compare_digests(self, by_rank: list[dict[int, dict[int, Digest]]]) -> None:
        """Check that what several workers have read of the same part is the same.

        Raises:
            MismatchError: on every worker, if it is not.
        """
        seen: dict[int, int] = {}  # by part, the first rank that has read it
        for rank, digests in enumerate(by_rank):
            for part, samples in digests.items():
                first = seen.setdefault(part, rank)
                self._compare_samples(part, by_rank[first][part], samples, first, rank)

    def _compare_samples(
        self, part: int, samples: dict[int, Digest], others: dict[int, Digest], one: int, other: int
    ) -> None:
        of = f" of part {part}" if self._source.parts > 1 else ""
        for number in sorted(samples.keys() & others.keys()):
            for difference in differences(samples[number], others[number]):
                if difference.is_refused:
                    what = f"its sample {number}{of}" if number or of else "its first sample"
                    raise self._differs(what, one, other)
                if not difference.only_rounded and self._comm.rank == 0:
                    say_difference(self._source.name, number, one, other, difference)

    # --- several parts ------------------------------------------------------------------------------------------------

    def _of_several_parts(self) -> Iterator[PartOfBatch]:
        position = self._start
        if position.tail is None:
            while (agreed := self._agree(position))[0]:
                batches, position = agreed
                for _ in range(batches):
                    position = position._replace(step=position.step + 1)
                    yield self._next_of_shares(position)
            position = agreed[1]._replace(tail=position.step)
        yield from self._tail(position)

    def _agree(self, position: StreamPosition) -> tuple[int, StreamPosition]:
        """Return the number of batches, at most `_AHEAD`, of which every part has its share, and the position now."""
        self._read_ahead(_AHEAD)
        ready = min((self._whole_shares(part) for part in self._mine), default=_AHEAD)
        shared = {part: each for part, each in self._digests.items() if self._is_shared(part)}
        gathered = self._gather((ready, self._states, self._first, shared), "agreement on the next samples")
        self._compare_digests([digests for *_, digests in gathered])
        self._digests = {}
        by_part: dict[int, Any] = {}
        for _, states, first, _ in gathered:
            by_part |= states
            self._first = self._first if first is None else first
        position = position._replace(first=self._first)
        if any(state is not None for state in by_part.values()):
            states = [by_part.get(part) for part in range(self._source.parts)]
            position = position._replace(state_step=position.step, states=states)
        return min(ready for ready, *_ in gathered), position

    def _is_shared(self, part: int) -> bool:
        """Return whether several workers read a part."""
        return sum(part in self._parts_of(rank) for rank in range(self._comm.size)) > 1

    def _read_ahead(self, batches: int) -> None:
        """Read until each part has its share of so many batches, or has ended."""
        while any(len(self._buffers[part]) < batches for part in self._open):
            for each in self._read():
                if each.count:
                    self._buffers[each.part].append(each)
                if each.count < self._share(each.part):
                    self._open.discard(each.part)

    def _whole_shares(self, part: int) -> int:
        return min(_AHEAD, sum(each.count == self._share(part) for each in self._buffers[part]))

    def _next_of_shares(self, position: StreamPosition) -> PartOfBatch:
        """Return the batch before `position`, of the share of each part."""
        low, high = self._range(self._size, rank=self._comm.rank)
        samples: list[Any] = []
        for part in self._mine:
            read, start = self._buffers[part].popleft(), self._cuts[part][0]
            self._states[part] = read.state
            samples += read.samples[max(0, low - start) : max(0, high - start)]
        return PartOfBatch(samples, low, high, self._size, position)

    def _tail(self, position: StreamPosition) -> Iterator[PartOfBatch]:
        """Yield the batches after the first part has ended, from samples that the workers send each other."""
        assert position.tail is not None
        samples: list[Any] = []
        skipped, more = (position.step - position.tail) * self._size, True
        while more or samples:
            if more:
                arrived = self._exchange()
                more = bool(arrived)
                dropped = min(skipped, len(arrived))
                samples, skipped = samples + arrived[dropped:], skipped - dropped
            while len(samples) >= self._size or (samples and not more):
                batch, samples = samples[: self._size], samples[self._size :]
                low, high = self._range(len(batch), rank=self._comm.rank)
                position = position._replace(step=position.step + 1)
                yield PartOfBatch(batch[low:high] or batch[:1], low, high, len(batch), position)
        if skipped:
            what = f"fewer than the {position.step} batches that had been read before the run was resumed"
            raise DataError(f"{self._source.name}: {what}. It must yield the same samples whenever it is read")
        if not position.step:
            raise no_samples(self._source.name, self._role)

    def _exchange(self) -> list[Any]:
        """Return the next share of each part, from the worker that reads it, in the order of the parts."""
        self._read_ahead(1)
        own = [(part, self._buffers[part].popleft().samples) for part in self._sent if self._buffers[part]]
        for part in set(self._mine) - set(self._sent):
            if self._buffers[part]:
                self._buffers[part].popleft()  # another worker reads and sends it
        gathered = self._gather(own, "exchange of the last samples of an epoch")
        shares = sorted((share for each in gathered for share in each), key=lambda share: share[0])
        return [sample for _, found in shares for sample in found]
