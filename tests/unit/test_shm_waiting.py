"""How a wait passes its time: it spins, yields the core, sleeps, and looks now and then whether it is worth it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from lockstep.transports.shm import waiting
from lockstep.transports.shm.waiting import CHECK_S, SPINS, Waiter


class Clock:
    """Time that passes only by yielding (20 µs) and by sleeping."""

    def __init__(self) -> None:
        self.now, self.yields = 100.0, 0
        self.naps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds

    def sched_yield(self) -> None:
        self.yields += 1
        self.now += 20e-6


class Looks:
    """What the waits have asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], float, float]] = []

    def check(self, what: str, awaited: Iterable[int], waited: float, timeout: float) -> None:
        self.asked.append((what, list(awaited), waited, timeout))
        if waited > timeout:
            raise TimeoutError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    monkeypatch.setattr(waiting, "os", SimpleNamespace(sched_yield=made.sched_yield))
    return made


def two() -> list[int]:
    return [2]


def test_the_modules_names_are_those_that_the_tests_replace() -> None:
    assert (waiting.time, waiting.os) == (time, os)


def test_a_wait_spins_then_yields_then_sleeps_ever_longer(clock: Clock) -> None:
    waiter = Waiter("barrier", 1.0, Looks().check, crowded=False)
    waiter.pause(None)
    for _ in range(SPINS):
        waiter.pause(two)
    assert (clock.yields, clock.naps) == (0, [])
    while not clock.naps:
        waiter.pause(two)
    assert clock.yields > 0
    for _ in range(300):
        waiter.pause(two)
    assert clock.naps == sorted(clock.naps)
    assert clock.naps[0] < 100e-6
    assert 0.5e-3 <= clock.naps[-1] <= 2e-3


def test_with_more_ranks_than_cores_nobody_spins(clock: Clock) -> None:
    waiter = Waiter("barrier", 1.0, Looks().check, crowded=True)
    waiter.pause(None)
    waiter.pause(two)
    assert clock.yields == 1


def test_the_patience_begins_anew_with_every_wait_but_the_time_limit_does_not(clock: Clock) -> None:
    looks = Looks()
    waiter = Waiter("barrier", 1.0, looks.check, crowded=True)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            waiter.pause(None)
            naps = len(clock.naps)
            while clock.naps[naps:] == []:
                waiter.pause(two)
            assert clock.naps[naps] < 100e-6
            clock.now += 0.02
    assert 1.0 < looks.asked[-1][2] < 1.1


def test_a_long_wait_is_looked_at_regularly_and_ends_at_its_limit(clock: Clock) -> None:
    looks = Looks()
    waiter = Waiter("barrier", 1.0, looks.check, crowded=True)
    with pytest.raises(TimeoutError):
        while True:
            waiter.pause(two)
    whats, ranks, waited, limits = zip(*looks.asked, strict=True)
    assert (set(whats), set(limits)) == ({"barrier"}, {1.0})
    assert all(each == [2] for each in ranks)
    assert 0.9 / CHECK_S <= len(waited) <= 1.1 / CHECK_S
    assert 1.0 < waited[-1] < 1.0 + 2 * CHECK_S


def test_a_short_wait_is_not_looked_at(clock: Clock) -> None:
    looks = Looks()
    waiter = Waiter("barrier", 1.0, looks.check, crowded=False)
    for _ in range(SPINS + 50):
        waiter.pause(two)
    assert looks.asked == []
