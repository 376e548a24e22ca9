"""Digests of samples for a comparison among workers: read as a training reads them, without a trace
of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from ..parallel.randomness import preserve_generators
from .between_processes import copies_of
from .collate_check import MAX_SAMPLES, describe_collate
from .digest import Digest, digest_of
from .fetching import Request, Samples
from .sample_draws import preserve_own_generators, seed_collate, seed_draws


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
class DigestRequest(Request):
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

    @override
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
