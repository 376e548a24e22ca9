"""The back-off of a wait: it spins, yields the core, sleeps, and checks periodically whether it is
hopeless.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from lockstep.transports.runtime import backoff
from lockstep.transports.runtime.backoff import CHECK_S, SPINS, Backoff


class Clock:
    """Time that passes only by yielding (20 µs) and by sleeping."""

    def __init__(self) -> None:
        self.now, self.yields = 100.0, 0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def sched_yield(self) -> None:
        self.yields += 1
        self.now += 20e-6


class Checks:
    """Records the checks of waits."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], float, float]] = []

    def check(self, what: str, awaited: Iterable[int], waited: float, timeout: float) -> None:
        self.calls.append((what, list(awaited), waited, timeout))
        if waited > timeout:
            raise TimeoutError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(backoff, "time", made)
    monkeypatch.setattr(backoff, "os", SimpleNamespace(sched_yield=made.sched_yield))
    return made


def two() -> list[int]:
    return [2]


def test_the_modules_names_are_those_that_the_tests_replace() -> None:
    assert (backoff.time, backoff.os) == (time, os)


def test_a_wait_spins_then_yields_then_sleeps_ever_longer(clock: Clock) -> None:
    wait = Backoff("barrier", 1.0, Checks().check, oversubscribed=False)
    wait.pause(None)
    for _ in range(SPINS):
        wait.pause(two)
    assert (clock.yields, clock.sleeps) == (0, [])
    while not clock.sleeps:
        wait.pause(two)
    assert clock.yields > 0
    for _ in range(300):
        wait.pause(two)
    assert clock.sleeps == sorted(clock.sleeps)
    assert clock.sleeps[0] < 100e-6
    assert 0.5e-3 <= clock.sleeps[-1] <= 2e-3


def test_with_more_ranks_than_cores_no_wait_spins(clock: Clock) -> None:
    wait = Backoff("barrier", 1.0, Checks().check, oversubscribed=True)
    wait.pause(None)
    wait.pause(two)
    assert clock.yields == 1


def test_the_back_off_restarts_with_every_wait_but_the_time_limit_does_not(clock: Clock) -> None:
    checks = Checks()
    wait = Backoff("barrier", 1.0, checks.check, oversubscribed=True)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            wait.pause(None)
            slept = len(clock.sleeps)
            while clock.sleeps[slept:] == []:
                wait.pause(two)
            assert clock.sleeps[slept] < 100e-6
            clock.now += 0.02
    assert 1.0 < checks.calls[-1][2] < 1.1


def test_a_long_wait_is_checked_regularly_and_ends_at_its_limit(clock: Clock) -> None:
    checks = Checks()
    wait = Backoff("barrier", 1.0, checks.check, oversubscribed=True)
    with pytest.raises(TimeoutError):
        while True:
            wait.pause(two)
    whats, ranks, waited, limits = zip(*checks.calls, strict=True)
    assert (set(whats), set(limits)) == ({"barrier"}, {1.0})
    assert all(each == [2] for each in ranks)
    assert 0.9 / CHECK_S <= len(waited) <= 1.1 / CHECK_S
    assert 1.0 < waited[-1] < 1.0 + 2 * CHECK_S


def test_a_wait_that_always_begins_anew_ends_at_its_limit(clock: Clock) -> None:
    """MPI's requests seem to make progress whenever a test of them takes longer than the quickest
    one did.
    """
    checks = Checks()
    wait = Backoff("barrier", 1.0, checks.check, oversubscribed=True)
    with pytest.raises(TimeoutError):
        for _ in range(10**6):
            wait.pause(None)
            clock.now += 10e-6
    assert 1.0 < checks.calls[-1][2] < 1.0 + 2 * CHECK_S


def test_a_short_wait_is_not_checked(clock: Clock) -> None:
    checks = Checks()
    wait = Backoff("barrier", 1.0, checks.check, oversubscribed=False)
    for _ in range(SPINS + 50):
        wait.pause(two)
    assert checks.calls == []
