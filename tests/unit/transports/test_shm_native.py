"""The native extension's own checks: numbers outside the memory, or without a meaning, are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.transports.shm import rank_states
from lockstep.transports.shm.memory_layout import Layout, plan
from lockstep.transports.shm.segment import share
from lockstep.transports.shm.signatures import KINDS, mismatch_error, signature_of

LAYOUT = plan(2, 1 << 20)
DATA = torch.zeros(64)
ONE = (DATA.data_ptr(), 16)
TWO = (*ONE, DATA.data_ptr() + 16, 16)

pytestmark = pytest.mark.skipif(
    rank_states._native is None, reason="installed without the native extension"
)


@pytest.fixture
def state() -> Iterator[SimpleNamespace]:
    """`native`: rank 0 of two, of which rank 1 never arrives."""
    made = SimpleNamespace(
        native=rank_states._make_state(share(dist.HashStore(), 0, 1, LAYOUT.total), LAYOUT, 0)
    )
    yield made
    vars(made).clear()  # pytest keeps the object, and nothing shall keep the memory


@pytest.mark.parametrize(
    "arguments",
    [
        (len(KINDS), 0, 0, -1, ONE, ONE),
        (-1, 0, 0, -1, ONE, ONE),
        (KINDS["broadcast"], 2, 0, -1, ONE, ONE),
        (KINDS["broadcast"], -1, 0, -1, ONE, ONE),
        (KINDS["all_reduce"], 0, 4, -1, ONE, ONE),
        (KINDS["broadcast"], 0, 64, -1, ONE, ONE),
        (KINDS["all_gather"], 0, 0, -1, ONE, (*TWO, *ONE)),
        (KINDS["all_gather"], 0, 0, -1, ONE, (DATA.data_ptr(), 15)),
        (KINDS["all_to_all"], 0, 0, -1, (), TWO),
        (KINDS["broadcast"], 0, 0, -1, (0, 16), ONE),
        (KINDS["broadcast"], 0, 0, -1, (DATA.data_ptr(), -16), ONE),
        (KINDS["broadcast"], 0, 0, -1, list(ONE), ONE),
    ],
)
def test_invalid_arguments_are_refused(state: SimpleNamespace, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="begin: "):
        state.native.begin(*arguments)
    assert state.native.tick == 0 and state.native.half == 0


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_a_waiting_collective_names_the_awaited_rank(state: SimpleNamespace, kind: int) -> None:
    each = {
        KINDS["all_gather"]: (ONE, TWO),
        KINDS["reduce_scatter"]: (TWO, ONE),
        KINDS["all_to_all"]: (TWO, TWO),
    }
    inputs, outputs = each.get(kind, (ONE, ONE))
    assert state.native.begin(kind, 1, 0, -1, inputs, outputs) == (
        1 if kind == KINDS["gather"] else 0
    )
    if kind != KINDS["gather"]:  # no rank waits for its root
        from_root = kind in (KINDS["broadcast"], KINDS["scatter"])
        assert (state.native.awaited_rank, state.native.awaited_tick) == (
            (1, 1) if from_root else (-1, 1)
        )
        assert state.native.advance(-1) == 0


@pytest.mark.parametrize(
    ("ring", "nbytes"),
    [
        (-8, 4),
        (LAYOUT.halves, 4),
        (LAYOUT.total, 4),
        (4, 4),
        (LAYOUT.ring(0, 1), LAYOUT.fragment + 1),
    ],
)
def test_a_message_outside_the_rings_is_refused(
    state: SimpleNamespace, ring: int, nbytes: int
) -> None:
    with pytest.raises(ValueError, match="no such ring"):
        state.native.put(ring, 0, 0, 0, nbytes, 0, DATA.data_ptr(), nbytes)


def test_a_layout_larger_than_the_memory_is_refused() -> None:
    segment = share(dist.HashStore(), 0, 1, LAYOUT.total)
    with pytest.raises(ValueError, match="does not fit"):
        rank_states._make_state(segment, Layout(2, 2 * LAYOUT.chunk, LAYOUT.fragment), 0)


def test_a_mismatch_names_both_ranks_and_sizes() -> None:
    found, expected = (
        signature_of(KINDS["gather"], 1, 70_000, 24),
        signature_of(KINDS["gather"], 1, 70_000, 20),
    )
    error = mismatch_error(0, 1, found, expected, (10, 11))
    assert "rank 11 has 24 bytes in gather, where rank 10 has 20." in str(error)
    other = mismatch_error(0, 1, signature_of(KINDS["scatter"], 1, 70_000, 20), expected, (10, 11))
    assert (
        "rank 11 has called another collective where rank 10 has called gather with 20 bytes"
        in str(other)
    )
