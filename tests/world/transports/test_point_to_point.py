"""Messages between two ranks: each arrives whole, where it was sent to, matched by source and
tag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.conformance import Case, Ranks

Body = Callable[[], None]


def message(sender: int, receiver: int, number: int = 0, count: int = 5) -> Tensor:
    return Case((count,), seed=sender * 10 + receiver).numbers(0, number)


def swap(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Rank 0 calls the first, rank 1 the second; the others have no part in it."""
    rank = dist.get_rank()
    if rank < 2:
        (first, second)[rank]()


# --- matching
# -------------------------------------------------------------------------------------------------


def send_and_receive() -> None:
    """From every rank to every other, one after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for sender in range(size):
        for receiver in range(size):
            if sender == rank != receiver:
                dist.send(message(sender, receiver), receiver)
            if receiver == rank != sender:
                out = torch.zeros(5)
                assert dist.recv(out, sender) == sender
                assert torch.equal(out, message(sender, receiver))


def tags_in_another_order(count: int) -> None:
    """The receiver asks for the tags in the opposite order; messages of one tag stay in order."""
    tags = [3, 0, 7, 3, 0]

    def sends() -> None:
        works = [
            dist.isend(message(0, 1, number, count), 1, tag=tag) for number, tag in enumerate(tags)
        ]
        for work in works:
            work.wait()

    def receives() -> None:
        for tag in (7, 3, 0, 3, 0):
            out = torch.zeros(count)
            dist.recv(out, 0, tag=tag)
            number = tags.index(tag)
            tags[number] = -1
            assert torch.equal(out, message(0, 1, number, count)), (tag, number)

    swap(sends, receives)


def receives_before_sends() -> None:
    """What is asked for early is filled when it comes, by tag."""
    outs = {tag: torch.zeros(5) for tag in (5, 1, 9)}

    def receives() -> None:
        works = [dist.irecv(out, 1, tag=tag) for tag, out in outs.items()]
        dist.send(torch.ones(1), 1)
        for work in works:
            work.wait()
        for tag, out in outs.items():
            assert torch.equal(out, message(1, 0, tag))

    def sends() -> None:
        dist.recv(torch.zeros(1), 0)
        for tag in (9, 5, 1):
            dist.send(message(1, 0, tag), 0, tag=tag)

    swap(receives, sends)


def any_source() -> None:
    """The last rank takes what comes; each says from whom it was. Another tag does not match."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works: list[Any] = []
    if rank < size - 1:
        for number, tag in ((-1.0, 8), (float(rank), 4), (rank + 0.5, 4)):
            works.append(dist.isend(torch.tensor([number]), size - 1, tag=tag))
        for work in works:
            work.wait()
        return
    last: dict[int, float] = {}
    for _ in range(2 * (size - 1)):
        out = torch.zeros(1)
        sender = dist.recv(out, tag=4)
        assert out.item() == (sender + 0.5 if sender in last else sender)
        last[sender] = out.item()
    assert last == {peer: peer + 0.5 for peer in range(size - 1)}
    for peer in range(size - 1):
        out = torch.zeros(1)
        dist.recv(out, peer, tag=8)
        assert out.item() == -1


def any_source_later() -> None:
    size = dist.get_world_size()
    if dist.get_rank() > 0:
        dist.send(torch.tensor([float(dist.get_rank())]), 0)
        return
    outs = [torch.zeros(1) for _ in range(size - 1)]
    works = [dist.irecv(out) for out in outs]
    senders = []
    for work, out in zip(works, outs, strict=True):
        work.wait()
        senders.append(work._source_rank())
        assert out.item() == senders[-1]
    assert sorted(senders) == list(range(1, size))


@pytest.mark.parametrize(
    "body", [send_and_receive, receives_before_sends, any_source, any_source_later]
)
def test_messages_are_matched_by_source_and_tag(ranks: Ranks, body: Body) -> None:
    ranks.run(body)


@pytest.mark.parametrize("count", [5, 600_000])
def test_messages_are_received_in_another_order_than_sent(ranks: Ranks, count: int) -> None:
    ranks.run(tags_in_another_order, count)


# --- sizes and numbers
# ----------------------------------------------------------------------------------------


def big_both_ways() -> None:
    """Both send first, more than any buffer between them holds, and then receive."""
    rank, count = dist.get_rank(), 3_000_000
    if rank < 2:
        out = torch.zeros(count)
        work = dist.isend(message(rank, 1 - rank, 0, count), 1 - rank)
        dist.recv(out, 1 - rank)
        work.wait()
        assert torch.equal(out, message(1 - rank, rank, 0, count))


