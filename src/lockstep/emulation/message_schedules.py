"""When messages between virtual hosts arrive: the link clocks of their network cards, and each
collective's messages.

What is modelled: a card sends one message after another, and receives one after another, at the
same time (full duplex); the switch between the cards never blocks; a message's bytes flow through
both cards at once (cut-through). Ranks on one virtual host exchange messages at no time of their
own. A collective is the messages of one algorithm, that of Gloo where it has one; segments of a
message are not pipelined through several ranks.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..network import VirtualNetwork

BUSY_TIMES = 64
"""How many busy times of a card are kept: an all-reduce among 16 hosts has 30."""


class Cards:
    """The link clocks of all network cards: when each is free to send, and to receive.

    Args:
        network: that is emulated.
        started: the time at which the job began, by which links are cut.

    A collective's messages are sent as soon as all its ranks have called it, most of them in the
    future; a message of another collective may come before them. So a clock is the times in which
    its card is busy, and a message takes the first gap that is long enough. Where messages are sent
    in the order of time, that is start = max(now, free).

    Attributes:
        sends: per host, when its card is busy sending: begin and end, begin and end, …, ascending.
        receives: the same for receiving.
    """

    def __init__(self, network: VirtualNetwork, started: float = 0.0) -> None:
        self._cards = [network.card(host) for host in range(network.hosts)]
        self._jitter = network.jitter * network.dilation
        self._cuts = {
            frozenset(cut.hosts): started + cut.after * network.dilation
            for cut in sorted(network.cuts, key=lambda cut: -cut.after)
        }
        self.sends: list[list[float]] = [[] for _ in range(network.hosts)]
        self.receives: list[list[float]] = [[] for _ in range(network.hosts)]

    def forget(self, before: float) -> None:
        """Forget the busy times that ended before `before`; no message is sent earlier any more."""
        for busy in (*self.sends, *self.receives):
            del busy[: bisect.bisect_right(busy, before) // 2 * 2]

    def send(
        self, source: int, target: int, size: float, now: float, draw: float = 0.0
    ) -> tuple[float, float]:
        """Send a message at the time `now`; return when it has left `source`, and when `target` has
        all of it.

        Args:
            source: the sending host.
            target: another host.
            size: bytes.
            now: seconds.
            draw: from 0 to 1, which part of the jitter it suffers.

        Returns:
            The two times; the second is infinite if the link between the two is lost.
        """
        sender = self._cards[source]
        receiver = self._cards[target]
        start = _reserve(self.sends[source], now, size / sender.bandwidth)
        free = start + size / sender.bandwidth
        if start >= self._cuts.get(frozenset((source, target)), math.inf):
            return free, math.inf
        latency = max(sender.latency, receiver.latency) + draw * self._jitter
        begin = _reserve(self.receives[target], start + latency, size / receiver.bandwidth)
        return free, max(begin + size / receiver.bandwidth, free + latency)


def _reserve(busy: list[float], begin: float, duration: float) -> float:
    """Reserve the first gap from `begin` on that is as long as `duration`; return when it
    begins.
    """
    at = bisect.bisect_right(busy, begin)
    if at % 2:  # within a busy time
        begin = busy[at]
        at = at + 1
    while at < len(busy) and busy[at] < begin + duration:
        begin = busy[at + 1]
        at = at + 2
    if duration > 0:
        if at and busy[at - 1] == begin:
            busy[at - 1] = begin + duration
        else:
            busy[at:at] = [begin, begin + duration]
        while len(busy) > 2 * BUSY_TIMES:
            del busy[1:3]  # the gap between the oldest two
    return begin


@dataclass(frozen=True, slots=True)
class Message:
    """A message between two ranks of a group; `size` in bytes."""

    source: int
    target: int
    size: float


Rounds = Sequence[Sequence[Message]]
"""The messages of a collective. Those of one round are sent at the same time, each when its source
has received all its messages of earlier rounds."""


def _ring(ranks: int, rounds: int, sizes: Sequence[float]) -> list[list[Message]]:
    return [
        [Message(rank, (rank + 1) % ranks, sizes[(rank - i) % ranks]) for rank in range(ranks)]
        for i in range(rounds)
    ]


def all_reduce(sizes: Sequence[float], root: int) -> Rounds:
    """Return a ring's 2 (n - 1) rounds of the n-th part of the tensor: a reduce-scatter and an
    all-gather.
    """
    ranks = len(sizes)
    return _ring(ranks, 2 * (ranks - 1), [max(sizes) / ranks] * ranks)


def reduce_scatter(sizes: Sequence[float], root: int) -> Rounds:
    """Return the first half of `all_reduce`; `sizes` are those of the inputs."""
    ranks = len(sizes)
    return _ring(ranks, ranks - 1, [max(sizes) / ranks] * ranks)


def all_gather(sizes: Sequence[float], root: int) -> Rounds:
    """Return a ring's n - 1 rounds, in which each rank passes on what it has received."""
    return _ring(len(sizes), len(sizes) - 1, sizes)


