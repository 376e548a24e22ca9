"""Operations under way beside the program: they need no help, keep their order, and answer as
c10d's Work does.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.conformance import Case, Ranks
from support.operations import OPERATIONS, perform

Body = Callable[[], None]


def store() -> Any:
    """Means to talk to the other ranks past the transport."""
    return dist.distributed_c10d._get_default_store()


# --- many at once
# ---------------------------------------------------------------------------------------------


def in_flight(operations: list[str], count: int, shape: tuple[int, ...]) -> None:
    """All are started before any is waited for; each rank waits in another order."""
    started = []
    for seed in range(count):
        started += [OPERATIONS[name](Case(shape, seed=seed), True) for name in operations]
    random.Random(dist.get_rank()).shuffle(started)
    for works, check in started:
        for work in works:
            work.wait()
        check()


def of_one_kind(operations: list[str], count: int, shape: tuple[int, ...]) -> None:
    for operation in operations:
        in_flight([operation], count, shape)


def all_kinds(transport: str) -> list[str]:
    return [name for name in OPERATIONS if transport != "gloo" or not name.endswith("_rows")]


def test_many_of_one_kind(ranks: Ranks) -> None:
    ranks.run(of_one_kind, all_kinds(ranks.transport), 8, (300,))


@pytest.mark.parametrize("shape", [(3,), (50_000,)], ids=str)
def test_many_of_all_kinds(ranks: Ranks, shape: tuple[int, ...]) -> None:
    ranks.run(in_flight, all_kinds(ranks.transport), 3, shape)


def mixed_with_waiting_ones(operations: list[str]) -> None:
    """Calls that wait come after those under way, in the order of the program."""
    started = []
    for seed, name in enumerate(operations):
        started.append(OPERATIONS[name](Case((500,), seed=seed), True))
        perform("all_reduce", Case((7,), seed=seed + 50))
    for works, check in started:
        for work in works:
            work.wait()
        check()


def test_operations_in_flight_and_those_that_wait(ranks: Ranks) -> None:
    ranks.run(mixed_with_waiting_ones, all_kinds(ranks.transport))


# --- beside the program
# ---------------------------------------------------------------------------------------


def start_returns_at_once() -> None:
    """Starting waits for nobody: the others start only when the first has said that it has
    started.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for step, count in enumerate((3, 2_000_000)):
        if rank > 0:
            store().wait([f"started {step}"])
        tensor = torch.full((count,), rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            store().set(f"started {step}", "")
        work.wait()
        assert work.is_completed()
        assert tensor.eq(sum(range(1, size + 1))).all()


def progress_without_help() -> None:
    """What is started goes on while its program does something else: here it waits for the others
    to be done.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for step, count in enumerate((3, 2_000_000)):
        tensor = torch.full((count,), rank + 1.0)
        works = [dist.all_reduce(tensor, async_op=True), dist.barrier(async_op=True)]
        if rank == 0:
            store().wait([f"done {step} {peer}" for peer in range(1, size)])
        for work in works:
            work.wait()
        store().set(f"done {step} {rank}", "")
        assert tensor.eq(sum(range(1, size + 1))).all()


def compute_meanwhile() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = torch.rand(200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = matrix @ matrix
    for _ in range(5):
        gradients = [torch.full((100_000,), rank + 1.0) for _ in range(4)]
        works = []
        for gradient in gradients:
            works.append(dist.all_reduce(gradient, async_op=True))
            assert torch.equal(matrix @ matrix, expected)
        for work, gradient in zip(works, gradients, strict=True):
            work.wait()
            assert gradient.eq(sum(range(1, size + 1))).all()


def wait_elsewhere() -> None:
    """A thread waits for what another has started."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), rank + 1.0) for _ in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda work: work.wait(), reversed(works)))
    assert all(tensor.eq(sum(range(1, size + 1))).all() for tensor in tensors)


def nobody_keeps_them() -> None:
    """What is started is finished, though the program keeps neither its work nor its tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = torch.full((200_000,), rank + 1.0)
    for _ in range(10):
        dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.all_gather([torch.zeros(1000) for _ in range(size)], torch.ones(1000), async_op=True)
        torch.full((100_000,), -1.0)  # takes the place of what was given free
    dist.all_reduce(kept, async_op=True)
    gc.collect()
    dist.barrier()
    assert kept.eq(sum(range(1, size + 1))).all()


@pytest.mark.parametrize(
    "body",
    [
        start_returns_at_once,
        progress_without_help,
        compute_meanwhile,
        wait_elsewhere,
        nobody_keeps_them,
    ],
)
def test_work_continues_beside_the_program(ranks: Ranks, body: Body) -> None:
    ranks.run(body)


# --- what a Work answers
# --------------------------------------------------------------------------------------


def futures() -> None:
    """As DDP's communication hooks use them: the future's value is the list of tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    average = sum(range(1, size + 1)) / size
    chained = []
    for _ in range(5):
        future = dist.all_reduce(torch.full((4,), rank + 1.0), async_op=True).get_future()
        chained.append(
            future.then(lambda done: done.value()[0] / size).then(lambda done: done.value() * 2)
        )
    for future in chained:
        assert future.wait().tolist() == [2 * average] * 4
        assert future.done()
    values = torch.futures.wait_all(
        [
            dist.all_reduce(torch.full((2,), rank + 1.0), async_op=True).get_future()
            for _ in range(3)
        ]
    )
    assert [value[0].tolist() for value in values] == [[average * size] * 2] * 3
    late = dist.broadcast(torch.full((2,), float(rank)), 1, async_op=True)
    late.wait()
    assert late.get_future().wait()[0].tolist() == [1.0, 1.0]


def callbacks_that_communicate() -> None:
    """A callback of one operation starts the next; nobody waits in between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    followed: list[Any] = []

    def follow(done: torch.futures.Future[Any]) -> torch.Tensor:
        result: torch.Tensor = done.value()[0]
        followed.append(dist.all_reduce(result, async_op=True))
        return result

    tensor = torch.full((4,), rank + 1.0)
    dist.all_reduce(tensor, async_op=True).get_future().then(follow).wait()
    followed[0].wait()
    assert tensor.tolist() == [size * sum(range(1, size + 1))] * 4


def callbacks_that_wait() -> None:
    """A callback starts an operation and waits for it, as PowerSGD's hook does."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def follow(done: torch.futures.Future[Any]) -> torch.Tensor:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    tensor = torch.full((4,), rank + 1.0)
    if rank > 0:
        store().wait(["rank 0 is ahead"])
    future = dist.all_reduce(tensor, async_op=True).get_future().then(follow)
    if rank == 0:
        store().set("rank 0 is ahead", "")
    assert future.wait().tolist() == [size * sum(range(1, size + 1))] * 4


def answers() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.wait(timedelta(seconds=30)) in (True, None)
    assert work.wait() in (True, None)
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert dist.all_reduce(torch.ones(3)) is None
    assert dist.barrier() is None


@pytest.mark.parametrize(
    "body", [futures, callbacks_that_communicate, callbacks_that_wait, answers]
)
def test_what_a_work_answers(ranks: Ranks, body: Body) -> None:
    ranks.run(body)


def wait_too_short() -> None:
    """A wait that ends too early raises, and harms nothing: the operation is still under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        store().wait(["too late"])
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            work.wait(timedelta(milliseconds=20))
        store().set("too late", "")
    work.wait()
    assert tensor.tolist() == [size] * 3
    perform("all_reduce", Case())


def test_a_wait_with_a_limit_that_is_too_short(ranks: Ranks) -> None:
    ranks.run(wait_too_short)
