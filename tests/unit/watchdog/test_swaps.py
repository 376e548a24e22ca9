"""A swap of two calls is told from ranks that take turns by the loop that makes them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.flight_recorder import RawRecord
from lockstep.watchdog.swaps import StackEntry, are_swapped, capture_stack, is_next_iteration

RAW = RawRecord(
    1,
    2,
    3,
    fingerprint=4,
    line=5,
    batch=6,
    loop=7,
    entered=0,
    left=0,
    what=0,
    call_site=0,
    group=0,
    name=0,
    peer=-1,
)


class Calls:
    """Compares the stack of each call with that of the one before."""

    def __init__(self) -> None:
        self.found: list[bool] = []
        self._before: tuple[StackEntry, ...] = ()

    def note(self) -> None:
        frame = sys._getframe(1)
        self.found.append(is_next_iteration(self._before, frame))
        self._before = capture_stack(frame)


class Metric:
    def sync(self, calls: Calls) -> None:
        calls.note()


class Other:
    @torch.no_grad()
    def sync(self, calls: Calls) -> None:
        calls.note()


class Layer(torch.nn.Module):
    def forward(self, calls: Calls) -> Calls:
        calls.note()
        return calls


class OtherLayer(Layer):
    def forward(self, calls: Calls) -> Calls:
        calls.note()
        return calls


def first(calls: Calls) -> None:
    calls.note()


def second(calls: Calls) -> None:
    calls.note()


def over_functions(calls: Calls) -> None:
    for call in (first, second):
        call(calls)


def over_partials(calls: Calls) -> None:
    for call in (functools.partial(first, calls), functools.partial(second, calls)):
        call()


def over_objects(calls: Calls) -> None:
    for _, metric in {"a": Metric(), "b": Other()}.items():
        metric.sync(calls)


def over_objects_the_other_way_round(calls: Calls) -> None:
    [metric.sync(calls) for metric in (Other(), Metric())]


def over_methods(calls: Calls) -> None:
    for call in (Metric().sync, Other().sync):
        call(calls)


def over_layers(calls: Calls) -> None:
    torch.nn.Sequential(Layer(), OtherLayer())(calls)


def by_number(calls: Calls) -> None:
    for number in range(2):
        (first, second)[number](calls)


def by_choice(calls: Calls) -> None:
    for number in range(2):
        metric = Other() if number else Metric()
        metric.sync(calls)


def by_branch(calls: Calls) -> None:
    for number in range(2):
        if number:
            first(calls)
        else:
            second(calls)


def on_lines(calls: Calls) -> None:
    for _ in range(1):
        calls.note()
        calls.note()


def in_two_loops(calls: Calls) -> None:
    for call in (first,):
        call(calls)
    for call in (second,):
        call(calls)


def without_a_loop(calls: Calls) -> None:
    first(calls)
    second(calls)


OVER = (
    over_functions,
    over_partials,
    over_objects,
    over_objects_the_other_way_round,
    over_methods,
    over_layers,
)
NOT_OVER = (by_number, by_choice, by_branch, on_lines, in_two_loops, without_a_loop)


@pytest.mark.parametrize(
    "program, expected", [*((each, True) for each in OVER), *((each, False) for each in NOT_OVER)]
)
def test_whether_a_loop_goes_over_what_it_calls(
    program: Callable[[Calls], None], expected: bool
) -> None:
    calls = Calls()
    program(calls)
    assert calls.found == [False, expected]


def pair(mine: dict[str, Any], theirs: dict[str, Any]) -> Any:
    return replace(RAW, **mine), replace(RAW, **theirs)


def test_swapped_lines_are_swapped_collectives_unless_they_have_names() -> None:
    a, b = {"line": 1}, {"line": 2}
    assert are_swapped(pair(a, b), pair(b, a))
    assert not are_swapped(pair(a, b), pair(a, b))
    assert not are_swapped(pair(a, a), pair(a, a))
    assert not are_swapped(pair(a, b), pair(b, {"line": 3}))
    assert not are_swapped(
        pair(a, b), pair({**b, "fingerprint": 9}, {**a, "fingerprint": 9})
    )  # a root that changes
    assert not are_swapped(pair({**a, "name": 1}, {**b, "name": 1}), pair(b, a))
