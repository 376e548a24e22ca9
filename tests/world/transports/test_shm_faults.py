"""A rank that ends, leaves or hangs: operations over shared memory end soon, with an error that
names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.faults import SOON_S, Ended, attempt, kill
from support.pool import Pool

LARGE = 2_000_000  # elements; in float32 more than rings and slots hold


# --- operations that cannot end well without rank `lost`
# --------------------------------------------------------

Operation = Callable[[int], object]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


def other(lost: int) -> int:
    """The first of the living ranks."""
    return 0 if lost else 1


def parts(length: int) -> list[torch.Tensor]:
    return [torch.ones(length) for _ in range(dist.get_world_size())]


@operation
def all_reduce(lost: int) -> None:
    dist.all_reduce(torch.ones(3))


@operation
def large_all_reduce(lost: int) -> None:
    dist.all_reduce(torch.ones(LARGE))


@operation
def broadcast_from_it(lost: int) -> None:
    dist.broadcast(torch.ones(3), lost)


@operation
def broadcast_to_it(lost: int) -> None:
    dist.broadcast(torch.ones(LARGE), other(lost))


@operation
def gather(lost: int) -> None:
    mine = torch.ones(LARGE)
    dist.gather(mine, parts(LARGE) if dist.get_rank() == other(lost) else None, other(lost))


@operation
def all_to_all(lost: int) -> None:
    dist.all_to_all(parts(5), parts(5))


@operation
def reduce_scatter(lost: int) -> None:
    dist.reduce_scatter(torch.ones(4), parts(4))


@operation
def barrier(lost: int) -> None:
    dist.barrier()


@operation
def objects(lost: int) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), {"a": 1})


@operation
def asynchronous(lost: int) -> None:
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    assert work is not None
    work.wait()


@operation
def several_under_way(lost: int) -> None:
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    outcomes = [attempt(work.wait) for work in works if work is not None]
    assert all(outcome.kind for outcome in outcomes), outcomes
    works[0].wait()  # type: ignore[union-attr]


@operation
def recv(lost: int) -> None:
    dist.recv(torch.empty(4), lost)


@operation
def recv_from_anyone(lost: int) -> None:
    dist.recv(torch.empty(4))


@operation
def long_send(lost: int) -> None:
    dist.send(torch.ones(LARGE), lost)


@operation
def batch(lost: int) -> None:
    asked = [
        dist.P2POp(dist.irecv, torch.empty(4), lost),
        dist.P2POp(dist.isend, torch.ones(LARGE), lost),
    ]
    for work in dist.batch_isend_irecv(asked):
        work.wait()


# --- a rank ends or leaves
# --------------------------------------------------------------------------------------


def leave() -> None:
    dist.destroy_process_group()


def lose(end: Callable[[], object], operation: Operation, lost: int) -> Ended | None:
    """On the lost rank, its end; on the others the operation, and what happens afterwards to a
    whole-group one.
    """
    if dist.get_rank() == lost:
        end()
        return None
    return attempt(lambda: operation(lost))


def lost_one(
    pool: Pool, end: Callable[[], object], operation: Operation, ranks: int
) -> list[Ended]:
    """How the operation ended on the living ranks, where the last rank is lost."""
    lost = ranks - 1
    outcomes = pool.outcomes(lose, end, operation, lost, workers=ranks, backend="shm")
    values = [outcome.value for outcome in outcomes if outcome.rank != lost]
    assert all(isinstance(value, Ended) for value in values), [
        outcome.line() for outcome in outcomes
    ]
    return values


def assert_names(endings: list[Ended], lost: int) -> None:
    for ended in endings:
        assert (ended.kind, ended.names) == ("RankLostError", (lost,)), ended
        assert f"rank {lost}" in ended.text
        assert ended.seconds < SOON_S


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_ends_when_a_rank_is_killed(pool: Pool, name: str) -> None:
    endings = lost_one(pool, kill, OPERATIONS[name], ranks=3)
    assert_names(endings, 2)
    assert all("has ended" in ended.text for ended in endings)


@pytest.mark.parametrize("name", ["all_reduce", "asynchronous", "recv", "long_send"])
@pytest.mark.parametrize(
    "end", [kill, leave, lambda: os._exit(0)], ids=["killed", "leaves", "exits"]
)
def test_the_only_other_rank_is_lost(pool: Pool, end: Callable[[], object], name: str) -> None:
    assert_names(lost_one(pool, end, OPERATIONS[name], ranks=2), 1)


@pytest.mark.parametrize("name", ["large_all_reduce", "several_under_way", "recv"])
def test_a_rank_that_leaves_is_named(pool: Pool, name: str) -> None:
    endings = lost_one(pool, leave, OPERATIONS[name], ranks=3)
    assert_names(endings, 2)
    assert all("has left" in ended.text for ended in endings)


def future(lost: int) -> Ended:
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    assert work is not None
    return attempt(work.get_future().wait)


def then(lost: int) -> Ended:
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    assert work is not None
    return attempt(work.get_future().then(lambda done: done.value()).wait)


def backward(lost: int) -> Ended:
    """The lost rank is not in the first forward pass either; the reducer's all-reduce is what waits
    for it.
    """
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    if dist.get_rank() == lost:
        kill()
    return attempt(model(torch.ones(2, 8)).sum().backward)


@pytest.mark.parametrize("body", [future, then, backward])
def test_futures_and_a_backward_pass_raise_what_names_it(
    pool: Pool, body: Callable[[int], Ended]
) -> None:
    def run() -> Ended:
        if dist.get_rank() == 1 and body is not backward:
            kill()
        return body(1)

    outcomes = pool.outcomes(run, workers=3, backend="shm")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ending == "returned", outcome.line()
        assert outcome.value.kind == "RuntimeError", outcome.value
        assert "RankLostError: shm: " in outcome.value.text
        assert "the process of rank 1 (" in outcome.value.text
        assert outcome.value.seconds < SOON_S


# --- after an error
# ---------------------------------------------------------------------------------------------


def survive() -> list[Any]:
    """Two of three go on together."""
    if dist.get_rank() == 1:
        kill()
    first, second = (attempt(lambda: dist.all_reduce(torch.ones(3))) for _ in range(2))
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank() // 2
    dist.destroy_process_group()
    dist.init_process_group("shm", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    total = torch.ones(3)
    dist.all_reduce(total)
    return [first.kind, second.text, total.tolist()]


def test_a_broken_group_refuses_everything_and_a_new_one_works(pool: Pool) -> None:
    outcomes = pool.outcomes(survive, workers=3, backend="shm")
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.failed, outcome.line() + outcome.trace
        kind, text, total = outcome.value
        assert (kind, total) == ("RankLostError", [2.0] * 3)
        assert text.startswith(
            "shm: this group cannot be used since an earlier error: RankLostError"
        )
        assert "rank 1 (" in text


def mistake() -> list[Any]:
    """Rank 0 sends to rank 1 more than it expects, then what it expects."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(LARGE), 1)
        dist.send(torch.full((3,), 7.0), 1)
        ended, into = Ended("", "", (), 0.0), torch.full((3,), 7.0)
    else:
        into = torch.zeros(3)
        ended = attempt(lambda: dist.recv(into, 0))
        assert not into.any()
        dist.recv(into, 0)
    total = torch.ones(3)
    dist.all_reduce(total)
    return [ended.kind, ended.text, into.tolist(), total.tolist()]


def test_a_message_of_another_size_is_its_receivers_error_alone(pool: Pool) -> None:
    sender, receiver = pool.run(mistake, backend="shm")
    assert sender == ["", "", [7.0] * 3, [2.0] * 3]
    assert receiver[0] == "TransportError"
    assert (
        f"rank 0 sent {LARGE * 4} bytes (tag 0), but rank 1 receives into 12 bytes" in receiver[1]
    )
    assert receiver[2:] == [[7.0] * 3, [2.0] * 3]
