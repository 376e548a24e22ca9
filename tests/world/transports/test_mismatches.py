"""Ranks that call different collectives, or with sizes that do not fit: an error on whoever reads,
and no garbage.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from support.conformance import PURE, Ranks
from support.faults import Ended, attempt
from support.operations import all_gather_single, reduce_scatter_single
from support.pool import Pool

Call = Callable[[int, int], object]


def tensor(count: int) -> torch.Tensor:
    return torch.full((count,), 7.0)


def parts(count: int) -> list[torch.Tensor]:
    return [tensor(count) for _ in range(dist.get_world_size())]


def reduce_scatter_average(rank: int, count: int) -> None:
    """What only Python does."""
    dist.reduce_scatter(tensor(count), parts(count), dist.ReduceOp.AVG)


# each is called with this rank's number and a count of elements that differs between ranks
CALLS: dict[str, Call] = {
    "all_reduce": lambda rank, count: dist.all_reduce(tensor(count)),
    "maximum": lambda rank, count: dist.all_reduce(tensor(count), dist.ReduceOp.MAX),
    "reduce": lambda rank, count: dist.reduce(tensor(count), 0),
    "least": lambda rank, count: dist.reduce(tensor(count), 0, dist.ReduceOp.MIN),
    "broadcast": lambda rank, count: dist.broadcast(tensor(count), 1),
    "all_gather": lambda rank, count: dist.all_gather(parts(count), tensor(count)),
    "all_gather_single": lambda rank, count: all_gather_single(tensor(2 * count), tensor(count)),
    "gather": lambda rank, count: dist.gather(
        tensor(count), parts(count) if rank == 0 else None, 0
    ),
    "scatter": lambda rank, count: dist.scatter(
        tensor(count), parts(count) if rank == 1 else None, 1
    ),
    "reduce_scatter": lambda rank, count: dist.reduce_scatter(tensor(count), parts(count)),
    "reduce_scatter_single": lambda rank, count: reduce_scatter_single(
        tensor(count), tensor(2 * count)
    ),
    "reduce_scatter_average": reduce_scatter_average,
    "all_to_all": lambda rank, count: dist.all_to_all(parts(count), parts(count)),
    "all_to_all_single": lambda rank, count: dist.all_to_all_single(
        tensor(2 * count), tensor(2 * count)
    ),
    "later": lambda rank, count: finish(dist.broadcast(tensor(count), 1, async_op=True)),
    "pieces of other sizes": lambda rank, count: dist.all_to_all(
        [tensor(4 if source == rank else 3) for source in range(2)],
        [tensor(4 if target == rank else 3 + rank) for target in range(2)],
    ),
}


def finish(work: object) -> None:
    assert isinstance(work, dist.Work)
    work.wait()


def other_sizes(name: str, count: int) -> Ended:
    """Rank 1 has one element more; rank 0 is the one that reads in every collective."""
    rank = dist.get_rank()
    for _ in range(3):  # what was right before must not make this look right
        CALLS["all_reduce"](rank, count)
    ended = attempt(lambda: CALLS[name](rank, count + rank))
    if not ended.kind:
        ended = attempt(dist.barrier)
    assert attempt(dist.barrier).kind == "TransportError"
    return ended


@pytest.mark.parametrize("transport", ["shm", PURE])
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("name", CALLS)
def test_sizes_that_do_not_fit(ranks: Ranks, name: str) -> None:
    for ended in ranks.run(other_sizes, name, 5):
        assert ended.kind == "TransportError", ended
        assert " bytes in " in ended.text and "sizes that fit" in ended.text


@pytest.mark.parametrize("transport", ["shm", PURE])
@pytest.mark.parametrize("size", [2])
def test_large_sizes_that_do_not_fit(ranks: Ranks) -> None:
    """So large that chunks and slices differ too."""
    for ended in ranks.run(other_sizes, "all_reduce", 300_000):
        assert ended.kind == "TransportError", ended


def other_dtypes(name: str, large: bool) -> Ended:
    """As many bytes on both ranks, which rank 0 has as numbers in float32, and rank 1 as half as
    many in float64.
    """
    rank = dist.get_rank()
    for _ in range(3):
        CALLS["all_reduce"](rank, 6)
    torch.set_default_dtype((torch.float32, torch.float64)[rank])
    try:
        ended = attempt(lambda: CALLS[name](rank, (1 - rank + 1) * (100_000 if large else 3)))
    finally:
        torch.set_default_dtype(torch.float32)
    if not ended.kind:
        ended = attempt(dist.barrier)
    return ended


@pytest.mark.parametrize("transport", ["shm", PURE])
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "pieces of other sizes"])
def test_other_dtypes_of_as_many_bytes(ranks: Ranks, name: str) -> None:
    for large in (False, True):
        endings = ranks.run(other_dtypes, name, large)
        assert {ended.kind for ended in endings} == {"TransportError"}, endings
        texts = [ended.text for ended in endings]
        mine, yours = "rank 0 has float32", "rank 1 has float64"
        assert any(mine in text and yours in text for text in texts), texts


def words_and_numbers() -> Ended:
    rank = dist.get_rank()
    mine = torch.ones(4) if rank == 0 else torch.ones(4, dtype=torch.int32)
    return attempt(lambda: dist.all_reduce(mine))


@pytest.mark.parametrize("transport", ["shm", PURE])
@pytest.mark.parametrize("size", [2])
def test_numbers_are_not_added_to_words(ranks: Ranks) -> None:
    first, second = ranks.run(words_and_numbers)
    assert "rank 1 has int32 in all_reduce, where rank 0 has float32" in first.text
    assert "rank 0 has float32 in all_reduce, where rank 1 has int32" in second.text


def message_of_another_dtype(length: int) -> list[Ended]:
    if dist.get_rank() == 0:
        dist.send(torch.ones(length), 1)
        dist.send(torch.ones(length), 1)
        dist.send(torch.ones(length), 1)
        return []
    into = torch.zeros(length, dtype=torch.int32)
    # one that waits for the message, one that finds it there, and one from anybody
    ended = [
        attempt(lambda: dist.recv(into, 0)),
        attempt(lambda: dist.recv(into, 0)),
        attempt(lambda: dist.recv(into)),
    ]
    assert into.eq(0).all()
    return ended


@pytest.mark.parametrize("transport", ["shm", PURE])
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("length", [3, 200_000])
def test_a_message_of_another_dtype_of_as_many_bytes(ranks: Ranks, length: int) -> None:
    _, endings = ranks.run(message_of_another_dtype, length)
    for ended in endings:
        assert ended.kind == "TransportError", ended
        assert "rank 0 sent float32 (tag 0), but rank 1 receives into int32" in ended.text


def other_order(first: str, second: str) -> list[Ended]:
    """Rank 1 takes two collectives the other way round."""
    rank = dist.get_rank()
    for name in (first, second) * 3:
        CALLS[name](rank, 5)
    order = (first, second) if rank == 0 else (second, first)
    return [attempt(lambda name=name: CALLS[name](rank, 5)) for name in order]  # type: ignore[misc]


@pytest.mark.parametrize("transport", ["shm", PURE])
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("all_reduce", "all_gather"),
        ("reduce_scatter", "all_to_all"),
        ("broadcast", "all_reduce"),
        ("scatter", "maximum"),
    ],
)
def test_another_order(ranks: Ranks, first: str, second: str) -> None:
    """Even of the same sizes, and both called before; whoever goes on after that learns of it."""
    for endings in ranks.run(other_order, first, second):
        assert "TransportError" in {ended.kind for ended in endings}, endings


def test_a_barrier_that_others_do_not_call(pool: Pool) -> None:
    def body() -> list[str]:
        CALLS["all_reduce"](0, 5)
        CALLS["all_reduce"](0, 5)
        order = [lambda: CALLS["all_reduce"](0, 5), dist.barrier]
        return [attempt(call).kind for call in (order if dist.get_rank() == 0 else order[::-1])]

    assert all("TransportError" in kinds for kinds in pool.run(body, backend="shm"))