def many_small() -> None:
    """More messages than any queue between the ranks holds are under way before one is received."""
    number = 2000
    values = torch.arange(number, dtype=torch.float32)[:, None].repeat(1, 3)

    def sends() -> None:
        works = [dist.isend(row, 1, tag=index % 3) for index, row in enumerate(values)]
        dist.send(torch.ones(1), 1, tag=99)
        for work in works:
            work.wait()

    def receives() -> None:
        dist.recv(torch.zeros(1), 0, tag=99)
        for tag in (2, 0, 1):
            for index in range(tag, number, 3):
                out = torch.zeros(3)
                dist.recv(out, 0, tag=tag)
                assert torch.equal(out, values[index])

    swap(sends, receives)


def sizes_mixed() -> None:
    """Empty, small and large messages of one tag, in order."""
    counts = [0, 1, 200_000, 0, 7, 1_000_001, 0, 0, 3]

    def sends() -> None:
        for number, count in enumerate(counts):
            dist.send(message(0, 1, number, count), 1)

    def receives() -> None:
        for number, count in enumerate(counts):
            out = torch.zeros(count)
            dist.recv(out, 0)
            assert torch.equal(out, message(0, 1, number, count))

    swap(sends, receives)


def sent_buffer_used_again() -> None:
    """After `send` or `wait` the sender may overwrite its tensor; what was sent stays as it was."""

    def sends() -> None:
        tensor = torch.zeros(1000)
        for number in range(20):
            tensor.fill_(number)
            if number % 2:
                dist.send(tensor, 1)
            else:
                dist.isend(tensor, 1).wait()

    def receives() -> None:
        for number in range(20):
            out = torch.full((1000,), -1.0)
            dist.recv(out, 0)
            assert out.eq(number).all(), number

    swap(sends, receives)


@pytest.mark.parametrize("body", [big_both_ways, many_small, sizes_mixed, sent_buffer_used_again])
def test_messages_of_every_size_and_number(ranks: Ranks, body: Body) -> None:
    ranks.run(body)


# --- batches, and beside collectives
# --------------------------------------------------------------------------


def exchange_in_batch() -> None:
    """Two messages to each other rank, receives and sends mixed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outs, ops = {}, []
    for peer in (peer for peer in range(size) if peer != rank):
        for number in (0, 1):
            outs[peer, number] = torch.zeros(5)
            ops.append(dist.P2POp(dist.isend, message(rank, peer, number), peer, tag=number))
            ops.append(dist.P2POp(dist.irecv, outs[peer, number], peer, tag=number))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for (peer, number), out in outs.items():
        assert torch.equal(out, message(peer, rank, number))


def pipeline() -> None:
    """Stages pass a value on; collectives of the same group run while messages wait to be
    received.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(10):
        value = torch.tensor([float(step)])
        if rank > 0:
            dist.recv(value, rank - 1)
        passed = dist.isend(value + 1, rank + 1) if rank + 1 < size else None
        total = torch.ones(10)
        dist.all_reduce(total)
        assert total.eq(size).all()
        if passed is not None:
            passed.wait()
        assert value.item() == step + rank


def message_held_back(count: int) -> None:
    """A message that nobody has asked for yet does not hold up collectives or other messages."""

    def first() -> None:
        work = dist.isend(message(0, 1, 0, count), 1, tag=1)
        dist.broadcast(torch.ones(3), 0)
        dist.send(message(0, 1, 1, count), 1, tag=2)
        work.wait()

    def second() -> None:
        dist.broadcast(torch.zeros(3), 0)
        for tag in (2, 1):
            out = torch.zeros(count)
            dist.recv(out, 0, tag=tag)
            assert torch.equal(out, message(0, 1, tag - 1, count))

    swap(first, second)
    if dist.get_rank() > 1:
        dist.broadcast(torch.zeros(3), 0)


def group_ranks() -> None:
    """Peers may be named by their rank in a group."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size))[-2:])
    if dist.get_rank() >= size - 2:
        me = dist.get_rank(group)
        out = torch.zeros(5)
        work = dist.isend(message(me, 1 - me), group=group, group_dst=1 - me)
        assert dist.recv(out, group=group, group_src=1 - me) == size - 2 + (1 - me)
        work.wait()
        assert torch.equal(out, message(1 - me, me))


@pytest.mark.parametrize("body", [exchange_in_batch, pipeline, group_ranks])
def test_messages_beside_other_work(ranks: Ranks, body: Body) -> None:
    ranks.run(body)


@pytest.mark.parametrize("count", [5, 3_000_000])
def test_a_message_that_no_rank_receives(ranks: Ranks, count: int) -> None:
    ranks.run(message_held_back, count)
