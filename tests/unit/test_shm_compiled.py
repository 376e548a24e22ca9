"""The compiled part's own checks: numbers that would lead outside the memory, or to nowhere, are refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.transports.shm import signs, state
from lockstep.transports.shm.layout import Layout, plan
from lockstep.transports.shm.segment import share

LAYOUT = plan(2, 1 << 20)
DATA = torch.zeros(64)
ONE = (DATA.data_ptr(), 16)
TWO = (*ONE, DATA.data_ptr() + 16, 16)

pytestmark = pytest.mark.skipif(state._native is None, reason="installed without the compiled part")


@pytest.fixture
def place() -> Iterator[SimpleNamespace]:
    """`native`: rank 0 of two, of which rank 1 never comes."""
    made = SimpleNamespace(native=state.make_state(share(dist.HashStore(), 0, 1, LAYOUT.total), LAYOUT, 0))
    yield made
    vars(made).clear()  # pytest keeps the object, and nothing shall keep the memory


@pytest.mark.parametrize(
    "arguments",
    [
        (len(signs.KINDS), 0, 0, -1, ONE, ONE),
        (-1, 0, 0, -1, ONE, ONE),
        (signs.BROADCAST, 2, 0, -1, ONE, ONE),
        (signs.BROADCAST, -1, 0, -1, ONE, ONE),
        (signs.ALL_REDUCE, 0, 4, -1, ONE, ONE),
        (signs.BROADCAST, 0, 64, -1, ONE, ONE),
        (signs.ALL_GATHER, 0, 0, -1, ONE, (*TWO, *ONE)),
        (signs.ALL_GATHER, 0, 0, -1, ONE, (DATA.data_ptr(), 15)),
        (signs.ALL_TO_ALL, 0, 0, -1, (), TWO),
        (signs.BROADCAST, 0, 0, -1, (0, 16), ONE),
        (signs.BROADCAST, 0, 0, -1, (DATA.data_ptr(), -16), ONE),
        (signs.BROADCAST, 0, 0, -1, list(ONE), ONE),
    ],
)
def test_a_collective_that_cannot_be_is_refused(place: SimpleNamespace, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="begin: "):
        place.native.begin(*arguments)
    assert place.native.tick == 0 and place.native.half == 0


@pytest.mark.parametrize("kind", range(len(signs.KINDS)), ids=signs.KINDS)
def test_what_waits_says_for_whom(place: SimpleNamespace, kind: int) -> None:
    each = {signs.ALL_GATHER: (ONE, TWO), signs.REDUCE_SCATTER: (TWO, ONE), signs.ALL_TO_ALL: (TWO, TWO)}
    inputs, outputs = each.get(kind, (ONE, ONE))
    assert place.native.begin(kind, 1, 0, -1, inputs, outputs) == (1 if kind == signs.GATHER else 0)
    if kind != signs.GATHER:  # nobody waits for its root
        from_root = kind in (signs.BROADCAST, signs.SCATTER)
        assert (place.native.whom, place.native.awaited) == ((1, 1) if from_root else (-1, 1))
        assert place.native.advance(-1) == 0


@pytest.mark.parametrize(
    ("ring", "nbytes"),
    [(-8, 4), (LAYOUT.halves, 4), (LAYOUT.total, 4), (4, 4), (LAYOUT.ring(0, 1), LAYOUT.fragment + 1)],
)
def test_a_message_outside_the_rings_is_refused(place: SimpleNamespace, ring: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="no such ring"):
        place.native.put(ring, 0, 0, 0, nbytes, 0, DATA.data_ptr(), nbytes)


def test_a_layout_larger_than_the_memory_is_refused() -> None:
    segment = share(dist.HashStore(), 0, 1, LAYOUT.total)
    with pytest.raises(ValueError, match="does not fit"):
        state.make_state(segment, Layout(2, 2 * LAYOUT.chunk, LAYOUT.fragment), 0)


def test_a_difference_names_both_ranks_and_sizes() -> None:
    told, expected = signs.sign_of(signs.GATHER, 1, 70_000, 24), signs.sign_of(signs.GATHER, 1, 70_000, 20)
    error = signs.difference(0, 1, told, expected, (10, 11))
    assert "rank 11 has 24 bytes in gather, where rank 10 has 20." in str(error)
    other = signs.difference(0, 1, signs.sign_of(signs.SCATTER, 1, 70_000, 20), expected, (10, 11))
    assert "rank 11 has called another collective where rank 10 has called gather with 20 bytes" in str(other)
