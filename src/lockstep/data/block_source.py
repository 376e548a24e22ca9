"""Data sets that are read in blocks, such as a `Stream`: each worker reads the blocks of its part
of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from typing_extensions import override

from ..errors import ConfigError, MismatchError
from ..flight_recorder import named
from ..parallel.randomness import preserve_generators
from ..parallel.shards import steps_per_epoch
from .batch_memory import Lease, Place
from .batch_plan import BatchPlan
from .between_processes import PackedSamples
from .fetching import Collate, Request, Samples
from .indexed_source import IndexedSource, Order
from .sample_draws import seed_collate


@dataclass(frozen=True, slots=True)
class _BlockRequest(Request):
    """Asks for samples of a part of a batch, not collated.

    Attributes:
        key: key of the epoch's random draws.
        indices: the samples.
        keep: the blocks to keep from now on; None for those of the request before.
        place: see `Request`.
    """

    key: int
    indices: list[int]
    keep: list[int] | None
    place: Place | None = None

    gives_samples: ClassVar[bool] = True

    @override
    def load(self, samples: Samples) -> list[Any]:
        reader = samples.reader()
        if self.keep is not None:
            reader.keep(self.keep)
        return [samples.sample(reader, self.key, index) for index in self.indices]


@dataclass(frozen=True, slots=True)
class _BatchInParts(Request):
    """Asks for a batch, whose parts may be loaded by several processes.

    Attributes:
        parts: requests for its parts, in order.
        indices: the samples, or those of each shard, which are collated separately.
    """

    parts: list[_BlockRequest]
    indices: list[int] | tuple[list[int], ...]

    gives_samples: ClassVar[bool] = False

    @override
    def load(self, samples: Samples) -> Any:
        return self.joined(
            samples, [sample for part in self.parts for sample in part.load(samples)]
        )

    def joined(self, samples: Samples, loaded: list[Any], in_place: Collate | None = None) -> Any:
        """Return the samples of all parts as a batch, or as a list of shards.

        Args:
            samples: collates them.
            loaded: the samples, in order.
            in_place: see `Samples.collated`.
        """
        key = self.parts[0].key
        rest = iter(loaded)

        def collated(indices: list[int]) -> Any:
            seed_collate(key, indices[0])
            return samples.collated(list(islice(rest, len(indices))), indices, in_place)

        if isinstance(self.indices, tuple):
            return [collated(shard) if shard else None for shard in self.indices]
        return collated(self.indices)


class BlockSource(IndexedSource):
    """A map-style data set that is read in blocks, with an order of its own.

    Args:
        dataset: has ``epoch_order(global_batch_size, seed, epoch, shuffle)``, ``order_settings()``
            and ``reader()``.
        plan: of the batches.
    """

    in_parts = True
    _in_blocks = True

    def _check(self) -> None:
        self._check_drop_last()
        if self.samples < self.plan.global_batch_size and self.plan.shuffle:
            expected = f"at most the samples of {self._dataset}"
            raise ConfigError("global_batch_size", expected, self.plan.global_batch_size)

    @override
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), **self._dataset.order_settings()}

    @override
    def order(self, epoch: int) -> torch.Tensor:
        order = self._order(epoch)
        return torch.cat(
            [order.samples(step, 0, order.global_size(step)) for step in range(order.steps)]
        )

    def _order(self, epoch: int) -> _BlockOrder:
        plan = self.plan
        order = self._dataset.epoch_order(plan.global_batch_size, plan.seed, epoch, plan.shuffle)
        return _BlockOrder(plan, order, self.fetcher.parts)

    def _start(self, epoch: int, steps: range) -> tuple[Order, Iterator[Any]]:
        order = self._order(epoch)
        key = self.plan.key_of_samples(epoch)
        requests = (order.request(key, step) for step in steps)
        if self.fetcher.parts == 1:
            return order, self.fetcher.fetch(requests)
        return order, self._join(requests)

    def _join(self, requests: Iterable[_BatchInParts]) -> Iterator[Any]:
        """Yield batches, of which each loader process reads a part.

        Each has the same part of every batch, so that it reads other blocks than its siblings. The
        parts are written into memory of the batch, where this process collates them.
        """
        fetcher = self.fetcher
        memory = fetcher.batch_memory
        ahead: deque[tuple[_BatchInParts, Lease | None]] = deque()

        def of_parts() -> Iterator[_BlockRequest]:
            for request in requests:
                lease = memory.lease(sum(len(part.indices) for part in request.parts))
                ahead.append((request, lease))
                first = 0
                for part in request.parts:
                    place = None if lease is None else memory.place(lease, first)
                    yield replace(part, place=place)
                    first += len(part.indices)

        loaded = fetcher.fetch(of_parts(), are_batches=False, unpack=False)
        try:
            for packed in loaded:
                parts: list[PackedSamples] = [packed, *islice(loaded, fetcher.parts - 1)]
                if len(parts) < fetcher.parts:
                    return
                request, lease = ahead.popleft()
                sizes = {part.sizes_of_sample for part in parts if part.count}
                memory.learn(sizes.pop() if len(sizes) == 1 else ())
                array = None if lease is None else lease.array
                samples = [sample for part in parts for sample in part.samples(array)]
                in_place = None if lease is None else lease.collate()
                with preserve_generators():
                    data = fetcher.pinned(request.joined(fetcher.samples, samples, in_place))
                # From here on the batch alone keeps its memory.
                del parts, packed, lease, array, samples, in_place
                yield data
                del data
        finally:
            if ahead:
                memory.forget()

    def _compare_files(self) -> None:
        """Check that all workers read the same files, and the same samples of them.

        Raises:
            MismatchError: on every worker, if they differ.
        """
        with named("comparison of the files"):
            by_rank = self.plan.comm.allgather_object(self._dataset.order_settings())
        for rank, other in enumerate(by_rank):
            if other != by_rank[0]:
                raise MismatchError(
                    f"the data of ranks 0 and {rank} differ: {by_rank[0]} and {other}"
                )


class _BlockOrder(Order):
    """This worker's part of an epoch's order, step by step; see `Order`.

    Args:
        plan: of the batches.
        order: a `StreamOrder`.
        parts: number of parts into which this worker's part of a batch is divided, one for each
            loader process.
    """

    def __init__(self, plan: BatchPlan, order: Any, parts: int) -> None:
        self._plan = plan
        self._order = order
        self._parts = parts
        self._ahead: dict[int, torch.Tensor] = {}
        self._kept: tuple[int, int, int] | None = None
        self.steps = steps_per_epoch(order.samples, plan.global_batch_size)

    def global_size(self, step: int) -> int:
        """Return the size of the global batch."""
        size: int = self._order.batch_size(step)
        return size

    def samples(self, step: int, low: int, high: int) -> torch.Tensor:
        """Return the samples [low, high) of a global batch, int64."""
        return torch.from_numpy(self._order.part(step, low, high))

    @override
    def part(self, step: int) -> tuple[torch.Tensor, int]:
        size = self.global_size(step)
        indices = self._ahead.pop(step, None)
        if indices is None:
            # Each step is asked for twice: for its request, and when its batch is used.
            indices = self._ahead[step] = self.samples(step, *self._plan.local_range(size))
        return indices, size

    def request(self, key: int, step: int) -> _BatchInParts:
        """Return the request for this worker's part of a batch, with the blocks to keep where they
        change.
        """
        indices, size = self.part(step)
        low, high = self._plan.local_range(size)
        if low == high and not self._plan.virtual_workers:
            # As for other data sets: a sample, for the shapes, which is removed by `narrow`.
            rest = [_BlockRequest(key, [], []) for _ in range(self._parts - 1)]
            return _BatchInParts([_BlockRequest(key, [0], []), *rest], [0])
        cuts = self._order.cuts(step, low, high, self._parts)
        window = self._order.window(step), low, high
        keeps = [
            None if window == self._kept else self._order.blocks(step, *cut).tolist()
            for cut in cuts
        ]
        self._kept = window
        parts = [
            _BlockRequest(key, indices[start - low : stop - low].tolist(), keep)
            for (start, stop), keep in zip(cuts, keeps, strict=True)
        ]
        return _BatchInParts(parts, self._plan.by_shard(indices, size) or indices.tolist())
