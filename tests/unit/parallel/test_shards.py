"""Every item belongs to exactly one part, whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.shards import (
    bounds,
    mix,
    sizes,
    step_range,
    steps_per_epoch,
)


@given(n=st.integers(0, 500), parts=st.integers(1, 40))
def test_parts_cover_everything_once_and_evenly(n: int, parts: int) -> None:
    covered = [item for part in range(parts) for item in range(*bounds(n, parts, part))]
    assert covered == list(range(n))
    assert max(sizes(n, parts)) - min(sizes(n, parts)) <= 1
    assert sizes(n, parts) == sorted(sizes(n, parts), reverse=True)


def test_lower_parts_take_the_remainder() -> None:
    assert sizes(17, 2) == [9, 8]
    assert sizes(2, 4) == [1, 1, 0, 0]


@given(samples=st.integers(1, 300), batch=st.integers(1, 80), drop=st.booleans())
def test_steps_of_an_epoch(samples: int, batch: int, drop: bool) -> None:
    ranges = [
        step_range(samples, batch, step) for step in range(steps_per_epoch(samples, batch, drop))
    ]
    covered = [item for start, stop in ranges for item in range(start, stop)]
    assert covered == list(range(samples // batch * batch if drop else samples))


@pytest.mark.parametrize(("n", "parts", "part"), [(5, 0, 0), (5, 2, 2), (5, 2, -1), (-1, 2, 0)])
def test_impossible_parts_are_refused(n: int, parts: int, part: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        bounds(n, parts, part)


def test_keys_of_neighbours_are_unrelated() -> None:
    keys = [
        mix((seed, purpose, step)) & 0xFFFFFFFF
        for seed in range(8)
        for purpose in range(4)
        for step in range(64)
    ]
    assert len(set(keys)) == len(keys)
    changed = [(mix((0, step)) ^ mix((0, step + 1))).bit_count() for step in range(200)]
    assert 28 < sum(changed) / len(changed) < 36  # of 64 bits


def test_order_of_values_matters() -> None:
    assert mix((1, 2)) != mix((2, 1)) != mix((0, 2, 1))