def reduce(sizes: Sequence[float], root: int) -> Rounds:
    """Return a reduce-scatter around a ring, and each rank's part to the root."""
    ranks = len(sizes)
    to_root = [Message(rank, root, max(sizes) / ranks) for rank in range(ranks) if rank != root]
    return [*reduce_scatter(sizes, root), to_root]


def broadcast(sizes: Sequence[float], root: int) -> Rounds:
    """Return the ceil(log2 n) rounds of a binomial tree."""
    ranks = len(sizes)
    size = max(sizes)
    rounds = []
    reach = 1
    while reach < ranks:
        senders = range(min(reach, ranks - reach))
        rounds.append(
            [Message((root + i) % ranks, (root + i + reach) % ranks, size) for i in senders]
        )
        reach *= 2
    return rounds


def gather(sizes: Sequence[float], root: int) -> Rounds:
    """Return each rank's message to the root."""
    return [[Message(rank, root, size) for rank, size in enumerate(sizes) if rank != root]]


def scatter(sizes: Sequence[float], root: int) -> Rounds:
    """Return the root's message to each rank; `sizes` are those of the outputs."""
    return [[Message(root, rank, size) for rank, size in enumerate(sizes) if rank != root]]


def all_to_all(sizes: Sequence[float], root: int) -> Rounds:
    """Return a message of the n-th part of its input from each rank to each other one, all at
    once.
    """
    ranks = len(sizes)
    steps = range(1, ranks)
    return [
        [
            Message(rank, (rank + i) % ranks, sizes[rank] / ranks)
            for i in steps
            for rank in range(ranks)
        ]
    ]


def barrier(sizes: Sequence[float], root: int) -> Rounds:
    """Return the ceil(log2 n) rounds of a dissemination barrier, of messages without bytes."""
    ranks = len(sizes)
    rounds = []
    distance = 1
    while distance < ranks:
        rounds.append([Message(rank, (rank + distance) % ranks, 0.0) for rank in range(ranks)])
        distance *= 2
    return rounds


ROUNDS: Mapping[str, Callable[[Sequence[float], int], Rounds]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all,
    "barrier": barrier,
}
"""Each collective's messages, from the bytes of each rank's tensor and the root. All-reduce,
reduce, broadcast, all-gather, gather, scatter and all-to-all are Gloo's algorithms; torch's Gloo
backend does a reduce-scatter as an all-reduce, which is twice the bytes of the one that is modelled
here."""


def finish_times(
    cards: Cards,
    rounds: Rounds,
    hosts: Sequence[int],
    arrivals: Sequence[float],
    draws: random.Random | None = None,
) -> list[float]:
    """Send the messages of a collective; return for each rank when it has sent and received all of
    its own.

    Args:
        cards: whose clocks move on.
        rounds: of the collective.
        hosts: the virtual host of each rank.
        arrivals: when each rank has called the collective.
        draws: of the jitter; None for none.
    """
    cards.forget(min(arrivals))
    ready = list(arrivals)
    done = list(arrivals)
    for messages in rounds:
        begun = list(ready)
        for message in messages:
            source = hosts[message.source]
            target = hosts[message.target]
            now = begun[message.source]
            left = now
            there = now
            if source != target and now < math.inf:
                left, there = cards.send(
                    source, target, message.size, now, draws.random() if draws else 0.0
                )
            done[message.source] = max(done[message.source], left)
            ready[message.target] = max(ready[message.target], there)
    return [max(times) for times in zip(ready, done, strict=True)]
