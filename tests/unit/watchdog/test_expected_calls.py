"""Which call starts beside its pre-flight check: the one that has followed the last two before, on
all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.watchdog.preflight import ExpectedCalls

CALLS = st.lists(st.integers(1, 4), max_size=60)


def noted(calls: Sequence[int], expected: ExpectedCalls | None = None) -> list[bool]:
    expected = expected or ExpectedCalls()
    return [expected.note(call) for call in calls]


@pytest.mark.parametrize("turn", [[1], [1, 2], [1, 2, 3, 4], [1, 1, 2], [5, 1, 5, 2]])
def test_the_calls_of_a_loop_are_expected(turn: list[int]) -> None:
    """From its second turn on, but for the two calls behind the one before the loop."""
    found = noted([9, *turn * 10])
    assert all(found[len(turn) + 3 :]), found


def test_what_comes_once_in_a_while_does_not_change_what_is_expected() -> None:
    """At the end of an epoch another call comes, and the loop goes on."""
    expected = ExpectedCalls()
    epochs = [noted([*[1] * 20, 7], expected) for _ in range(5)]
    assert [found.count(False) for found in epochs] == [4, 3, 1, 1, 1]


@pytest.mark.parametrize("turn", [[1, 3], [1, 1, 2]])
def test_another_loop_is_learnt_however_long_the_first_one_was(turn: list[int]) -> None:
    expected = ExpectedCalls()
    noted([1] * 1000, expected)
    assert noted(turn * 20, expected).count(False) < 8


def test_what_is_known_is_bounded() -> None:
    expected = ExpectedCalls()
    noted(range(1, 20_000), expected)
    assert len(expected._next) <= 4096
    assert all(noted([1] * 10, expected)[4:])


@given(CALLS, st.integers(1, 4), st.integers(1, 4))
def test_ranks_that_have_called_the_same_expect_one_call_and_the_same(
    calls: list[int], one: int, other: int
) -> None:
    """So two ranks that part here cannot both have started their calls."""
    first, second = ExpectedCalls(), ExpectedCalls()
    assert noted(calls, first) == noted(calls, second)
    if first.note(one) and second.note(other):
        assert one == other
