"""The digest by which ranks of several machines see whether they call the same."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.recorder import Raw
from lockstep.watch.agreement import Agreement
from lockstep.watch.digest import Call, Digest, words_of
from lockstep.watch.judge import differences
from lockstep.watch.member import Started

# few values, so that ranks often agree in some of them
WORDS = st.sampled_from([0, 1, 2**63, 2**64 - 1])
CALLS = st.builds(
    Call,
    sequence=st.just(7),
    uneven=st.sampled_from([False, False, False, True]),
    goes_over=st.booleans(),
    fingerprint=st.sampled_from([5, 5, 5, 2**64 - 1]),
    line=WORDS,
    batch=st.sampled_from([-4, -3, -1, 0, 1, 2**40]),
    loop=st.sampled_from([0, 3, 19, 2**64 - 1]),
    name=st.sampled_from([0, 0, 4]),
)
ONE = Call(7, False, False, 5, 1, 3, 19, 0)


def combined(all_of_them: Iterable[Sequence[int]]) -> list[int]:
    """The OR of the words of several ranks, which their all-reduce computes."""
    return [functools.reduce(operator.or_, words) for words in zip(*all_of_them, strict=True)]


def digest(calls: list[Call]) -> Digest:
    return Digest(combined([words_of(call) for call in calls]))


def judged(calls: list[Call]) -> set[str]:
    raws = [Raw(1, 2, c.sequence, c.fingerprint, c.line, c.batch, c.loop, 0, 0, 0, 0, 0, c.name, -1) for c in calls]
    uneven = any(call.uneven for call in calls)
    return {kind for raw in raws for kind in differences(raws[0], raw, uneven)}


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
@example([ONE, replace(ONE, batch=4)])
@example([ONE, replace(ONE, batch=-5, line=2)])
def test_what_is_a_difference_is_never_alike(calls: list[Call]) -> None:
    if judged(calls):
        assert not digest(calls).is_alike
    if judged(calls) - {"lines", "batches"}:
        assert digest(calls).pattern is None, "it may be known already, and not be looked at"


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
def test_who_calls_the_same_needs_no_closer_look(calls: list[Call]) -> None:
    alike = [replace(call, fingerprint=5, line=1, batch=2, loop=calls[0].loop) for call in calls]
    assert digest(alike).is_alike
    loops = [replace(call, line=1, fingerprint=5, loop=number) for number, call in enumerate(calls)]
    assert digest(loops).is_alike, "ranks in other loops may be on other batches"


def test_another_number_of_calls_is_seen() -> None:
    assert digest([ONE, ONE]).counts_alike
    assert not digest([ONE, replace(ONE, sequence=8)]).counts_alike


def test_ranks_that_branch_are_known_by_their_lines_whatever_the_batch() -> None:
    other = replace(ONE, line=2**64 - 2)
    first = digest([ONE, other]).pattern
    assert first is not None
    assert first == digest([other, replace(ONE, batch=3), ONE]).pattern
    later = [replace(ONE, batch=9), replace(other, batch=9)]
    assert digest(later).pattern == first
    assert digest([ONE, other, replace(ONE, line=12345)]).pattern != first
    assert digest([ONE, replace(other, goes_over=True)]).pattern != first, "it may be a swap"
    assert digest([ONE, replace(other, batch=4)]).pattern != first


def test_the_digest_is_as_long_for_many_ranks_as_for_one() -> None:
    assert len(words_of(ONE)) == len(combined([words_of(ONE)] * 1000)) < 64


def test_a_closer_look_is_taken_once_at_ranks_that_branch_or_skip_a_batch_and_never_at_those_that_call_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    agreement = Agreement(None, cast("Any", None))
    monkeypatch.setattr(agreement, "_rows", lambda started, mine: looks.append(started.sequence))
    monkeypatch.setattr(agreement, "judge", lambda started, rows: None)
    calls = [[ONE], [replace(ONE, line=2)], [replace(ONE, batch=4)], [replace(ONE, fingerprint=6)]]
    for turn in range(3):
        for number, others in enumerate(calls):
            words = combined([words_of(ONE)] * 999 + [words_of(call) for call in others])
            agreement._look(Started(0, 10 * turn + number, 0.0), ONE, torch.tensor(words))
    assert looks == [1, 2, 3, 13, 23]
