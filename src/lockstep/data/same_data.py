"""Whether all ranks have the same data set: its length and some of its samples are compared at
every epoch.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..errors import MismatchError
from ..flight_recorder import named
from ..parallel.shards import mix
from .differences import Difference, differences
from .digest import Digest
from .sample_digests import DigestRequest, SampleDigests

if TYPE_CHECKING:
    from ..communicator import Communicator

_log = logging.getLogger(__name__)

_PLACES = 32  # samples that are compared at first
_PLACES_LATER = 6  # at each later epoch, others each time
_IN_BLOCKS = 4  # of a data set in blocks, each of which may be a block that is read for it
_BUDGET_S = 0.5  # after which no further sample is read
# the time for a later comparison, and its share of the time since the last one
_LATER_S = 0.001
_LATER_SHARE = 0.005
# samples that are read twice in any case, to find out whether they are random by themselves
_READ_TWICE = 4
# readings of a sample that differs among ranks, and the time for all of them
_AGAIN = 8
_AGAIN_BUDGET_S = 2.0
_FEW = 4  # of fewer samples than this, it is said that they were all
_SHOWN_AS_DIFFERENT = 4  # samples that are read again
_PLACE = 5  # part of the key of the places


def places(length: int, count: int, number: int = 0) -> tuple[int, ...]:
    """Return which samples of a data set are compared.

    Args:
        length: samples in the data set.
        count: of how many to compare.
        number: that of the comparison. In the first, the first and the last sample are among them;
            in another one they are others.
    """
    if count >= length:
        return tuple(range(length))
    chosen = dict.fromkeys((0, length - 1)[:count] if number == 0 else ())
    draw = 0
    while len(chosen) < count:
        key = (_PLACE, length, draw) if number == 0 else (_PLACE, length, draw, number)
        chosen[mix(key) % length] = None
        draw += 1
    return tuple(chosen)


def digests_of_some(
    read: Callable[[DigestRequest], SampleDigests], length: int, in_blocks: bool = False
) -> dict[int, str]:
    """Return digests of samples at fixed places, to be compared with those of another run.

    Args:
        read: reads samples where the training reads them.
        length: samples in the data set.
        in_blocks: whether a sample may cost a block of samples.
    """
    chosen = places(length, _IN_BLOCKS if in_blocks else _PLACES)
    samples = read(DigestRequest(0, chosen, (1,) * len(chosen), _BUDGET_S)).samples
    digests = {}
    for index, (digest, *_) in (
        (index, readings) for index, readings in samples.items() if readings
    ):
        leaves = [
            (path, leaf.kind, leaf.bits) for path, leaf in digest.items() if not leaf.of_object
        ]
        digests[index] = (
            f"{mix([zlib.crc32(repr(leaf).encode(errors='replace')) for leaf in leaves]):016x}"
        )
    return digests


class SameData:
    """Compares the data sets of the ranks of a communicator, at the beginning of each epoch.

    The first comparison reads many samples. What a data set has may change later, by a program that
    draws anew between epochs, or with what each rank has read of it until then: so each later epoch
    reads a few others. They are read with the random draws of the epoch, as the training reads
    them. A data set that keeps what it has drawn for a sample at first differs then from one that
    has not read that sample yet.

    A sample that is another one when it is read again is random by itself: rank 0 says so, and what
    is random in it is not compared. What differs by rounding only is said, and what may differ, see
    `differences`.

    Args:
        comm: of the ranks; with a process group.
        what: the data set, for messages.
        read: reads samples where the training reads them.
        in_blocks: whether a sample may cost a block of samples.
        collates: whether a collate function makes batches of parts whose number depends on that of
            the ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        subject: str,
        read: Callable[[DigestRequest], SampleDigests],
        in_blocks: bool = False,
        collates: bool = False,
    ) -> None:
        self._comm = comm
        self._what = subject
        self._read = read
        self._in_blocks = in_blocks
        self._collates = collates
        self._number = 0
        # leaves that are random by themselves, and those of which it is said once
        self._passed_over: set[str] = set()
        self._rounding_is_said = False
        # The time that later comparisons may take by now, that of a sample, and that of a request
        # beside it, such as to a loader process: the same on all ranks, so that they read the same
        # samples.
        self._credit_s = 0.0
        self._sample_s = math.inf
        self._request_s = math.inf
        self._ended_at = 0.0

    def check(self, settings: Mapping[str, Any], length: int, key: int) -> None:
        """Compare; called by every rank.

        Args:
            settings: what must be the same as well, by name.
            length: samples in this rank's data set.
            key: key of the epoch's random draws.

        Raises:
            MismatchError: on every rank, if the data sets differ; says how, and on which ranks.
        """
        since_s = time.monotonic() - self._ended_at if self._number else 0.0
        chosen, request = self._request(length, key)
        activity = (
            Activity(f"lockstep: comparing {self._what} of the workers")
            if not self._number
            else nullcontext()
        )
        with activity:
            began = time.monotonic()
            own_digests = self._read(request) if chosen else SampleDigests({}, 0.0, math.inf)
            request_s = time.monotonic() - began - own_digests.seconds if chosen else math.inf
            hint = _HINT_LATER if self._number else _HINT_SAMPLES
            comparison = _Comparison(self._comm, self._what, own_digests, self._passed_over, hint)
            with named("comparison of the data"):
                times = own_digests.typical_s, request_s, since_s
                heads = self._comm.allgather_object(
                    (length, dict(settings), comparison.total, times)
                )
            self._check_heads([head[:2] for head in heads])
            if len({head[2] for head in heads}) > 1:
                comparison.compare(key, self._read)
        self._passed_over = comparison.passed_over
        self._say(comparison, own_digests, len(chosen))
        self._account([head[3] for head in heads])
        self._number += 1
        self._ended_at = time.monotonic()

    def _account(self, times: Sequence[tuple[float, float, float]]) -> None:
        """Work out the time for the next comparison from what each rank has measured."""
        samples, requests, since = zip(*times, strict=True)
        # the least that was measured: a loaded host may take its time over a few
        self._sample_s = min(self._sample_s, max(samples))
        self._request_s = min(self._request_s, max(requests))
        # how long an epoch takes is not known yet in the second one: then all are read for which
        # the budget is enough
        self._credit_s += max(_LATER_S, _LATER_SHARE * min(since)) if self._number else math.inf

    def _affordable(self, most: int) -> int:
        """Return how many samples are read now, and take their time from what comparisons may
        take.
        """
        self._credit_s = min(self._credit_s, self._request_s + most * self._sample_s)
        count = most
        while count and self._request_s + count * self._sample_s > self._credit_s:
            count -= 1
        self._credit_s -= self._request_s + count * self._sample_s if count else 0.0
        return count

    def _request(self, length: int, key: int) -> tuple[tuple[int, ...], DigestRequest]:
        """Return the samples to compare, and the request for them."""
        collates = self._collates and self._number & (self._number - 1) == 0
        most = _IN_BLOCKS if self._in_blocks else _PLACES
        if self._number == 0:
            chosen = places(length, most)
            times = tuple(
                2 if number < _READ_TWICE and not self._in_blocks else 1
                for number in range(len(chosen))
            )
            return chosen, DigestRequest(key, chosen, times, _BUDGET_S, collates)
        chosen = places(length, self._affordable(min(most, _PLACES_LATER)), self._number)
        return chosen, DigestRequest(key, chosen, (1,) * len(chosen), _BUDGET_S, collates)

    def _check_heads(self, heads: Sequence[tuple[int, dict[str, Any]]]) -> None:
        length, settings = heads[0]
        for rank, (theirs, _) in enumerate(heads):
            if theirs != length:
                lengths = f"rank 0 has {length} samples, rank {rank} has {theirs}"
                raise MismatchError(
                    f"{self._what} differs among the workers: {lengths}. {_HINT_LENGTH}"
                )
        for rank, (_, others) in enumerate(heads):
            for name, value in settings.items():
                if others.get(name) != value:
                    raise MismatchError(
                        f"{name} of the loader of {self._what} is {value!r} on rank 0 and "
                        f"{others.get(name)!r} on rank {rank}: all workers need the same one, as "
                        "they divide each global batch"
                    )

    def _say(self, comparison: _Comparison, own_digests: SampleDigests, chosen: int) -> None:
        """Log on rank 0 what is no error."""
        if self._comm.rank != 0:
            return
        comparison.say()
        if comparison.rounded is not None and not self._rounding_is_said:
            self._rounding_is_said = True
            index, rank = comparison.rounded
            _say_once(
                f"{self._what}: sample {index} on rank {rank} differs from that of rank 0 by "
                "rounding, as other processors or versions of libraries cause it."
            )
        if own_digests.collated:
            _say_once(f"{self._what}: {own_digests.collated}")
        if self._number == 0 and len(own_digests.samples) < min(_FEW, chosen):
            _log.warning(
                "%s: only %d of %d samples were compared among the workers, because reading them "
                "took %.1f s",
                *(self._what, len(own_digests.samples), chosen, own_digests.seconds),
            )


