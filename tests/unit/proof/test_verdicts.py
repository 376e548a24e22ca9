"""Who is wrong, from the checksums that workers have of one gradient, or of their weights."""

from __future__ import annotations

from itertools import product

import pytest

from lockstep.proof.verdicts import Answers, Fault, judge_pass, judge_weights

RIGHT, WRONG, OTHER = [1, 2, 3], [1, 9, 3], [1, 2, 8]
# the owner is rank 4, the checker rank 5, the third rank 6
CASES = [
    # (owner's two answers, the checker's two), the third's → faults
    ((WRONG, RIGHT), (RIGHT, RIGHT), None, [Fault((4,), False, 1)]),
    ((RIGHT, RIGHT), (WRONG, RIGHT), None, [Fault((5,), False, 1)]),
    ((WRONG, RIGHT), (RIGHT, RIGHT), RIGHT, [Fault((4,), False, 1)]),
    ((WRONG, WRONG), (RIGHT, RIGHT), RIGHT, [Fault((4,), True, 1)]),
    ((WRONG, OTHER), (RIGHT, RIGHT), RIGHT, [Fault((4,), True, 1)]),
    ((RIGHT, RIGHT), (OTHER, OTHER), RIGHT, [Fault((5,), True, 2)]),
    # two workers, each of which stays with what it has: nobody knows
    ((WRONG, WRONG), (RIGHT, RIGHT), None, [Fault((4, 5), True, 1)]),
    # who contradicts himself
    ((WRONG, OTHER), (RIGHT, RIGHT), None, [Fault((4,), True, 1)]),
    ((RIGHT, RIGHT), (OTHER, WRONG), None, [Fault((5,), True, 2)]),
    # both do
    ((WRONG, OTHER), (RIGHT, [0, 0, 0]), None, [Fault((4, 5), True, 1)]),
    # the third one is wrong, which is not the reason why it was asked
    ((WRONG, RIGHT), (RIGHT, RIGHT), OTHER, [Fault((4,), False, 1), Fault((6,), False, 2)]),
    # three that differ
    ((WRONG, WRONG), (RIGHT, RIGHT), OTHER, [Fault((4, 5), True, 1)]),
]


@pytest.mark.parametrize(("owner", "checker", "third", "faults"), CASES)
def test_passes(
    owner: tuple[list[int], ...], checker: tuple[list[int], ...], third: object, faults: object
) -> None:
    one_more = None if third is None else Answers(6, [third])  # type: ignore[list-item]
    assert judge_pass(Answers(4, owner), Answers(5, checker), one_more) == faults


def test_whoever_is_right_all_the_time_is_never_named_alone() -> None:
    """Whatever a single faulty worker answers: the others, who agree, are not named, unless as one of two."""
    answers = ([1], [2], [3])
    for first, second in product(answers, repeat=2):
        if first != [1]:
            for third in (None, Answers(6, [[1]])):
                for fault in judge_pass(Answers(4, [first, second]), Answers(5, [[1], [1]]), third):
                    assert fault.ranks in ((4,), (4, 5))
                    assert third is None or fault.ranks == (4,)


@pytest.mark.parametrize(
    ("now", "after", "faults"),
    [
        ([7, 8, 7], [None, None, None], [Fault((1,), False, 1)]),
        ([7, 8, 7, 9], [None] * 4, [Fault((0, 1, 2, 3), True, 1)]),
        ([7, 7, 7, 9], [None] * 4, [Fault((3,), False, 1)]),
        ([7, 8], [7, 7], [Fault((1,), False, 1)]),
        ([8, 7], [7, 7], [Fault((0,), False, 1)]),
        ([7, 8], [7, 8], [Fault((0, 1), True, 1)]),  # an update has gone wrong
        ([7, 8], [6, 6], [Fault((0, 1), True, 1)]),  # both have changed
        ([7, 8, 8, 7], [7, 7, 7, 7], [Fault((1,), False, 1), Fault((2,), False, 1)]),
    ],
)
def test_weights(now: list[int], after: list[int | None], faults: list[Fault]) -> None:
    assert judge_weights(now, after, [[5, value] for value in now]) == faults
