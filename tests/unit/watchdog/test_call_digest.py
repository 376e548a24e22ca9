"""The digest by which ranks of several hosts see whether they call the same."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lockstep.flight_recorder import RawRecord
from lockstep.watchdog.mismatch import compare_records
from lockstep.watchdog.preflight import Digest, PreflightCheck, encode
from lockstep.watchdog.shared_state import PendingCall
from lockstep.watchdog.states import RecordRow

# few values, so that ranks often agree in some of them
WORDS = st.sampled_from([0, 1, 2**63, 2**64 - 1])
CALLS = st.builds(
    RecordRow,
    sequence=st.just(7),
    fingerprint=st.sampled_from([5, 5, 5, 2**64 - 1]),
    line=WORDS,
    batch=st.sampled_from([-4, -3, -1, 0, 1, 2**40]),
    loop=st.sampled_from([0, 3, 19, 2**64 - 1]),
    name=st.sampled_from([0, 0, 1]),
)
UNEVEN = st.sampled_from([False, False, False, True])
ONE = RecordRow(7, 5, 1, 3, 19, 0)


def combined(all_of_them: Iterable[Sequence[int]]) -> list[int]:
    """The OR of the words of several ranks, which their all-reduce computes."""
    return [functools.reduce(operator.or_, words) for words in zip(*all_of_them, strict=True)]


def digest(calls: list[RecordRow], uneven: bool = False) -> Digest:
    """The digest of calls of ranks of which the first says whether batches are uneven."""
    own = encode(calls[0], uneven)
    return Digest(combined([own, *(encode(call) for call in calls[1:])]))


def judged(calls: list[RecordRow], uneven: bool) -> set[str]:
    return {kind for call in calls for kind in compare_records(calls[0], call, uneven)}


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5), UNEVEN)
@example([ONE, replace(ONE, batch=4)], False)
@example([ONE, replace(ONE, batch=-5, line=2)], False)
def test_calls_that_differ_never_have_equal_digests(calls: list[RecordRow], uneven: bool) -> None:
    differences = judged(calls, uneven)
    if differences:
        assert not digest(calls, uneven).is_equal
    if differences - {"lines", "batches"}:
        assert digest(calls, uneven).pattern is None, (
            "it may be known already, and not be looked at"
        )


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
def test_equal_calls_have_equal_digests(calls: list[RecordRow]) -> None:
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
    swapped = Digest(combined([encode(ONE), encode(other, may_be_swapped=True)]))
    assert swapped.pattern != first and swapped.may_be_swapped, "it may be a swap"
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
    monkeypatch.setattr(check, "compare_calls", lambda pending, calls, digest: None)
    calls = [[ONE], [replace(ONE, line=2)], [replace(ONE, batch=4)], [replace(ONE, fingerprint=6)]]
    for turn in range(3):
        for number, others in enumerate(calls):
            words = combined([encode(ONE)] * 999 + [encode(call) for call in others])
            check._evaluate(PendingCall(0, 10 * turn + number, 0.0), ONE, torch.tensor(words))
    assert looks == [1, 2, 3, 13, 23]


def compared(*turns: tuple[list[RecordRow], Digest]) -> list[str]:
    """What a rank reports of these calls, one after the other, of all ranks."""
    kinds: list[str] = []
    record = RawRecord(1, 2, 7, 5, 1, 3, 19, 0, 0, 0, 0, 0, 0, -1)
    state: Any = SimpleNamespace(
        own_reader=SimpleNamespace(raw=lambda number: record), limits=SimpleNamespace(strict=False)
    )
    swaps: Any = SimpleNamespace(note_lines=lambda record, lines: None)
    check = PreflightCheck(None, state, 1, (0, 1), swaps, lambda work: None)
    report = cast("Any", check)
    report._report = lambda pending, kind, pair: kinds.append(kind)
    for calls, digest in turns:
        check.compare_calls(PendingCall(0, calls[0].sequence, 0.0), calls, digest)
    return kinds


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_swap_is_looked_for_where_some_rank_has_announced_one(is_announced: bool) -> None:
    first = [ONE, replace(ONE, line=2)]
    second = [replace(call, sequence=8) for call in reversed(first)]
    words = combined([encode(second[0], may_be_swapped=is_announced), encode(second[1])])
    found = compared((first, digest(first)), (second, Digest(words)))
    assert found == (["lines", "swap"] if is_announced else ["lines"])


@pytest.mark.parametrize("uneven", [True, False])
def test_other_batches_are_none_where_some_rank_says_that_they_are_uneven(uneven: bool) -> None:
    calls = [ONE, replace(ONE, batch=4)]
    assert compared((calls, digest(calls, uneven))) == ([] if uneven else ["batches"])
