"""The ranks' counters and states: which have arrived, which cannot any more, and the errors of the
others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest
import torch.distributed as dist

from lockstep.errors import LockstepError, RankLostError, StallError, TransportError
from lockstep.transports.shm.memory_layout import plan
from lockstep.transports.shm.rank_states import RankStates
from lockstep.transports.shm.segment import share

DISPLAY_RANKS = (10, 11, 12)


class FakePeers:
    """Processes that end when a test says so."""

    def __init__(self) -> None:
        self.ended: set[int] = set()

    def poll(self) -> set[int]:
        return self.ended

    def close(self) -> None:
        return


@pytest.fixture
def all_states() -> Iterator[list[RankStates]]:
    """Three ranks over the same memory; each can see the others' processes end."""
    layout = plan(3, 1 << 20)
    segment = share(dist.HashStore(), 0, 1, layout.total)
    made = [RankStates(segment, layout, rank, DISPLAY_RANKS) for rank in range(3)]
    _prepare(made)
    del segment
    yield made
    made.clear()  # pytest keeps the list, and nothing shall keep the memory


def _prepare(all_states: list[RankStates]) -> None:
    for states in all_states:
        states.announce(os.getpid())
        states._peers = FakePeers()  # type: ignore[assignment]


def end(all_states: list[RankStates], rank: int) -> None:
    """Let the process of `rank` end."""
    for states in all_states:
        states._peers.ended.add(rank)  # type: ignore[union-attr]


def check(states: RankStates, awaited: Iterable[int] = (1,), waited: float = 0.0) -> None:
    states.check("gather", awaited, waited, timeout=5.0)


def post(all_states: list[RankStates], *ranks: int) -> None:
    for rank in ranks:
        all_states[rank].post()


# --- counters
# -------------------------------------------------------------------------------------------------


def test_all_reached_waits_for_the_last(all_states: list[RankStates]) -> None:
    post(all_states, 0, 1)
    assert not all_states[0].all_reached(1)
    assert all_states[2].reached(1, 1)
    assert not all_states[0].reached(2, 1)
    post(all_states, 2)
    assert all(states.all_reached(1) for states in all_states)


def test_what_is_known_is_never_more_than_this_rank_has_posted(
    all_states: list[RankStates],
) -> None:
    """Others may be ahead; a later question about a tick that this rank has not posted is asked
    anew.
    """
    post(all_states, 1, 2, 1, 2, 0)
    assert all_states[0].all_reached(1)
    assert all_states[0].state.low == 1


def test_a_wait_names_the_ranks_that_are_missing_when_it_is_iterated(
    all_states: list[RankStates],
) -> None:
    post(all_states, 0)
    steps = all_states[0].wait_for_all(1)
    assert next(steps) is None
    awaited = next(steps)
    assert awaited is not None
    asked = awaited()  # asked for, but not yet looked at
    post(all_states, 1)
    assert list(asked) == [2]
    post(all_states, 2)
    assert list(steps) == []


def test_a_wait_for_one_rank_ends_with_it(all_states: list[RankStates]) -> None:
    steps = all_states[0].wait_for(2, 1)
    assert next(steps) is None
    awaited = next(steps)
    assert awaited is not None
    assert list(awaited()) == [2]
    asked = awaited()
    post(all_states, 2)
    assert list(asked) == []
    assert list(steps) == []


# --- ranks that are lost
# -------------------------------------------------------------------------------


def test_a_check_passes_while_all_are_there(all_states: list[RankStates]) -> None:
    check(all_states[0], (1, 2), waited=5.0)


def test_an_awaited_rank_whose_process_has_ended_is_named(all_states: list[RankStates]) -> None:
    end(all_states, 1)
    with pytest.raises(
        RankLostError, match=rf"gather: the process of rank 11 \({os.getpid()}\) has ended"
    ) as caught:
        check(all_states[0])
    assert caught.value.rank == 11


def test_an_awaited_rank_that_has_left_is_named(all_states: list[RankStates]) -> None:
    all_states[1].close()
    with pytest.raises(RankLostError, match="gather: rank 11 has left the group") as caught:
        check(all_states[0])
    assert caught.value.rank == 11


def test_a_rank_that_is_not_awaited_may_end_or_leave(all_states: list[RankStates]) -> None:
    end(all_states, 1)
    all_states[2].close()
    check(all_states[0], ())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_arrives_and_ends_between_two_checks_is_not_lost(
    all_states: list[RankStates], leaves: bool
) -> None:
    """It has posted the tick that is awaited, so the wait is over, whatever becomes of it then."""
    post(all_states, 0, 2)
    steps = all_states[0].wait_for_all(1)
    assert next(steps) is None
    awaited = next(steps)
    assert awaited is not None

    class GoesWhileAsked(FakePeers):
        def poll(self) -> set[int]:
            all_states[1].post()
            if not leaves:
                return {1}
            all_states[1].close()
            return set()

    all_states[0]._peers = GoesWhileAsked()  # type: ignore[assignment]
    all_states[0].check("all_reduce", awaited(), 9.0, timeout=10.0)
    assert list(steps) == []


# --- errors on the other ranks
# ---------------------------------------------------------------------------------


def test_a_stall_names_all_missing_ranks(all_states: list[RankStates]) -> None:
    with pytest.raises(
        StallError, match=r"gather timed out: ranks 11, 12 did not arrive within 5\.5 s"
    ) as caught:
        check(all_states[0], (1, 2), waited=5.5)
    assert caught.value.ranks == (11, 12)


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (RankLostError(12, "rank 12 is gone"), {"rank": 12}),
        (StallError("ranks 10, 12 are late", (10, 12)), {"ranks": (10, 12)}),
        (KeyboardInterrupt("a user"), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_that_gives_up_ends_the_others_with_the_same_error(
    all_states: list[RankStates], error: BaseException, attributes: dict[str, object]
) -> None:
    all_states[1].fail(f"{type(error).__name__}: {error}", error)
    expected = type(error) if isinstance(error, LockstepError) else TransportError
    for states in (all_states[0], all_states[2]):
        with pytest.raises(
            TransportError, match=f"rank 11 gave up: {type(error).__name__}: {error}"
        ) as caught:
            check(states, ())
        assert type(caught.value) is expected
        assert {name: getattr(caught.value, name) for name in attributes} == attributes


def test_a_rank_that_has_given_up_stays_so_after_it_has_left(all_states: list[RankStates]) -> None:
    all_states[1].fail("ValueError: no")
    all_states[1].close()
    end(all_states, 1)
    with pytest.raises(TransportError, match="gave up: ValueError: no"):
        check(all_states[0])


@pytest.mark.parametrize("word", ["x", "ü", "日"])
def test_a_long_error_text_is_cut_and_stay_in_their_block(
    all_states: list[RankStates], word: str
) -> None:
    all_states[0].post()
    all_states[2].post()
    all_states[1].fail(word * 1000, StallError("late", tuple(range(100))))
    with pytest.raises(StallError, match=f"gave up: {word * 100}") as caught:
        check(all_states[2])
    assert caught.value.ranks == tuple(range(len(caught.value.ranks)))
    assert all_states[0].reached(2, 1), "the block of the next rank was written over"
    check(all_states[1], ())
