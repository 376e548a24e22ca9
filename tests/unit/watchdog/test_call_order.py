"""Asynchronous calls that wait for their pre-flight checks start in their order, and end with the
checks' errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import DesyncError
from lockstep.watchdog.call_order import CallOrder

Future = torch.futures.Future[Any]


class Work(dist.Work):
    """One that completes when its future does."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.future: Future = torch.futures.Future()
        self.value = value

    def end(self) -> None:
        self.future.set_result([self.value])

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self.future.done())

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self.future.value()

    def get_future(self) -> Any:
        return self.future


class Group:
    """Notes what is started, in its order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.checks: dict[str, Future] = {}
        self.works: dict[str, Work] = {}
        self.order = CallOrder(lambda: None)

    def check(self, name: str) -> Callable[[], Future]:
        def begin() -> Future:
            self.started.append(f"check {name}")
            self.checks[name] = torch.futures.Future()
            return self.checks[name]

        return begin

    def call(self, name: str) -> Callable[[], tuple[Any, Any]]:
        def start() -> tuple[Any, Any]:
            self.started.append(name)
            self.works[name] = Work(name)
            return self.works[name], None

        return start

    def add(self, name: str, waits: bool = True) -> Any:
        return self.order.add(self.check(name) if waits else None, self.call(name))


def test_a_call_starts_when_its_check_has_ended_and_those_behind_it_afterwards() -> None:
    group = Group()
    a, b, c = group.add("a"), group.add("b", waits=False), group.add("c")
    assert group.started == ["check a"]
    assert not a.is_completed()
    with pytest.raises(RuntimeError, match="timed out"):
        a.wait(timedelta(seconds=0.01))
    group.checks["a"].set_result(None)
    assert group.started == ["check a", "a", "b", "check c"]
    assert not group.order.is_free
    group.checks["c"].set_result(None)
    assert group.started[-1] == "c"
    assert group.order.is_free
    for name, work in (("a", a), ("b", b), ("c", c)):
        assert not work.is_completed()
        group.works[name].end()
        assert work.is_completed()
        assert work.is_success()
        assert work.wait()
        assert work.result() == [name]
        assert work.get_future().wait() == [name]


def test_the_error_of_a_check_is_that_of_its_call_and_of_all_behind_it() -> None:
    group = Group()
    works = [group.add("a"), group.add("b"), group.add("c", waits=False)]
    futures = [work.get_future() for work in works]
    group.checks["a"].set_exception(DesyncError("they differ"))
    assert group.started == ["check a"], "nothing else has started"
    for work, future in zip(works, futures, strict=True):
        with pytest.raises(Exception, match="they differ"):
            work.wait()
        with pytest.raises(Exception, match="they differ"):
            future.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is not None
    assert group.order.is_free


def test_a_future_that_was_asked_for_before_the_call_had_started_gets_its_value() -> None:
    group = Group()
    early = group.add("a").get_future()
    group.checks["a"].set_result(None)
    assert not early.done()
    group.works["a"].end()
    assert early.wait() == ["a"]


def test_what_waits_for_a_call_may_wait_for_one_behind_it() -> None:
    """As a communication hook does, which starts a collective when another one has ended."""
    group = Group()
    first, second = group.add("a"), group.add("b")
    seen: list[Any] = []

    def wait_for_second(_: Future) -> None:
        group.checks["b"].set_result(None)
        group.works["b"].end()
        seen.append(second.wait())

    first.get_future().add_done_callback(wait_for_second)
    group.checks["a"].set_result(None)
    group.works["a"].end()
    assert seen == [True]


def test_a_call_whose_arguments_are_refused_holds_up_nobody() -> None:
    group = Group()

    def refuse() -> tuple[Any, Any]:
        raise ValueError("not these")

    refused = group.order.add(group.check("a"), refuse)
    group.add("b")
    group.checks["a"].set_result(None)
    with pytest.raises(ValueError, match="not these"):
        refused.wait()
    assert group.started == ["check a", "check b"]


def test_a_blocking_call_waits_until_all_before_it_have_started_or_it_is_interrupted() -> None:
    group = Group()
    group.add("a")
    waiter = threading.Thread(target=group.order.wait)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    group.checks["a"].set_result(None)
    waiter.join(10)
    assert not waiter.is_alive()

    def interrupt() -> None:
        raise KeyboardInterrupt

    order = CallOrder(interrupt)
    order.add(group.check("c"), group.call("c"))
    with pytest.raises(KeyboardInterrupt):
        order.wait()
