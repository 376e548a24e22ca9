"""A report as data: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import DataError
from lockstep.watchdog import report as reports
from lockstep.watchdog.report import (
    Call,
    CollectiveCalls,
    RankCalls,
    RankStatus,
    Report,
    from_json,
    write_once,
)

CALL = Call(
    "all_reduce(float32[10], sum)", "train.py:31 in main", "dist.all_reduce(x)", 7, "tp", 12
)
REPORT = Report(
    "desync",
    "Ranks diverged.",
    (
        RankStatus(0, "waits", "", "a", 17, 12, CALL, 0.5),
        RankStatus(1, "raised", "É", stack=("x.py:1 in f: é",), traceback="T\n"),
    ),
    (1,),
    (CollectiveCalls(7, "tp", (RankCalls((0,), CALL), RankCalls((1,)))),),
    "cause",
    "advice",
    12.5,
    "train.py --lr 1",
)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(REPORT.to_json()), **changes})


def row(**changes: Any) -> str:
    return changed(ranks=[{**json.loads(REPORT.to_json())["ranks"][0], **changes}])


def test_what_is_written_is_read_again() -> None:
    assert from_json(REPORT.to_json()) == REPORT


def test_fields_of_later_versions_are_passed_over_and_missing_ones_have_defaults() -> None:
    found = from_json(
        '{"lockstep_report": 1, "kind": "lost", "sentence": "s", "ranks": [], "later": {}}'
    )
    assert found == Report("lost", "s", ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "too deeply"),
        ("[1]", "not a report"),
        ('{"sentence": "s"}', "not a report"),
        (changed(lockstep_report=2), "another version"),
        (changed(kind="other"), "kind: expected one of desync"),
        (changed(ranks=None), r"Expected `array`, got `null` - at `\$\.ranks`"),
        (changed(ranks=[3]), r"Expected `object`, got `int` - at `\$\.ranks\[0\]`"),
        (changed(ranks=[{"rank": 0}]), r"missing required field `state` - at `\$\.ranks\[0\]`"),
        (
            changed(culprits=[0] * 10_001),
            r"Expected `array` of length <= 10000 - at `\$\.culprits`",
        ),
        (row(state="asleep"), "state of rank 0: expected one of waits"),
        (row(rank=True), r"Expected `int`, got `bool` - at `\$\.ranks\[0\]\.rank`"),
        (row(rank="0"), r"Expected `int`, got `str` - at `\$\.ranks\[0\]\.rank`"),
        (row(rank=10**4000), r"Expected `int` <= 9223372036854775807 - at `\$\.ranks\[0\]\.rank`"),
        (
            row(waiting_s=10**400),
            r"Number out of range - at `\$\.ranks\[0\]\.waiting_s`|got Infinity",
        ),
        (row(waiting_s=float("nan")), "expected a finite number, got NaN"),
        (row(call=[]), r"Expected `object \| null`, got `array` - at `\$\.ranks\[0\]\.call`"),
        (
            row(stack=[["x" * 100]]),
            r"Expected `str`, got `array` - at `\$\.ranks\[0\]\.stack\[0\]`",
        ),
        (changed(sentence={"a": 1}), r"Expected `str`, got `object` - at `\$\.sentence`"),
    ],
)
def test_what_is_no_report_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_json(text)


def test_whole_numbers_may_stand_for_others() -> None:
    assert from_json(row(waiting_s=3)).ranks[0].waiting_s == 3.0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe", "damaged"),
        (b'{"lockstep_report": 1', "damaged"),
        (b" " * 101, "more than 0 MiB"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_report_is_named(
    tmp_path: Path, data: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_MAX_BYTES", 100)
    path = tmp_path / "it.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=rf"it\.json .*{said}"):
        reports.read(path)


def test_the_first_report_stays(tmp_path: Path) -> None:
    assert write_once(tmp_path, REPORT)
    assert not write_once(tmp_path, Report("lost", "another", ()))
    assert reports.read(tmp_path / "report.json") == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_rows_are_replaced_by_rank() -> None:
    new = RankStatus(1, "died")
    assert REPORT.with_rows([new, RankStatus(5, "died")]).ranks == (REPORT.ranks[0], new)
