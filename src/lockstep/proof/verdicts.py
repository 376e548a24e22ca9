"""Who computed wrong numbers: what follows from the checksums that workers have of the same
gradient or weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Digests = Sequence[int | None]
"""The checksum of each parameter's gradient or values, in the order of the model; None for one
without a gradient.
"""


@dataclass(frozen=True)
class Fault:
    """A worker that has computed wrong numbers, or two of which nothing says who has.

    Attributes:
        ranks: the worker's rank; of two, where it cannot be known which.
        is_persistent: whether it was wrong again when it computed the same once more, or where that
            cannot be known.
        place: the number of the first parameter that differs, in the order of the model.
    """

    ranks: tuple[int, ...]
    is_persistent: bool
    place: int


@dataclass(frozen=True)
class Answers:
    """The digests that a worker has computed of the gradient of one virtual worker's pass, in
    order.

    Attributes:
        rank: the worker.
        digests: one entry for each time that it has computed them, at least one.
    """

    rank: int
    digests: Sequence[Digests]


def judge_pass(owner: Answers, checker: Answers, third: Answers | None = None) -> list[Fault]:
    """Return who has computed a pass wrong, after two workers have computed it twice and did not
    agree at first.

    What two workers have computed alike is right, whatever one of them has computed besides. Where
    no two agree, who contradicts himself is wrong.

    Args:
        owner: the worker whose pass it is, and whose first gradient is in the step's sum.
        checker: the one that has repeated it.
        third: another one that has computed it afterwards, once; None with two workers.

    Returns:
        One fault for each worker that was wrong; or a single one of two workers, if it cannot be
        known.
    """
    everyone = [owner, checker] if third is None else [owner, checker, third]
    ranks_by_digests: dict[tuple[Any, ...], set[int]] = {}
    for answers in everyone:
        for digests in answers.digests:
            ranks_by_digests.setdefault(tuple(digests), set()).add(answers.rank)
    right, agreeing = max(ranks_by_digests.items(), key=lambda item: len(item[1]))
    if len(agreeing) > 1:
        wrong = [
            answers
            for answers in everyone
            if any(tuple(digests) != right for digests in answers.digests)
        ]
        return [_fault(answers, right) for answers in wrong]
    place = _first_difference(owner.digests[0], checker.digests[0])
    contradicting = [
        answers for answers in (owner, checker) if len({tuple(d) for d in answers.digests}) > 1
    ]
    if len(contradicting) == 1:
        return [Fault((contradicting[0].rank,), True, place)]
    return [Fault((owner.rank, checker.rank), True, place)]


def _fault(answers: Answers, right: Digests) -> Fault:
    wrong = [digests for digests in answers.digests if tuple(digests) != tuple(right)]
    is_persistent = len(answers.digests) > 1 and len(wrong) == len(answers.digests)
    return Fault((answers.rank,), is_persistent, _first_difference(wrong[0], right))


def judge_weights(
    now: Sequence[int], after_update: Sequence[int | None], parts: Sequence[Digests]
) -> list[Fault]:
    """Return whose weights are wrong, where those of the workers differ before an update.

    Those of the majority are right. Without one, those that have not changed since the last update
    are, if all workers whose weights have not changed have the same.

    Args:
        now: the checksum of each worker's weights, by rank.
        after_update: the one after its last update, by rank; None where it was not computed.
        parts: those of its parameters now, by rank.

    Returns:
        One fault for each worker whose weights are wrong; or a single one of all workers, if it
        cannot be known.
    """
    right, number = Counter(now).most_common(1)[0]
    if 2 * number <= len(now):
        unchanged = {
            value for value, before in zip(now, after_update, strict=True) if value == before
        }
        if len(unchanged) != 1:
            other = next(rank for rank, value in enumerate(now) if value != now[0])
            return [Fault(tuple(range(len(now))), True, _first_difference(parts[0], parts[other]))]
        (right,) = unchanged
    of_right = parts[now.index(right)]
    return [
        Fault((rank,), False, _first_difference(parts[rank], of_right))
        for rank, value in enumerate(now)
        if value != right
    ]


def _first_difference(some: Digests, others: Digests) -> int:
    """Return the number of the first parameter of which the digests differ."""
    return next(
        number for number, (one, other) in enumerate(zip(some, others, strict=True)) if one != other
    )
