"""Ranks that do not come: StallError at the time limit that holds, with their names, and what can
be done then.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.faults import SOON_S, Ended, attempt, attempt_to_start, interrupted_nap
from support.pool import Pool

LIMIT_S = 0.7
LIMIT = timedelta(seconds=LIMIT_S)
LARGE = 2_000_000  # elements; in float32 more than rings and slots hold
SLICED = 100_000  # elements that fit into one slot, and of which each rank reduces its part

Operation = Callable[[Any], object]


def assert_stalled(ended: Ended, *late: int) -> None:
    """It has ended at the limit and not before, with the names of those who did not come."""
    assert (ended.kind, ended.names) == ("StallError", late), ended
    assert (
        f"rank{'s'[: len(late) != 1]} {', '.join(map(str, late))} did not arrive within"
        in ended.text
    )
    assert LIMIT_S <= ended.seconds < LIMIT_S + SOON_S


def loop_until(*paths: Path) -> None:
    """A rank that computes for ever, as far as the others can tell."""
    while not all(path.exists() for path in paths):
        torch.ones(10).sum()


def limited() -> Any:
    return dist.new_group(timeout=LIMIT, backend="shm")


# --- limits of a group
# ----------------------------------------------------------------------------------------


def all_reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(3), group=group)


def large_all_reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(LARGE), group=group)


def asynchronous(group: Any) -> None:
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert work is not None
    work.wait()


def recv(group: Any) -> None:
    dist.recv(torch.empty(1), 1, group=group)


def long_send(group: Any) -> None:
    dist.send(torch.ones(LARGE), 1, group=group)


@pytest.mark.parametrize("operation", [all_reduce, large_all_reduce, asynchronous, recv, long_send])
def test_a_rank_that_never_comes_is_named_at_the_groups_limit(
    pool: Pool, tmp_path: Path, operation: Operation
) -> None:
    def body() -> Ended | None:
        group = limited()
        if dist.get_rank() == 1:
            return loop_until(tmp_path / "0", tmp_path / "2")
        ended = attempt(lambda: operation(group))
        (tmp_path / str(dist.get_rank())).touch()
        return ended

    for ended in pool.run(body, workers=3, backend="shm")[::2]:
        assert_stalled(ended, 1)


def test_all_stragglers_are_named(pool: Pool, tmp_path: Path) -> None:
    def body() -> Ended | None:
        group = limited()
        if dist.get_rank() > 0:
            return loop_until(tmp_path / "over")
        ended = attempt(lambda: dist.barrier(group))
        (tmp_path / "over").touch()
        return ended

    assert_stalled(pool.run(body, workers=3, backend="shm")[0], 1, 2)


def test_a_stopped_process_that_continues_gets_the_error_of_the_others(pool: Pool) -> None:
    def body() -> Ended:
        group = limited()
        numbers: list[Any] = [None, None]
        dist.all_gather_object(numbers, os.getpid())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the other rank has had enough
            return attempt(lambda: large_all_reduce(group))
        while Path(f"/proc/{numbers[1]}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            os.sched_yield()
        ended = attempt(lambda: large_all_reduce(group))
        os.kill(numbers[1], signal.SIGCONT)
        return ended

    waited, stopped = pool.run(body, backend="shm")
    assert_stalled(waited, 1)
    assert (stopped.kind, stopped.names) == ("StallError", (1,))
    assert "rank 0 gave up: StallError" in stopped.text


def test_a_group_that_is_not_made_on_every_rank_names_the_missing_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    def body() -> Ended | None:
        if os.environ["RANK"] == "2":
            return loop_until(tmp_path / "0", tmp_path / "1")
        ended = attempt_to_start(timeout=timedelta(seconds=2))
        (tmp_path / os.environ["RANK"]).touch()
        return ended

    for ended in pool.run(body, workers=3, init=False)[:2]:
        assert (ended.kind, ended.names) == ("StallError", (2,)), ended
        assert 2 <= ended.seconds < 2 + SOON_S
        assert "creating the group" in ended.text


# --- limits of one wait
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", ["collective", "recv", "recv from anyone", "send"])
def test_the_limit_of_a_wait_is_kept(pool: Pool, tmp_path: Path, begin: str) -> None:
    def body() -> Ended | None:
        if dist.get_rank() == 1:
            return loop_until(tmp_path / "over")
        work: Any = {
            "collective": lambda: dist.all_reduce(torch.ones(3), async_op=True),
            "recv": lambda: dist.irecv(torch.empty(1), 1),
            "recv from anyone": lambda: dist.irecv(torch.empty(1)),
            "send": lambda: dist.isend(torch.ones(LARGE), 1),
        }[begin]()
        ended = attempt(lambda: work.wait(LIMIT))
        (tmp_path / "over").touch()
        return ended

    assert_stalled(pool.run(body, backend="shm")[0], 1)


@pytest.mark.parametrize("source", [1, None])
def test_a_receive_that_took_too_long_leaves_the_group_and_the_message_alone(
    pool: Pool, tmp_path: Path, source: int | None
) -> None:
    def body() -> Any:
        group = limited()
        if dist.get_rank() == 1:
            loop_until(tmp_path / "over")
            dist.send(torch.tensor([5.0]), 0, group=group)
            dist.all_reduce(torch.ones(1), group=group)
            return None
        late, into = torch.zeros(1), torch.zeros(1)
        ended = attempt(lambda: dist.recv(late, source, group=group))
        (tmp_path / "over").touch()
        dist.recv(into, source, group=group)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        return ended, late.item(), into.item(), total.item()

    ended, *values = pool.run(body, backend="shm")[0]
    assert_stalled(ended, 1)
    assert values == [0.0, 5.0, 2.0]


# --- what is behind an operation that has failed
# ------------------------------------------------------------------


def test_a_late_rank_never_takes_one_operation_for_another(pool: Pool, tmp_path: Path) -> None:
    """Behind the operation that has failed on rank 0 there are others, whose ticks rank 1 must not
    take for its own.
    """

    def body() -> list[Any]:
        group = limited()
        if dist.get_rank() == 1:
            loop_until(tmp_path / "over")
            tensor = torch.ones(SLICED)
            ended = attempt(lambda: dist.all_reduce(tensor, group=group))
            return [ended.kind, bool(tensor.eq(2).all())]
        works: list[Any] = [
            dist.all_reduce(torch.ones(SLICED), group=group, async_op=True) for _ in range(4)
        ]
        endings = [attempt(work.wait) for work in works]
        (tmp_path / "over").touch()
        return [ended.kind for ended in endings]

    first, late = pool.run(body, backend="shm")
    assert first == ["StallError"] * 4
    assert late == ["StallError", False]


# --- Ctrl-C
# --------------------------------------------------------------------------------------------------


def test_an_interrupted_rank_ends_the_others_wait_too(pool: Pool) -> None:
    def body() -> Ended | None:
        if dist.get_rank() == 1:
            with interrupted_nap():
                return attempt(lambda: dist.all_reduce(torch.ones(3)))
        if dist.get_rank() == 2:
            return attempt(lambda: dist.all_reduce(torch.ones(3)))
        store: Any = dist.distributed_c10d._get_default_store()
        store.wait(["interrupted"], timedelta(seconds=SOON_S))
        return None

    def interrupted() -> Ended | None:
        ended = body()
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().set("interrupted", "")
        return ended

    _, first, second = pool.run(interrupted, workers=3, backend="shm")
    assert first.kind == "KeyboardInterrupt"
    assert second.kind == "TransportError"
    assert "rank 1 gave up: KeyboardInterrupt" in second.text
    assert second.seconds < SOON_S