_HINT_LENGTH = (
    "Each worker makes the whole data set, and Lockstep divides each global batch: leave out what "
    "divides it by rank, give what splits or shuffles it a seed, and sort what lists files"
)
_HINT_SAMPLES = (
    "The data set must be the same on every worker: give what splits, shuffles or draws it a "
    "seed, and sort what lists files"
)
_HINT_LATER = (
    "The data set must be the same on every worker, at every epoch: draw what changes between "
    "epochs with a seed that is made of the epoch, and keep no random draw of a sample, as a "
    "worker keeps those of its own samples only"
)


class _Comparison:
    """Compares the digests of the samples that each rank has read.

    Args:
        comm: of the ranks.
        what: the data set, for messages.
        own: what this rank has read.
        passed_over: leaves that are not compared.
        hint: what to do about other samples.

    Attributes:
        passed_over: these, and those that are random by themselves, or differ and may.
        rounded: a sample that differs by rounding, and the rank; None if none does.
    """

    def __init__(
        self,
        comm: Communicator,
        subject: str,
        own_digests: SampleDigests,
        passed_over: set[str],
        hint: str,
    ) -> None:
        self._comm = comm
        self._what = subject
        self._hint = hint
        self._own = {index: digests[0] for index, digests in own_digests.samples.items() if digests}
        self._random = _random_leaves(own_digests.samples, self._own) - passed_over
        # (sample, rank, difference) by leaf
        self._allowed: dict[str, tuple[int, int, Difference]] = {}
        self.passed_over = passed_over | self._random
        self.rounded: tuple[int, int] | None = None

    @property
    def total(self) -> int:
        """A digest of all that is compared."""
        texts = [
            repr((index, path, leaf.kind, leaf.bits))
            for index, digest in self._own.items()
            for path, leaf in digest.items()
            if path not in self.passed_over
        ]
        return mix(zlib.crc32(text.encode(errors="replace")) for text in texts)

    def compare(self, key: int, read: Callable[[DigestRequest], SampleDigests]) -> None:
        """Find out what differs, and whether that is random by itself.

        Raises:
            MismatchError: on every rank, if samples differ.
        """
        differing = self._differing()
        if not differing:
            return
        chosen = _covering(differing)
        again = read(DigestRequest(key, chosen, (_AGAIN,) * len(chosen), _AGAIN_BUDGET_S))
        self._pass_over_random(_random_leaves(again.samples, self._own))
        differing = [entry for entry in self._differing() if entry[0] in chosen]
        for index, rank, difference in differing:
            if difference.is_refused:
                raise self._mismatch(index, rank, difference)
        for index, rank, difference in differing:
            self._allowed.setdefault(difference.path, (index, rank, difference))
        self.passed_over |= self._allowed.keys()

    def _mismatch(self, index: int, rank: int, difference: Difference) -> MismatchError:
        where = f", in its element {difference.path}," if difference.path else ""
        values = " ({} and {})".format(*difference.values) if difference.of_single_values else ""
        problem = f"{self._what}: sample {index} differs{where} on ranks 0 and {rank}{values}"
        return MismatchError(f"{problem}. {self._hint}")

    def _pass_over_random(self, paths: set[str]) -> None:
        self._random |= paths - self.passed_over
        self.passed_over |= paths

    def _differing(self) -> list[tuple[int, int, Difference]]:
        """Return (sample, rank, difference) of what differs from rank 0, on every rank the same."""
        with named("comparison of the samples"):
            gathered = self._comm.allgather_object((self._own, self._random))
        for _, random_there in gathered:
            self._pass_over_random(random_there)
        first = gathered[0][0]
        differing = []
        for rank, (theirs, _) in enumerate(gathered):
            for index in first.keys() & theirs.keys():
                for difference in differences(first[index], theirs[index], self.passed_over):
                    if difference.only_rounded:
                        self.rounded = self.rounded or (index, rank)
                    else:
                        differing.append((index, rank, difference))
        return sorted(differing, key=lambda entry: (not entry[2].is_refused, entry[1], entry[0]))

    def say(self) -> None:
        """Log what is random by itself, and what differs and may."""
        if self._random:
            shown = ", ".join(sorted(path for path in self._random if path)[:3])
            places = f" ({shown})" if shown else ""
            _say_once(
                f"{self._what}: samples are random by themselves{places}: read "
                "again with the same seeds, they are others. They are not compared among the "
                "workers, and depend on which worker reads them. Draw from the global generators "
                "of torch, Python or NumPy, which are seeded for each sample."
            )
        for index, rank, difference in self._allowed.values():
            say_difference(self._what, index, 0, rank, difference)


