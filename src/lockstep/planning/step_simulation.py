"""An event simulation of one training step: computing, and the collectives that overlap with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .collective_costs import Cost

FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of DistributedDataParallel; small, so that communication begins early.
"""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        size: bytes.
        ready_s: seconds from the beginning of the backward pass until it is complete.
    """

    size: int
    ready_s: float


def ddp_buckets(
    gradients: Sequence[Gradient], limit: int, first: int = FIRST_BUCKET
) -> list[Gradient]:
    """Return the buckets of DistributedDataParallel: gradients in the order of their arrival, up to
    a limit in bytes.

    A bucket is closed by the gradient with which it reaches its limit, which is `first` for the
    first one. It is ready when all of its gradients are, and after the buckets before it, because
    buckets are sent in order.
    """
    return _buckets(gradients, [min(first, limit), limit])


def equal_buckets(gradients: Sequence[Gradient], limit: int) -> list[Gradient]:
    """Return the buckets of `OrderedReducer`: as `ddp_buckets`, with one limit for all."""
    return _buckets(gradients, [limit])


def _buckets(gradients: Sequence[Gradient], limits: Sequence[int]) -> list[Gradient]:
    buckets: list[Gradient] = []
    size = 0
    ready = 0.0
    for gradient in sorted(gradients, key=lambda tensor: tensor.ready_s):
        size = size + gradient.size
        ready = max(ready, gradient.ready_s)
        if size >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(Gradient(size, ready))
            size = 0
    return [*buckets, Gradient(size, ready)] if size else buckets


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a step.

    Attributes:
        ready_s: seconds of computing after which it may start, from the beginning of the step.
        cost: what it costs.
        follow_up: a second collective, which starts when all computing and all first ones are done;
            None without one.
    """

    ready_s: float
    cost: Cost
    follow_up: Cost | None = None


@dataclass(frozen=True)
class StepPlan:
    """What one worker does in a step.

    Attributes:
        compute_s: seconds of computing until the update needs the sums of the gradients.
        update_s: seconds of computing after that.
        messages: the collectives, in the order in which they are sent.
        slowdown: by how much longer computing takes while a collective runs: 0.1 for 10 %.
        in_flight: collectives that run at the same time; further ones wait.
    """

    compute_s: float
    update_s: float
    messages: Sequence[Message] = field(default=())
    slowdown: float = 0.0
    in_flight: int = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """The result of `simulate`; all in seconds from the beginning of the step.

    Attributes:
        step_s: the duration of the step.
        computed_s: when computing ended, without the update.
        exposed_s: how long the worker then waited for collectives.
        spans: (start, end) of each collective, follow-ups after all others.
    """

    step_s: float
    computed_s: float
    exposed_s: float
    spans: tuple[tuple[float, float], ...]


class _Lanes:
    """One lane of communication in each direction, which collectives occupy in the order in which
    they start.
    """

    def __init__(self, in_flight: int) -> None:
        self._send_free = self._receive_free = 0.0
        self._ends: list[float] = []
        self._in_flight = in_flight
        self.spans: list[tuple[float, float]] = []

    def add(self, ready: float, cost: Cost) -> float:
        """Run a collective that is ready at `ready`, and return when it ends."""
        start = max(ready, self._send_free, self._receive_free)
        if len(self._ends) >= self._in_flight:
            start = max(start, sorted(self._ends)[-self._in_flight])
        self._send_free = start + cost.send_s
        self._receive_free = start + cost.receive_s
        end = start + cost.seconds
        self._ends.append(end)
        self.spans.append((start, end))
        return end


class _Clock:
    """Wall-clock time of a worker whose computing is slowed down while collectives run."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.now = 0.0
        self._computed = 0.0

    def compute_until(self, computed: float, spans: Sequence[tuple[float, float]]) -> None:
        """Compute until `computed` seconds of work are done, while the collectives `spans` run."""
        left = computed - self._computed
        self._computed = computed
        if not self._slowdown:
            self.now += left
            return
        for start, end in _union(spans):
            if end <= self.now:
                continue
            free = max(0.0, start - self.now)
            if left <= free:
                break
            left = left - free
            self.now = self.now + free
            possible = (end - self.now) / (1 + self._slowdown)
            if left <= possible:
                self.now += left * (1 + self._slowdown)
                return
            left = left - possible
            self.now = end
        self.now += left


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def simulate(plan: StepPlan) -> Timeline:
    """Return how a step passes on workers that all do `plan` at the same time.

    The gaps between collectives are found while computing goes on: a collective starts when its
    gradients are ready and the lanes are free, and computing is slower from then until it ends.
    """
    lanes = _Lanes(plan.in_flight)
    clock = _Clock(plan.slowdown)
    ends = []
    for message in plan.messages:
        clock.compute_until(min(message.ready_s, plan.compute_s), lanes.spans)
        ends.append(lanes.add(clock.now, message.cost))
    clock.compute_until(plan.compute_s, lanes.spans)
    computed = now = clock.now
    for message, end in zip(plan.messages, list(ends), strict=True):
        if message.follow_up is not None:
            now = max(now, end)
            ends.append(lanes.add(now, message.follow_up))
    done = max([computed, *ends])
    return Timeline(done + plan.update_s, computed, done - computed, tuple(lanes.spans))
