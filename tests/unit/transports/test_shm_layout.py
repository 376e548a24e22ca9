"""How the shared memory of a group is divided: nothing overlaps, nothing lies outside, and it is
never too small.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.transports.shm import memory_layout as layouts
from lockstep.transports.shm.memory_layout import (
    BLOCK,
    HEADER,
    LINE,
    RING,
    Layout,
    default_size,
    plan,
)

MOST_RANKS = 128
WIDEST = 16  # bytes of a complex128, the widest element


def least(ranks: int) -> int:
    """The least size for `ranks`, as the error names it."""
    with pytest.raises(ConfigError) as caught:
        plan(ranks, 0)
    return int(caught.value.expected.split()[2])


def regions(layout: Layout) -> list[tuple[int, int]]:
    """Begin and end of everything that is written to, in bytes."""
    ranks = range(layout.ranks)
    found = [(layout.control(rank), layout.control(rank) + BLOCK) for rank in ranks]
    for source in ranks:
        for target in ranks:
            begin = layout.ring(source, target)
            found.append((begin, begin + 2 * LINE + RING * (HEADER + layout.fragment)))
    for half in (0, 1):
        for slot in range(layout.ranks + 1):
            begin = layout.slot(half, slot)
            found.append((begin, begin + layout.chunk))
    return sorted(found)


def assert_sound(layout: Layout, size: int) -> None:
    found = regions(layout)
    assert found[0][0] >= 0
    assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
    assert found[-1][1] <= layout.total <= size
    # counters are aligned words, payloads begin where any dtype may, and no two ranks write into
    # one line
    assert all(begin % LINE == 0 for begin, _ in found)
    assert layout.fragment % LINE == 0
    assert layout.halves % layouts.PAGE == layout.chunk % layouts.PAGE == 0


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int]:
    ranks = draw(st.integers(1, MOST_RANKS))
    extra = draw(
        st.one_of(st.integers(0, 1 << 16), st.integers(0, 1 << 22), st.integers(0, 1 << 31))
    )
    return ranks, least(ranks) + extra


@settings(max_examples=60, deadline=None)
@given(requests())
def test_nothing_overlaps_or_lies_outside(request: tuple[int, int]) -> None:
    ranks, size = request
    assert_sound(plan(ranks, size), size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 62, 63, 64, 65, 127, MOST_RANKS])
def test_the_least_size_that_the_error_names_is_enough_and_no_less_is(ranks: int) -> None:
    size = least(ranks)
    assert_sound(plan(ranks, size), size)
    with pytest.raises(
        ConfigError, match=f"at least {size} bytes for {ranks} ranks.*LOCKSTEP_SHM_SIZE"
    ):
        plan(ranks, size - 1)


@pytest.mark.parametrize("ranks", [1, 2, 63, 64, MOST_RANKS, 512])
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_a_slot_holds_something_for_every_rank(ranks: int, more: int) -> None:
    """An all-to-all puts a header and a line for each rank into a slot, a reduce-scatter a line for
    each rank.
    """
    chunk = plan(ranks, least(ranks) + more).chunk
    assert (chunk - HEADER) // ranks >= HEADER
    assert chunk // ranks >= 64 >= WIDEST


@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
def test_the_default_is_enough(ranks: int) -> None:
    size = default_size(ranks)
    layout = plan(ranks, size)
    assert size >= 64 << 20
    assert layout.total <= size
    assert layout.chunk >= 64 << 10, "large tensors would go in small pieces"


def test_small_groups_get_chunks_of_the_best_size() -> None:
    for ranks in (2, 4, 8):
        assert plan(ranks, default_size(ranks)).chunk == layouts.MAX_CHUNK
