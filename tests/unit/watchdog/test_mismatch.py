"""Which records agree, and which differences are errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.flight_recorder import RawRecord, Record
from lockstep.watchdog.mismatch import KINDS, compare_records, describe_difference, is_error

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


AFTER = -2 - 10  # a loop that has ended after 10 batches


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, []),
        ({"fingerprint": 0}, ["desync"]),
        ({"line": 0}, ["lines"]),
        ({"line": 0, "name": 3}, ["lines"]),  # only names that both have given
        ({"batch": 5}, ["batches"]),
        ({"batch": 5, "line": 0}, ["batches", "lines"]),
        ({"batch": 5, "loop": 8}, []),
        ({"batch": -1, "loop": 0}, []),
        ({"batch": AFTER}, []),  # a like call on the same line: on purpose, for all that is known
        ({"batch": AFTER, "line": 0}, ["ended", "lines"]),
    ],
)
def test_what_makes_two_records_differ(changes: dict[str, int], expected: list[str]) -> None:
    assert list(compare_records(RAW, replace(RAW, **changes))) == expected


def test_ranks_may_declare_that_their_batches_differ() -> None:
    assert not list(compare_records(RAW, replace(RAW, batch=5), uneven=True))
    # a rank without batches left makes the collectives of the others on a line of torch's
    assert not list(compare_records(RAW, replace(RAW, batch=AFTER, line=0), uneven=True))
    assert list(compare_records(RAW, replace(RAW, fingerprint=0), uneven=True)) == ["desync"]
    assert not list(compare_records(replace(RAW, name=1), replace(RAW, line=0, name=1)))


def test_what_programs_do_on_purpose_is_an_error_in_strict_mode_alone() -> None:
    assert [kind for kind in KINDS if not is_error(kind, strict=False)] == ["batches", "lines"]
    assert all(is_error(kind, strict=True) for kind in KINDS)


def call(
    what: str, name: str = "", batch: int = 0, finished: bool = False, loop: int = 1
) -> Record:
    return Record(1, what, "train.py:3 in main", "", "", 1, batch, finished, 0.0, None, name, loop)


@pytest.mark.parametrize(
    "calls, expected",
    [
        (
            (
                call("all_gather()", "Trainer.evaluate: sums", 6, True, loop=2),
                call("barrier()", batch=22),
            ),
            "Rank 0 is in Trainer.evaluate, rank 3 is not",
        ),
        (
            (
                call("broadcast()", "Trainer.fit: agreement"),
                call("all_gather()", "Trainer.predict"),
            ),
            "Rank 3 is in Trainer.predict, rank 0 is in Trainer.fit",
        ),
        (
            (call("barrier()"), call("all_gather()", "Trainer.fit: agreement")),
            "Rank 3 is in Trainer.fit, rank 0 is not",
        ),
        (
            (
                call("all_reduce()", "lockstep.evaluate: sums"),
                call("all_reduce()", "lockstep.evaluate"),
            ),
            "A collective is in a branch that only some ranks take",
        ),
        (
            (call("all_reduce()", batch=6, finished=True), call("barrier()", batch=6, loop=2)),
            "A collective is in a branch that only some ranks take",
        ),
        (
            (call("all_reduce()", batch=6), call("barrier()", batch=5, finished=True)),
            "One rank has fewer batches than another",
        ),
        (
            (call("all_reduce()", "lockstep: mine"), call("barrier()")),
            "A collective is in a branch",
        ),
    ],
)
def test_the_cause_names_a_method_that_only_some_ranks_call(
    calls: tuple[Record, Record], expected: str
) -> None:
    found = describe_difference("desync", (0, 3), calls)
    assert found.cause.startswith(expected)
    if expected.startswith("Rank"):
        method = expected.split()[4].rstrip(",")
        assert found.advice.startswith(f"Call {method} on every rank")
