"""Iterable data sets as a source of batches: they have their own order, and their length is known
when they end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

from ..errors import ConfigError
from ..parallel.nested import narrow
from ..parallel.randomness import preserve_generators
from ..parallel.shards import mix
from .batch_plan import BatchPlan, PartOfBatch
from .device_copies import to_device
from .iterable import PartPosition, ReadRequest, Substreams
from .iterable_batches import EpochOfStream, SamplesOfPart, StreamPosition, no_samples
from .source import Source

_log = logging.getLogger(__name__)


class IterableSource(Source):
    """An iterable data set, in one part or several.

    Args:
        dataset: the data set.
        plan: of the batches.

    Raises:
        ConfigError: if there are fewer samples in a global batch than workers, or than parts.
    """

    in_parts = True

    def __init__(self, dataset: Substreams, plan: BatchPlan) -> None:
        super().__init__(dataset, plan)
        self.most_processes = dataset.parts
        self._substreams = dataset
        self._position = StreamPosition()  # of the next batch
        self._steps: int | None = None  # of the epoch that was read last
        least = max(plan.comm.size, dataset.parts)
        if least > plan.global_batch_size:
            problem = (
                f"{dataset.parts} parts of the data set"
                if least == dataset.parts
                else f"{least} workers"
            )
            expected = f"at least one sample for each of {problem}"
            raise ConfigError("global_batch_size", expected, plan.global_batch_size)

    @property
    @override
    def steps(self) -> int | None:
        return self._steps

    def __len__(self) -> int:
        if self._steps is None:
            name = self._substreams.name
            raise TypeError(
                f"the number of steps in an epoch of {name} is not known before its end: it is "
                "iterable"
            )
        return self._steps

    @override
    def has_ended(self, step: int) -> bool:
        return self._position.ended

    @override
    def end_epoch(self, epoch: int, steps: int) -> None:
        if self._steps not in (None, steps) and self.plan.comm.rank == 0:
            _log.warning("epoch %d has %d steps, the one before had %d", epoch, steps, self._steps)
        self._steps = steps
        self._position = StreamPosition()

    @override
    def settings(self) -> Mapping[str, Any]:
        return {"parts": self._substreams.parts, "samples": self.samples}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"stream": self._position._asdict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        is_within = int(state["step"]) and "stream" in state
        self._position = StreamPosition(**state["stream"]) if is_within else StreamPosition()

    def order(self, epoch: int) -> torch.Tensor:
        """Refuse: the samples of an iterable data set have no indices.

        Raises:
            ConfigError: in any case.
        """
        raise ConfigError(
            "dataset",
            "a map-style data set, whose samples have indices",
            found=self._substreams.name,
        )

    def loop(self, epoch: int, first: int) -> tuple[int, int]:
        """Return the number of this reading of the epoch, which is a loop of its own, and 0."""
        return mix((epoch, self.plan.global_batch_size, first)) or 1, 0

    @override
    def batches(self, epoch: int, first: int) -> Iterator[PartOfBatch]:
        plan = self.plan
        key = plan.key_of_samples(epoch)
        start = self._position if first else StreamPosition()
        parts: deque[SamplesOfPart] = deque()

        def loaded() -> Iterator[Any]:
            for part in EpochOfStream(plan, self._substreams, self.fetcher, epoch, key, start):
                parts.append(part._replace(samples=[]))
                yield self._collated(key, part)

        for data in to_device(loaded(), plan.comm.device):
            part = parts.popleft()
            self._position = part.position
            step = part.position.step - 1
            indices = torch.arange(part.low, part.high) + step * plan.global_batch_size
            yield PartOfBatch(data, indices, part.high - part.low, part.global_size, step)

    def _collated(self, key: int, part: SamplesOfPart) -> Any:
        """Return this worker's part of a batch, or its shards, in the memory of the CPU."""
        first = (part.position.step - 1) * self.plan.global_batch_size

        def collated(low: int, high: int) -> Any:
            numbers = list(range(first + low, first + high))
            return self.fetcher.collated(
                key, part.samples[low - part.low : high - part.low], numbers
            )

        if self.plan.virtual_workers:
            ranges = self.plan.shard_ranges(part.global_size)
            return [collated(low, high) if low < high else None for low, high in ranges]
        if part.low < part.high:
            return collated(part.low, part.high)
        sample = part.samples[0] if part.samples else self._any_sample()
        return narrow(self.fetcher.collated(key, [sample], [first]), 0, 0, 1)

    def _any_sample(self) -> Any:
        """Return a sample, for the shapes.

        Raises:
            DataError: there is none.
        """
        reader = self._substreams.reader()
        with preserve_generators():
            for part in range(self._substreams.parts):
                (read,) = reader.read(ReadRequest(0, 0, 0, [(PartPosition(part, 0), 1)]))
                if read.samples:
                    return read.samples[0]
        raise no_samples(self._substreams.name, self.plan.role)

    @override
    def stand_in(self) -> Any:
        data = self.fetcher.collated(0, [self._any_sample()] * 2, [0, 0])
        return next(to_device([data], self.plan.comm.device))
