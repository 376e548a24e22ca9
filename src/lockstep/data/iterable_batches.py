"""The global batches of an epoch of an iterable data set: which samples are in each, and each
worker's part of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from ..activity import Activity
from ..errors import DataError, MismatchError
from ..flight_recorder import named, note_batch
from ..parallel.shards import bounds, local_range
from .batch_plan import BatchPlan
from .differences import differences
from .digest import Digest
from .fetching import Fetcher, superseded_error
from .iterable import PartPosition, ReadRequest, SamplesRead, Substreams
from .same_data import places, say_difference

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


class SamplesOfPart(NamedTuple):
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


def no_samples(name: str, role: str) -> DataError:
    """Return the error for an iterable data set without samples."""
    where = f" in {role}" if role else ""
    return DataError(f"{name}: no samples{where}")


class EpochOfStream:
    """This worker's parts of the global batches of an epoch of an iterable data set.

    With one part, every worker reads all samples and uses its own; workers compare samples of the
    first batch, and the number of them. With several parts, a worker reads those that its samples
    come from; workers that read the same part compare what they read first. The workers agree on
    the number of batches to come of which each part has its share. When a part has ended, whoever
    reads a part sends what is left.

    Args:
        plan: of the batches.
        source: the data set.
        fetcher: reads the parts.
        epoch: the epoch.
        key: key of its random draws.
        start: where to begin.
    """

    _runs = 0

    def __init__(
        self,
        plan: BatchPlan,
        source: Substreams,
        fetcher: Fetcher,
        epoch: int,
        key: int,
        start: StreamPosition,
    ) -> None:
        EpochOfStream._runs += 1
        self._plan = plan
        self._size = plan.global_batch_size
        self._comm = plan.comm
        self._source = source
        self._epoch = epoch
        self._start = start
        self._range = partial(
            local_range, workers=self._comm.size, virtual_workers=plan.virtual_workers
        )
        self._cuts = [bounds(self._size, source.parts, part) for part in range(source.parts)]
        self._mine = self._parts_of(self._comm.rank)
        earlier = {part for rank in range(self._comm.rank) for part in self._parts_of(rank)}
        # by this worker, at the end
        self._sent = [part for part in self._mine if part not in earlier]
        self._buffers: dict[int, deque[SamplesRead]] = {part: deque() for part in self._mine}
        self._open = set(self._mine)  # the parts that have not ended
        self._states: dict[int, Any] = {}  # of the parts, behind the last batch
        self._ended = False
        self._first = start.first
        self._any: list[Any] = []  # a sample, once there was one
        # of the samples that were read first, by part
        self._digests: dict[int, dict[int, Digest]] = {}
        self._processes = fetcher.parts
        self._reads = fetcher.fetch(
            self._requests(EpochOfStream._runs, epoch, key), are_batches=False
        )

    def _parts_of(self, rank: int) -> list[int]:
        """Return the parts from which the samples of a worker come."""
        low, high = self._range(self._size, rank=rank)
        return [
            part
            for part, (start, stop) in enumerate(self._cuts)
            if max(low, start) < min(high, stop)
        ]

    def __iter__(self) -> Iterator[SamplesOfPart]:
        held: SamplesOfPart | None = None
        for batch in () if self._start.ended else self._batches():
            if held is not None:
                yield held
            held = batch
        self._ended = True
        if held is not None:
            yield held._replace(position=held.position._replace(ended=True))

    def _batches(self) -> Iterator[SamplesOfPart]:
        batches = self._of_one_part() if self._source.parts == 1 else self._of_several_parts()
        for batch in batches:
            if self._is_short(batch):
                return
            self._any = batch.samples[:1] or self._any
            yield batch if batch.samples else batch._replace(samples=self._any)

    def _is_short(self, batch: SamplesOfPart) -> bool:
        """Return whether a batch is a last one that is left out.

        Raises:
            DataError: there is no whole batch.
        """
        if batch.global_size == self._size:
            return False
        if batch.position.step == 1 and (self._plan.drop_last or self._plan.shuffle):
            problem = (
                f"{self._source.name}: {batch.global_size} samples, less than one global batch of "
                f"{self._size}"
            )
            raise DataError(problem)
        return self._plan.drop_last

    def _requests(self, run: int, epoch: int, key: int) -> Iterator[ReadRequest]:
        """Yield requests without end, for each process in turn the next share of each of its
        parts.
        """
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
        reads = []
        again = ""
        if self._start.step and self._any == []:
            again = f" up to batch {self._start.step}, where the run is resumed"
        for _ in range(self._processes):
            with Activity(f"lockstep: reading {self._source.name}{again}"):
                read = next(self._reads, None)
            if read is None:
                raise superseded_error(self._epoch)
            reads += read
        for read_part in reads:
            if read_part.first is not None and not read_part.part:
                self._note_first(read_part.first)
            if read_part.digests:
                self._digests[read_part.part] = read_part.digests
        return reads

    def _note_first(self, first: int) -> None:
        if self._first is None:
            self._first = first
        elif self._first != first:
            problem = (
                f"{self._source.name}: its first sample is another one than before the run was "
                "resumed. It must yield the same samples whenever an epoch of it is read: give "
                "what is shuffled a seed"
            )
            raise DataError(problem)

    def _gather(self, value: Any, purpose: str) -> list[Any]:
        if self._comm.group is None:
            return [value]
        note_batch(-1)  # not that of torch's DataLoader in which samples are read
        with named(purpose):
            return self._comm.allgather_object(value)

    def _of_one_part(self) -> Iterator[SamplesOfPart]:
        step = self._start.step
        count = self._size
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
                yield SamplesOfPart(read.samples, low, high, count, position)
        if not step:
            raise no_samples(self._source.name, self._plan.role)
        end = (step, count)
        for rank, other in enumerate(self._gather(end, _COMPARISON)):
            if other != end:
                raise self._differs("the number of its samples", self._comm.rank, rank)

    def _differs(self, noun: str, rank: int, other_rank: int) -> MismatchError:
        return MismatchError(
            f"{self._source.name}: {noun} differs on ranks {rank} and {other_rank}. Each worker "
            "reads the whole data set, and uses its part of each global batch: it must not be "
            "divided by rank, and what is shuffled needs a seed that is the same on all workers."
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
        self,
        part: int,
        samples: dict[int, Digest],
        others: dict[int, Digest],
        rank: int,
        other_rank: int,
    ) -> None:
        of = f" of part {part}" if self._source.parts > 1 else ""
        for number in sorted(samples.keys() & others.keys()):
            for difference in differences(samples[number], others[number]):
                if difference.is_refused:
                    noun = f"its sample {number}{of}" if number or of else "its first sample"
                    raise self._differs(noun, rank, other_rank)
                if not difference.only_rounded and self._comm.rank == 0:
                    say_difference(self._source.name, number, rank, other_rank, difference)

    def _of_several_parts(self) -> Iterator[SamplesOfPart]:
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
        """Return the number of batches, at most `_AHEAD`, of which every part has its share, and
        the position now.
        """
        self._read_ahead(_AHEAD)
        ready = _AHEAD
        for part in self._mine:
            whole_shares = sum(read.count == self._share(part) for read in self._buffers[part])
            ready = min(ready, whole_shares)
        shared = {}  # digests of the parts that several workers read
        for part, digests_of_part in self._digests.items():
            if sum(part in self._parts_of(rank) for rank in range(self._comm.size)) > 1:
                shared[part] = digests_of_part
        gathered = self._gather(
            (ready, self._states, self._first, shared), "agreement on the next samples"
        )
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

    def _read_ahead(self, batches: int) -> None:
        """Read until each part has its share of so many batches, or has ended."""
        while any(len(self._buffers[part]) < batches for part in self._open):
            for read in self._read():
                if read.count:
                    self._buffers[read.part].append(read)
                if read.count < self._share(read.part):
                    self._open.discard(read.part)

    def _next_of_shares(self, position: StreamPosition) -> SamplesOfPart:
        """Return the batch before `position`, of the share of each part."""
        low, high = self._range(self._size, rank=self._comm.rank)
        samples: list[Any] = []
        for part in self._mine:
            read = self._buffers[part].popleft()
            start = self._cuts[part][0]
            self._states[part] = read.state
            samples += read.samples[max(0, low - start) : max(0, high - start)]
        return SamplesOfPart(samples, low, high, self._size, position)

    def _tail(self, position: StreamPosition) -> Iterator[SamplesOfPart]:
        """Yield the batches after the first part has ended, from samples that the workers send each
        other.
        """
        assert position.tail is not None
        samples: list[Any] = []
        skipped = (position.step - position.tail) * self._size
        more = True
        while more or samples:
            if more:
                arrived = self._exchange()
                more = bool(arrived)
                dropped = min(skipped, len(arrived))
                samples = samples + arrived[dropped:]
                skipped = skipped - dropped
            while len(samples) >= self._size or (samples and not more):
                batch = samples[: self._size]
                samples = samples[self._size :]
                low, high = self._range(len(batch), rank=self._comm.rank)
                position = position._replace(step=position.step + 1)
                yield SamplesOfPart(batch[low:high] or batch[:1], low, high, len(batch), position)
        if skipped:
            problem = (
                f"fewer than the {position.step} batches that had been read before the run was "
                "resumed"
            )
            raise DataError(
                f"{self._source.name}: {problem}. It must yield the same samples whenever it is "
                "read"
            )
        if not position.step:
            raise no_samples(self._source.name, self._plan.role)

    def _exchange(self) -> list[Any]:
        """Return the next share of each part, from the worker that reads it, in the order of the
        parts.
        """
        self._read_ahead(1)
        own_shares = [
            (part, self._buffers[part].popleft().samples)
            for part in self._sent
            if self._buffers[part]
        ]
        for part in set(self._mine) - set(self._sent):
            if self._buffers[part]:
                self._buffers[part].popleft()  # another worker reads and sends it
        gathered = self._gather(own_shares, "exchange of the last samples of an epoch")
        shares = sorted(
            (share for shares_of_rank in gathered for share in shares_of_rank),
            key=lambda share: share[0],
        )
        return [sample for _, samples in shares for sample in samples]
