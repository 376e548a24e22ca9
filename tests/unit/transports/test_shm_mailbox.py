"""Messages through rings in shared memory, step by step: order, matching, sizes, and receives that
are given up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import TransportError
from lockstep.transports.runtime.backoff import Awaited, Steps
from lockstep.transports.shm.memory_layout import RING, Layout, plan
from lockstep.transports.shm.point_to_point import MessageQueues, PostedReceive
from lockstep.transports.shm.rank_states import RankStates
from lockstep.transports.shm.segment import share

FRAGMENT = 512  # bytes; small, so that small messages are long ones
RANKS = 3


def make() -> tuple[list[RankStates], list[MessageQueues]]:
    """Three ranks' states and message queues over the same memory."""
    layout = Layout(RANKS, plan(RANKS, 1 << 20).chunk, FRAGMENT)
    segment = share(dist.HashStore(), 0, 1, layout.total)
    rank_states = [RankStates(segment, layout, rank, range(RANKS)) for rank in range(RANKS)]
    for states in rank_states:
        states.announce(os.getpid())
    return rank_states, [MessageQueues(segment, layout, states) for states in rank_states]


class Post:
    """The message queues of three ranks, and operations between them."""

    def __init__(self) -> None:
        self.rank_states, self.queues = make()

    def send(self, source: int, target: int, tensor: torch.Tensor, tag: int = 0) -> Steps:
        return self.queues[source].send(tensor, target, tag)

    def receive(self, target: int, source: int | None, tensor: torch.Tensor, tag: int = 0) -> Steps:
        return self.queues[target].receive(
            self.queues[target].post(PostedReceive(tensor, source, tag))
        )

    def deliver(self, source: int, target: int, tensor: torch.Tensor, tag: int = 0) -> None:
        """A message as a whole."""
        into = torch.empty_like(tensor)
        drive(self.send(source, target, tensor, tag), self.receive(target, source, into, tag))
        assert into.equal(tensor)


@pytest.fixture
def post() -> Iterator[Post]:
    made = Post()
    yield made
    vars(made).clear()  # pytest keeps the object, and nothing shall keep the memory


def go(steps: Steps) -> Awaited | None:
    """Until it has to wait; whom it awaits then, None if it has ended."""
    for awaited in steps:
        if awaited is not None:
            return awaited
    return None


def drive(*operations: Steps) -> None:
    """All to their ends, in turns."""
    left = list(operations)
    for _ in range(10_000):
        left = [steps for steps in left if go(steps) is not None]
        if not left:
            return
    raise AssertionError("no end")


def message(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


# --- sizes and kinds
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receiver_first", [True, False])
@pytest.mark.parametrize(
    "nbytes", [0, 1, FRAGMENT - 1, FRAGMENT, FRAGMENT + 1, RING * FRAGMENT, 9 * FRAGMENT + 7]
)
def test_a_message_of_any_size(post: Post, nbytes: int, receiver_first: bool) -> None:
    for turn in range(RING + 1):  # so that it begins at every place of the ring
        data, into = message(nbytes, turn), torch.empty(nbytes, dtype=torch.uint8)
        steps = [post.receive(1, 0, into), post.send(0, 1, data)]
        drive(*(steps if receiver_first else reversed(steps)))
        assert into.equal(data)


def test_a_message_that_the_ring_holds_is_sent_before_it_is_received(post: Post) -> None:
    assert go(post.send(0, 1, message(RING * FRAGMENT))) is None
    awaited = go(post.send(0, 1, message(1)))
    assert awaited is not None
    assert list(awaited()) == [1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.half, torch.float64, torch.complex64])
def test_tensors_that_are_not_contiguous(post: Post, dtype: torch.dtype) -> None:
    data = message(16 * 40 * dtype.itemsize).remainder(2).view(dtype).view(16, 40).mT
    room = torch.zeros(40, 32, dtype=dtype)
    drive(post.receive(1, 0, room[:, ::2]), post.send(0, 1, data))
    assert room[:, ::2].equal(data)
    assert not room[:, 1::2].any()


def test_a_conjugate_is_sent_and_received_as_what_it_means(post: Post) -> None:
    data, into = torch.tensor([1 + 2j, 3 - 4j]), torch.zeros(2, dtype=torch.complex64)
    drive(post.receive(1, 0, into.conj()), post.send(0, 1, data.conj()))
    assert into.conj().equal(data.conj())


@pytest.mark.parametrize("wanted", [0, 3, FRAGMENT * 6])
@pytest.mark.parametrize("early", [True, False])
def test_a_message_of_another_size_is_an_error_and_the_next_is_right(
    post: Post, wanted: int, early: bool
) -> None:
    into = torch.zeros(wanted, dtype=torch.uint8)
    sending = [post.send(0, 1, message(FRAGMENT * 2))]
    if early:
        drive(sending.pop())
    with pytest.raises(
        TransportError, match=rf"rank 0 sent 1024 bytes \(tag 0\).* receives into {wanted} bytes"
    ):
        drive(post.receive(1, 0, into), *sending)
    assert not into.any()
    post.deliver(0, 1, message(FRAGMENT * 6))


# --- order and matching
# ---------------------------------------------------------------------------------------

MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([(0, 1), (2, 1), (0, 2)]),
        st.integers(0, 2),
        st.integers(0, FRAGMENT * (RING + 2)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(MESSAGES, st.randoms(use_true_random=False))
def test_what_is_sent_with_one_tag_arrives_in_order(
    messages: list[tuple[tuple[int, int], int, int]], chance
) -> None:  # type: ignore[no-untyped-def]
    """Whatever is posted before or after what; receives of different tags are posted in any
    order.
    """
    post = Post()
    queues: dict[tuple[int, int], list[Steps]] = {}
    receives, expected = [], []
    for number, ((source, target), tag, nbytes) in enumerate(messages):
        data, into = message(nbytes, number), torch.empty(nbytes, dtype=torch.uint8)
        queues.setdefault((source, target), []).append(post.send(source, target, data, tag))
        receives.append((tag, source, target, into))
        expected.append((into, data))
    chance.shuffle(tags := [0, 1, 2])
    ordered = [each for tag in tags for each in receives if each[0] == tag]
    running: list[Steps] = [_one_after_another(queue) for queue in queues.values()]
    while ordered or running:
        if ordered and (not running or chance.random() < 0.5):
            tag, source, target, into = ordered.pop(0)
            running.append(post.receive(target, source, into, tag))
        chance.shuffle(running)
        running = [steps for steps in running if go(steps) is not None]
    assert all(into.equal(data) for into, data in expected)


def _one_after_another(queue: list[Steps]) -> Steps:
    for steps in queue:
        yield from steps


def test_a_receive_from_any_rank_takes_the_first_message_and_reports_its_source(post: Post) -> None:
    into = torch.empty(5, dtype=torch.uint8)
    receive = post.queues[1].post(PostedReceive(into, None, 3))
    steps = post.queues[1].receive(receive)
    assert go(steps) is not None
    drive(post.send(0, 1, message(9), tag=4), post.send(2, 1, message(5), tag=3), steps)
    assert receive.source == 2
    assert into.equal(message(5))
    post.deliver(0, 1, message(1), tag=3)


def test_the_receive_that_was_posted_first_gets_the_message(post: Post) -> None:
    first, second = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    drive(post.send(0, 1, message(1, 5)), post.send(0, 1, message(1, 6)))
    operations = [post.receive(1, None, first), post.receive(1, 0, second)]
    drive(*reversed(operations))
    assert (first.item(), second.item()) == (message(1, 5).item(), message(1, 6).item())


# --- who is awaited
# -------------------------------------------------------------------------------------------


def awaited(steps: Steps) -> list[int]:
    found = go(steps)
    assert found is not None
    return list(found())


def test_a_receive_awaits_its_source(post: Post) -> None:
    assert awaited(post.receive(1, 2, message(1))) == [2]
    post.rank_states[2].close()
    assert awaited(post.receive(1, 2, message(1))) == [2]


def test_a_receive_from_any_rank_awaits_those_who_have_left_only_when_nobody_else_is_there(
    post: Post,
) -> None:
    """A worker that has sent its result and left is no reason to give up waiting for the other
    workers'.
    """
    steps = post.receive(1, None, message(1))
    assert awaited(steps) == [0, 2]
    post.rank_states[0].close()
    assert awaited(steps) == [2]
    post.rank_states[2].close()
    assert awaited(steps) == [0, 2]


def test_a_message_that_has_begun_is_awaited_from_its_sender(post: Post) -> None:
    steps = post.receive(1, None, message(9 * FRAGMENT))
    assert go(steps) is not None
    sending = post.send(2, 1, message(9 * FRAGMENT))
    assert go(sending) is not None
    assert awaited(steps) == [2]


def test_nobody_is_awaited_when_a_fragment_is_there_that_has_not_been_read(post: Post) -> None:
    """The sender may have put it there, and ended, since this rank has looked."""
    for source in (2, None):
        steps = post.receive(1, source, message(1))
        found = go(steps)
        assert found is not None
        asked = found()
        assert go(post.send(2, 1, message(1))) is None
        assert list(asked) == []
        drive(steps)


# --- receives that are given up
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [0, None])
def test_a_receive_that_is_given_up_takes_no_message(post: Post, source: int | None) -> None:
    given_up = torch.zeros(4, dtype=torch.uint8)
    steps = post.receive(1, source, given_up)
    assert go(steps) is not None
    steps.close()
    post.deliver(0, 1, message(4))
    assert not given_up.any()


def test_a_message_whose_receive_is_given_up_halfway_is_for_the_next(post: Post) -> None:
    data, given_up = message(9 * FRAGMENT), torch.zeros(9 * FRAGMENT, dtype=torch.uint8)
    steps, sending = post.receive(1, 0, given_up), post.send(0, 1, data)
    assert go(sending) is not None
    assert go(steps) is not None
    steps.close()
    arrived = given_up.clone()
    into = torch.empty_like(data)
    drive(sending, post.receive(1, 0, into))
    assert into.equal(data)
    assert given_up.equal(arrived), "its caller's tensor was written to later"
    post.deliver(0, 1, message(3))


def test_a_receive_that_nobody_has_driven_can_be_withdrawn(post: Post) -> None:
    given_up = post.queues[1].post(PostedReceive(torch.zeros(3), 0, 0))
    for _ in range(2):
        post.queues[1].cancel(given_up)
    post.deliver(0, 1, torch.arange(3.0))


def test_a_receive_withdrawn_twice_leaves_its_message_to_one_other(post: Post) -> None:
    tensor = torch.arange(2.0 * FRAGMENT)
    sending = post.send(0, 1, tensor)
    go(sending)
    given_up = post.queues[1].post(PostedReceive(torch.zeros_like(tensor), 0, 0))
    receiving = post.queues[1].receive(given_up)
    go(receiving)
    receiving.close()
    post.queues[1].cancel(given_up)
    into, other = torch.zeros_like(tensor), torch.zeros(1)
    drive(sending, post.receive(1, 0, into))
    assert into.equal(tensor)
    drive(post.send(0, 1, torch.ones(1)), post.receive(1, 0, other))
    assert other.item() == 1
