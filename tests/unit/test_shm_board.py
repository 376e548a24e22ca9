"""The ranks' counters and states: who has come, who will not come any more, and what the others are told."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest
import torch.distributed as dist

from lockstep.errors import LockstepError, RankLostError, StallError, TransportError
from lockstep.transports.shm.board import Board
from lockstep.transports.shm.layout import plan
from lockstep.transports.shm.segment import share

NAMES = (10, 11, 12)  # what the ranks are called in errors


class FakePeers:
    """Processes that end when a test says so."""

    def __init__(self) -> None:
        self.ended: set[int] = set()

    def gone(self) -> set[int]:
        return self.ended

    def close(self) -> None:
        return


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    """Three ranks' boards over the same memory; each can see the others' processes end."""
    layout = plan(3, 1 << 20)
    segment = share(dist.HashStore(), 0, 1, layout.total)
    made = [Board(segment, layout, rank, NAMES) for rank in range(3)]
    _prepare(made)
    del segment
    yield made
    made.clear()  # pytest keeps the list, and nothing shall keep the memory


def _prepare(boards: list[Board]) -> None:
    for board in boards:
        board.open(os.getpid())
        board._peers = FakePeers()  # type: ignore[assignment]


def end(boards: list[Board], rank: int) -> None:
    """Let the process of `rank` end."""
    for board in boards:
        board._peers.ended.add(rank)  # type: ignore[union-attr]


def looks(board: Board, awaited: Iterable[int] = (1,), waited: float = 0.0) -> None:
    board.check("gather", awaited, waited, timeout=5.0)


def post(boards: list[Board], *ranks: int) -> None:
    for rank in ranks:
        boards[rank].post()


# --- counters -------------------------------------------------------------------------------------------------


def test_all_reached_waits_for_the_last(boards: list[Board]) -> None:
    post(boards, 0, 1)
    assert not boards[0].all_reached(1)
    assert boards[2].reached(1, 1)
    assert not boards[0].reached(2, 1)
    post(boards, 2)
    assert all(board.all_reached(1) for board in boards)


def test_what_is_known_is_never_more_than_this_rank_has_posted(boards: list[Board]) -> None:
    """Others may be ahead; a later question about a tick that this rank has not posted is asked anew."""
    post(boards, 1, 2, 1, 2, 0)
    assert boards[0].all_reached(1)
    assert boards[0].state.low == 1


def test_a_wait_names_who_has_not_come_at_the_moment_of_asking(boards: list[Board]) -> None:
    post(boards, 0)
    steps = boards[0].until_all(1)
    assert next(steps) is None
    awaited = next(steps)
    assert awaited is not None
    asked = awaited()  # asked for, but not yet looked at
    post(boards, 1)
    assert list(asked) == [2]
    post(boards, 2)
    assert list(steps) == []


def test_a_wait_for_one_rank_ends_with_it(boards: list[Board]) -> None:
    steps = boards[0].until(2, 1)
    assert next(steps) is None
    awaited = next(steps)
    assert awaited is not None
    assert list(awaited()) == [2]
    asked = awaited()
    post(boards, 2)
    assert list(asked) == []
    assert list(steps) == []


# --- who will not come any more -------------------------------------------------------------------------------


def test_a_look_finds_nothing_while_all_are_there(boards: list[Board]) -> None:
    looks(boards[0], (1, 2), waited=5.0)


def test_an_awaited_rank_whose_process_has_ended_is_named(boards: list[Board]) -> None:
    end(boards, 1)
    with pytest.raises(RankLostError, match=rf"gather: the process of rank 11 \({os.getpid()}\) has ended") as caught:
        looks(boards[0])
    assert caught.value.rank == 11


def test_an_awaited_rank_that_has_left_is_named(boards: list[Board]) -> None:
    boards[1].close()
    with pytest.raises(RankLostError, match="gather: rank 11 has left the group") as caught:
        looks(boards[0])
    assert caught.value.rank == 11


def test_a_rank_that_is_not_awaited_may_end_or_leave(boards: list[Board]) -> None:
    end(boards, 1)
    boards[2].close()
    looks(boards[0], ())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_comes_and_then_goes_between_two_looks_is_not_lost(boards: list[Board], leaves: bool) -> None:
    """It has posted the tick that is awaited, so the wait is over, whatever becomes of it then."""
    post(boards, 0, 2)
    steps = boards[0].until_all(1)
    assert next(steps) is None
    awaited = next(steps)
    assert awaited is not None

    class GoesWhileAsked(FakePeers):
        def gone(self) -> set[int]:
            boards[1].post()
            if not leaves:
                return {1}
            boards[1].close()
            return set()

    boards[0]._peers = GoesWhileAsked()  # type: ignore[assignment]
    boards[0].check("all_reduce", awaited(), 9.0, timeout=10.0)
    assert list(steps) == []


# --- what the others are told ---------------------------------------------------------------------------------


def test_a_stall_names_all_that_are_late(boards: list[Board]) -> None:
    with pytest.raises(StallError, match=r"gather timed out: ranks 11, 12 did not arrive within 5\.5 s") as caught:
        looks(boards[0], (1, 2), waited=5.5)
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
def test_a_rank_that_gives_up_tells_the_others_of_the_same_error(
    boards: list[Board], error: BaseException, attributes: dict[str, object]
) -> None:
    boards[1].fail(f"{type(error).__name__}: {error}", error)
    expected = type(error) if isinstance(error, LockstepError) else TransportError
    for board in (boards[0], boards[2]):
        with pytest.raises(TransportError, match=f"rank 11 gave up: {type(error).__name__}: {error}") as caught:
            looks(board, ())
        assert type(caught.value) is expected
        assert {name: getattr(caught.value, name) for name in attributes} == attributes


def test_a_rank_that_has_given_up_stays_so_after_it_has_left(boards: list[Board]) -> None:
    boards[1].fail("ValueError: no")
    boards[1].close()
    end(boards, 1)
    with pytest.raises(TransportError, match="gave up: ValueError: no"):
        looks(boards[0])


@pytest.mark.parametrize("word", ["x", "ü", "日"])
def test_long_last_words_are_cut_and_stay_in_their_block(boards: list[Board], word: str) -> None:
    boards[0].post()
    boards[2].post()
    boards[1].fail(word * 1000, StallError("late", tuple(range(100))))
    with pytest.raises(StallError, match=f"gave up: {word * 100}") as caught:
        looks(boards[2])
    assert caught.value.ranks == tuple(range(len(caught.value.ranks)))
    assert boards[0].reached(2, 1), "the block of the next rank was written over"
    looks(boards[1], ())
