"""Python objects, and the functions of a group that c10d builds on its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients

from support.conformance import Ranks


def thing(rank: int) -> dict[str, Any]:
    """An object of another size on each rank."""
    return {
        "rank": rank,
        "text": "x" * (1000 * rank),
        "tensor": torch.arange(rank),
        "deep": [(rank, None)],
    }


def same(got: Any, rank: int) -> None:
    expected = thing(rank)
    assert torch.equal(got.pop("tensor"), expected.pop("tensor"))
    assert got == expected


def broadcast_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        things = [thing(root), None, "last"] if rank == root else [0, 0, 0]
        dist.broadcast_object_list(things, root)
        same(things[0], root)
        assert things[1:] == [None, "last"]


def gather_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, thing(rank))
    rooted: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(thing(rank), rooted, 1)
    for peer in range(size):
        same(everywhere[peer], peer)
        if rooted is not None:
            same(rooted[peer], peer)


def scatter_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    out: list[Any] = [None]
    dist.scatter_object_list(out, [thing(peer) for peer in range(size)] if rank == 1 else None, 1)
    same(out[0], rank)


def send_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for peer in range(1, size):
            dist.send_object_list([thing(peer), peer], peer)
        for peer in range(1, size):
            received: list[Any] = [None, None]
            assert dist.recv_object_list(received, peer) == peer
            same(received[0], peer)
            assert received[1] == peer
    else:
        received = [None, None]
        assert dist.recv_object_list(received, 0) == 0
        same(received[0], rank)
        dist.send_object_list([thing(rank), rank], 0)


@pytest.mark.parametrize("body", [broadcast_objects, gather_objects, scatter_objects, send_objects])
def test_objects(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks.run(body)


# --- barriers
# -------------------------------------------------------------------------------------------------


def barrier_waits_for_all() -> None:
    """What each rank does before a barrier has been done when any rank leaves it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for step in range(20):
        late = step % size
        if rank == late:
            store.set(f"step {step}", "there")
            store.get(f"step {step}")  # `set` alone does not wait until it is there
        dist.barrier()
        assert store.check([f"step {step}"]), step


def test_a_barrier_waits_for_all(ranks: Ranks) -> None:
    ranks.run(barrier_waits_for_all)


# --- collectives with gradients
# -------------------------------------------------------------------------------


def gradients() -> None:
    """torch.distributed.nn: the backward pass of a collective is a collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    mine = torch.full((3,), rank + 1.0, requires_grad=True)
    summed = with_gradients.all_reduce(mine)
    (summed.sum() * (rank + 1)).backward()
    assert summed.tolist() == [total] * 3
    assert mine.grad is not None and mine.grad.tolist() == [total] * 3
    mine.grad = None
    parts = with_gradients.all_gather(mine)
    sum((peer + 1) * part.sum() for peer, part in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert [part[0].item() for part in parts] == [peer + 1.0 for peer in range(size)]
    assert mine.grad.tolist() == [size * (rank + 1)] * 3
    mine.grad = None
    exchanged = with_gradients.all_to_all_single(
        torch.empty(size), mine[:1].expand(size).contiguous()
    )
    (exchanged * (rank + 1)).sum().backward()
    assert exchanged.tolist() == [peer + 1.0 for peer in range(size)]
    assert mine.grad.tolist() == [total, 0, 0]


@pytest.mark.filterwarnings("ignore:.*torch.distributed.nn.*:FutureWarning")
def test_collectives_with_gradients(ranks: Ranks) -> None:
    ranks.run(gradients)
