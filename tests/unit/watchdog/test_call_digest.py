"""The digest by which ranks of several hosts see whether they call the same."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lockstep.flight_recorder import RawRecord
from lockstep.watchdog.mismatch import compare_records
from lockstep.watchdog.preflight import CallInfo, Digest, PreflightCheck, encode
from lockstep.watchdog.shared_state import PendingCall

# few values, so that ranks often agree in some of them
WORDS = st.sampled_from([0, 1, 2**63, 2**64 - 1])
CALLS = st.builds(
    CallInfo,
    sequence=st.just(7),
    uneven=st.sampled_from([False, False, False, True]),
    may_be_swapped=st.booleans(),
    fingerprint=st.sampled_from([5, 5, 5, 2**64 - 1]),
    line=WORDS,
    batch=st.sampled_from([-4, -3, -1, 0, 1, 2**40]),
    loop=st.sampled_from([0, 3, 19, 2**64 - 1]),
    name=st.sampled_from([0, 0, 4]),
)
ONE = CallInfo(7, False, False, 5, 1, 3, 19, 0)


def combined(all_of_them: Iterable[Sequence[int]]) -> list[int]:
    """The OR of the words of several ranks, which their all-reduce computes."""
    return [functools.reduce(operator.or_, words) for words in zip(*all_of_them, strict=True)]


def digest(calls: list[CallInfo]) -> Digest:
    return Digest(combined([encode(call) for call in calls]))


def judged(calls: list[CallInfo]) -> set[str]:
    raws = [
        RawRecord(
            1, 2, c.sequence, c.fingerprint, c.line, c.batch, c.loop, 0, 0, 0, 0, 0, c.name, -1
        )
        for c in calls
    ]
    uneven = any(call.uneven for call in calls)
    return {kind for raw in raws for kind in compare_records(raws[0], raw, uneven)}


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
@example([ONE, replace(ONE, batch=4)])
@example([ONE, replace(ONE, batch=-5, line=2)])
def test_calls_that_differ_never_have_equal_digests(calls: list[CallInfo]) -> None:
    if judged(calls):
        assert not digest(calls).is_equal
    if judged(calls) - {"lines", "batches"}:
        assert digest(calls).pattern is None, "it may be known already, and not be looked at"


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
def test_equal_calls_have_equal_digests(calls: list[CallInfo]) -> None:
    alike = [replace(call, fingerprint=5, line=1, batch=2, loop=calls[0].loop) for call in calls]
    assert digest(alike).is_equal
    loops = [replace(call, line=1, fingerprint=5, loop=number) for number, call in enumerate(calls)]
    assert digest(loops).is_equal, "ranks in other loops may be on other batches"


def test_another_number_of_calls_is_seen() -> None:
    assert digest([ONE, ONE]).same_sequence
    assert not digest([ONE, replace(ONE, sequence=8)]).same_sequence


def test_ranks_that_branch_are_known_by_their_lines_whatever_the_batch() -> None:
    other = replace(ONE, line=2**64 - 2)
    first = digest([ONE, other]).pattern
    assert first is not None
    assert first == digest([other, replace(ONE, batch=3), ONE]).pattern
    later = [replace(ONE, batch=9), replace(other, batch=9)]
    assert digest(later).pattern == first
    assert digest([ONE, other, replace(ONE, line=12345)]).pattern != first
    assert digest([ONE, replace(other, may_be_swapped=True)]).pattern != first, "it may be a swap"
    assert digest([ONE, replace(other, batch=4)]).pattern != first


def test_the_digest_is_as_long_for_many_ranks_as_for_one() -> None:
    assert len(encode(ONE)) == len(combined([encode(ONE)] * 1000)) < 64


def test_calls_are_exchanged_once_where_ranks_branch_or_skip_a_batch_and_never_where_they_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    check = PreflightCheck(None, cast("Any", None), 1, (0, 1), cast("Any", None), lambda work: None)
    monkeypatch.setattr(
        check, "_exchange_calls", lambda pending, mine: looks.append(pending.sequence)
    )
    monkeypatch.setattr(check, "compare_calls", lambda pending, calls: None)
    calls = [[ONE], [replace(ONE, line=2)], [replace(ONE, batch=4)], [replace(ONE, fingerprint=6)]]
    for turn in range(3):
        for number, others in enumerate(calls):
            words = combined([encode(ONE)] * 999 + [encode(call) for call in others])
            check._evaluate(PendingCall(0, 10 * turn + number, 0.0), ONE, torch.tensor(words))
    assert looks == [1, 2, 3, 13, 23]
