"""Digests of samples for a comparison among workers: read as a training reads them, without a trace
of it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from ..parallel.randomness import preserve_generators
from .between_processes import copies_of
from .collate_check import MAX_SAMPLES, describe_collate
from .digest import Digest, digest_of
from .fetching import Samples
from .sample_draws import seed_collate, seed_draws


@dataclass(frozen=True, slots=True)
class SampleDigests:
    """What a `DigestRequest` has found.

    Attributes:
        samples: the digests of each sample, one for each time that it was read; none of one that
            raised an exception.
        seconds: how long it took.
        typical_s: the median time of reading a sample; infinite if none was read.
        collated: how batches depend on their division, see `lockstep.data.collate_check`; "" if
            they do not.
    """

    samples: dict[int, list[Digest]]
    seconds: float
    typical_s: float = 0.0
    collated: str = ""


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Asks for the digests of samples.

    Attributes:
        key: key of the epoch's random draws.
        indices: the samples.
        times: number of times that each of them is read.
        budget_s: seconds after which no further one is read.
        collates: whether to find out as well what the collate function makes of the division of a
            batch.
    """

    key: int
    indices: tuple[int, ...]
    times: tuple[int, ...]
    budget_s: float
    collates: bool = False

    gives_samples: ClassVar[bool] = False

    def load(self, samples: Samples) -> SampleDigests:
        """Read samples as for a batch, and leave no trace of it in random generators or the blocks
        that are kept.
        """
        dataset = samples.dataset
        source = dataset.reader() if hasattr(dataset, "reader") else dataset
        kept: dict[int, Any] = {}  # samples to collate

        def read(index: int) -> Any:
            seed_draws(self.key, index)
            sample = samples.in_any_form(source, index)
            if self.collates and len(kept) < MAX_SAMPLES:
                kept[index] = sample
            return sample

        with preserve_generators(), preserve_own_generators((dataset, samples.collate)):
            digests = self.read_with(read)
            if not self.collates:
                return digests
            seed = partial(seed_collate, self.key)
            collated = describe_collate(samples.collate, list(kept.values()), copies_of, seed)
            return replace(digests, collated=collated)

    def read_with(self, read: Callable[[int], Any]) -> SampleDigests:
        """Read samples with `read`; an exception is left to the training, which may not need the
        sample.
        """
        began = time.monotonic()
        digests_by_sample: dict[int, list[Digest]] = {}
        each_s: list[float] = []
        for index, times in zip(self.indices, self.times, strict=True):
            digests: list[Digest] = []
            for number in range(times):
                if (digests_by_sample or number) and time.monotonic() - began > self.budget_s:
                    break
                start = time.monotonic()
                try:
                    digests.append(digest_of(read(index)))
                except Exception:  # of the data set
                    digests = []
                    break
                finally:
                    each_s.append(time.monotonic() - start)
            digests_by_sample[index] = digests
            if time.monotonic() - began > self.budget_s:
                break
        return SampleDigests(
            digests_by_sample,
            time.monotonic() - began,
            statistics.median(each_s) if each_s else math.inf,
        )


@contextmanager
def preserve_own_generators(dataset: Any) -> Iterator[None]:
    """Restore the random generators that a data set has as attributes, or its parts have, after a
    `with` block.
    """
    restore = [save() for save in _savers(dataset)]
    try:
        yield
    finally:
        for call in restore:
            call()


# A generator is looked for in what a data set refers to: in so many objects, and of a container in
# so many items, as a list of all samples would take long.
_MAX_OBJECTS = 2000
_MAX_ITEMS = 64


def _savers(dataset: Any) -> Iterator[Callable[[], Callable[[], None]]]:
    """Yield for each random generator within a data set a function that saves its state and returns
    one to restore.
    """
    seen: set[int] = set()
    pending = [dataset]
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in seen or isinstance(
            value, (str, bytes, int, float, torch.Tensor, np.ndarray, type)
        ):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Generator, np.random.RandomState)):
            yield _saver(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            yield _saver(
                lambda bits=bits: bits.state,  # type: ignore[misc]
                lambda state, bits=bits: setattr(bits, "state", state),  # type: ignore[misc]
            )
        elif type(value) is random.Random:
            yield _saver(value.getstate, value.setstate)
        elif isinstance(value, Mapping):
            pending += [item for _, item in zip(range(_MAX_ITEMS), _values(value), strict=False)]
        elif isinstance(value, (list, tuple)):
            pending += value[:_MAX_ITEMS]
        else:
            pending += list(getattr(value, "__dict__", {}).values())


def _values(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    # only of a plain dict: another mapping may read a file for each value
    return iter(mapping.values() if isinstance(mapping, dict) else ())


def _saver(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], Callable[[], None]]:
    def save() -> Callable[[], None]:
        state = get()
        return lambda: put(state)

    return save