def say_difference(
    subject: str, index: int, rank: int, other_rank: int, difference: Difference
) -> None:
    """Log a difference between two ranks that may be none of the data."""
    kind = (
        "the path of a file"
        if difference.one is not None and difference.one.is_path
        else "an attribute"
    )
    first, second = difference.values
    place = (subject, difference.path)
    if place not in _said:
        _said.add(place)
        _log.warning(
            "%s: sample %d has in %s %s that differs: %s on rank %d, %s on rank %d. That is no "
            "error where the training does not use it; else results depend on which worker reads "
            "a sample",
            *(subject, index, difference.path or "itself", kind, first, rank, second, other_rank),
        )


_said: set[Any] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


def _random_leaves(
    samples: Mapping[int, Sequence[Digest]], first: Mapping[int, Digest]
) -> set[str]:
    """Return the leaves that differ when a sample is read again."""
    paths: set[str] = set()
    for index, digests in samples.items():
        if index in first:
            for digest in digests:
                again = differences(first[index], digest)
                # a clock moves on by less than the rounding of its value
                paths |= {
                    difference.path
                    for difference in again
                    if not difference.only_rounded or difference.of_single_values
                }
    return paths


def _covering(differing: Sequence[tuple[int, int, Difference]]) -> tuple[int, ...]:
    """Return a few samples among those that differ, if possible one for each leaf that differs."""
    by_leaf: dict[str, int] = {}
    for index, _, difference in differing:
        by_leaf.setdefault(difference.path, index)
    indices = dict.fromkeys([*by_leaf.values(), *(index for index, *_ in differing)])
    return tuple(indices)[:_SHOWN_AS_DIFFERENT]
