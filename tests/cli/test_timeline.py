"""``lockstep timeline``: what is drawn of records, and what is said of files that hold none."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import timeline
from lockstep.cli import main
from lockstep.errors import DataError
from lockstep.flight_recorder import Record
from lockstep.timeline import write_trace

SUM = Record(
    1,
    "all_reduce(float32[4], sum)",
    "train.py:3 in main",
    "dist.all_reduce(x)",
    "",
    1,
    0,
    False,
    10.0,
    10.2,
)


def write(
    folder: Path, rank: int, records: list[Record], offset: float = 1000.0, host: str = "a"
) -> Path:
    folder.mkdir(exist_ok=True)
    header = {
        "lockstep_records": 1,
        "rank": rank,
        "world_size": 2,
        "host": host,
        "pid": 1,
        "unix_offset": offset,
    }
    lines = [{**header, "program": "train.py"}, *map(asdict, records)]
    path = folder / f"rank-{rank}.records"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drawn(folder: Path) -> list[dict[str, Any]]:
    write_trace(folder, folder / "t.json")
    events: list[dict[str, Any]] = json.loads((folder / "t.json").read_text())["traceEvents"]
    return events


def slices(
    events: list[dict[str, Any]], rank: int, kind: str
) -> list[tuple[int, str, float, float]]:
    """(lane, name, start, end) in milliseconds."""
    found = [
        event
        for event in events
        if event["ph"] == "X" and event["pid"] == rank and event["cat"] == kind
    ]
    return [
        (e["tid"], e["name"], round(e["ts"] / 1e3, 3), round((e["ts"] + e["dur"]) / 1e3, 3))
        for e in found
    ]


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """Rank 1 comes 100 ms late to the first collective, and never to the second."""
    second = replace(SUM, number=2, sequence=2, batch=1, entered=10.5, left=None, name="loss")
    write(tmp_path, 0, [SUM, second])
    # asked for the time of day a moment later: the same host, the same clock
    write(tmp_path, 1, [replace(SUM, entered=10.1, left=10.21)], offset=1000.003)
    return tmp_path


def test_each_rank_has_a_lane_with_computing_collectives_and_waiting(two_ranks: Path) -> None:
    events = drawn(two_ranks)
    name = "all_reduce(float32[4], sum)"
    assert slices(events, 0, "collective") == [(1, name, 0, 200), (1, "loss", 500, 500)]
    assert slices(events, 0, "waiting") == [(1, "waiting", 0, 100)]
    assert slices(events, 0, "compute") == [(1, "compute", 200, 500)]
    assert slices(events, 0, "batch") == [(0, "batch 0", 0, 500), (0, "batch 1", 500, 500)]
    assert slices(events, 1, "collective") == [(1, name, 100, 210)]
    assert slices(events, 1, "waiting") == []
    labels = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert labels == ["rank 0 on a", "rank 1 on a"]
    about = next(event["args"] for event in events if event.get("cat") == "collective")
    assert (about["call site"], about["source"], about["group"]) == (
        "train.py:3 in main",
        "dist.all_reduce(x)",
        "all ranks",
    )


def test_a_collective_that_never_ended_lasts_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, 0, [replace(SUM, left=None)])
    write(tmp_path, 1, [replace(SUM, group="other", entered=10.4, left=10.5)])
    events = drawn(tmp_path)
    assert slices(events, 0, "collective")[0][2:] == (0, 500)
    assert [event["args"].get("ended") for event in events if event.get("cat") == "collective"] == [
        "no",
        None,
    ]


def test_collectives_in_flight_together_have_lanes_of_their_own(tmp_path: Path) -> None:
    both = [
        replace(SUM, number=n, sequence=n, entered=10 + n / 10, left=10.5 + n / 10)
        for n in range(1, 12)
    ]
    events = drawn_of(tmp_path, both)
    assert [lane for lane, *_ in slices(events, 0, "collective")] == [
        1,
        2,
        3,
        4,
        5,
        1,
        2,
        3,
        4,
        5,
        1,
    ]
    assert slices(events, 0, "compute") == []
    many = [
        replace(SUM, number=n, sequence=n, entered=10 + n / 1000, left=10.5) for n in range(1, 12)
    ]
    events = drawn_of(tmp_path, many)
    assert (
        len(slices(events, 0, "collective")) == 8
        and len([e for e in events if e["ph"] == "i"]) == 3
    )


def drawn_of(folder: Path, records: list[Record]) -> list[dict[str, Any]]:
    write(folder, 0, records)
    return drawn(folder)


def test_a_group_that_is_made_again_is_another(tmp_path: Path) -> None:
    again = replace(SUM, number=2, entered=20.0, left=21.0)
    write(tmp_path, 0, [SUM, again])
    write(tmp_path, 1, [replace(SUM, entered=10.1), replace(again, entered=20.5)])
    events = drawn(tmp_path)
    assert [span[2:] for span in slices(events, 0, "waiting")] == [(0, 100), (10_000, 10_500)]


def test_hosts_have_their_own_clocks(tmp_path: Path) -> None:
    write(tmp_path, 0, [SUM], offset=1000.0, host="a")
    write(tmp_path, 1, [replace(SUM, entered=510.0, left=510.2)], offset=500.1, host="b")
    events = drawn(tmp_path)
    assert slices(events, 0, "waiting") == [(1, "waiting", 0, 100)]


def test_the_command_reports_where_time_was_spent(
    two_ranks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(two_ranks)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["0", "a", "0.5", "2", "60%", "40%", "20%", "0"],
        ["1", "a", "0.1", "1", "0%", "100%", "0%", "1"],
    ]
    assert lines[-1].startswith(f"Wrote {two_ranks / 'trace.json'}: open it at")
    assert main(["timeline", str(two_ranks), "-o", str(two_ranks / "t.json.gz")]) == 0
    with gzip.open(two_ranks / "t.json.gz") as one, (two_ranks / "trace.json").open() as other:
        assert json.load(one) == json.load(other)
    assert not list(two_ranks.glob(".*"))


def overlapping(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slices that Perfetto leaves out: it cuts times to nanoseconds, and slices of a lane lie
    within each other.
    """
    left_out, open_until = [], dict[tuple[int, int], list[int]]()
    for event in sorted(
        (event for event in events if event["ph"] == "X"),
        key=lambda event: int(event["ts"] * 1000.0),
    ):
        start, ends = (
            int(event["ts"] * 1000.0),
            open_until.setdefault((event["pid"], event["tid"]), []),
        )
        end = start + int(event["dur"] * 1000.0)
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            left_out.append(event)
        else:
            ends.append(end)
    return left_out


def test_no_slice_reaches_into_the_next(tmp_path: Path) -> None:
    """Times of a real clock are no whole nanoseconds; a slice that overlaps another by one would
    not be shown.
    """
    step, records = 0.000_012_345_6789, []
    for n in range(1, 2000):
        times = {
            "entered": 86_400.0 + (2 * n + n % 3 / 7) * step,
            "left": 86_400.0 + (2 * n + 1 + n % 2) * step,
        }
        records.append(replace(SUM, number=n, sequence=n, batch=n // 3, **times))
    write(tmp_path, 1, [replace(record, entered=record.entered + step / 3) for record in records])
    events = drawn_of(tmp_path, records)
    assert len(slices(events, 0, "waiting")) == len(records)
    assert overlapping(events) == []


def test_a_file_that_was_cut_off_is_read_up_to_there(two_ranks: Path) -> None:
    with (two_ranks / "rank-1.records").open("a") as file:
        file.write('{"number": 2, "what": "ba')
    assert len(slices(drawn(two_ranks), 1, "collective")) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "rank-0.records is damaged: .* is not a log of Lockstep's flight recorder"),
        ('{"lockstep_records": 9}\n', "another version"),
        ('{"lockstep_records": 1, "rank": "x"}\n', "damaged"),
        (
            '{"lockstep_records": 1, "rank": 0, "world_size": 2, "host": "a", "unix_offset": 0}\n',
            "without any collective",
        ),
        (None, "expected a folder with records of ranks, rank-.*got one without"),
    ],
)
def test_what_holds_no_records(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "rank-0.records").write_text(text)
    with pytest.raises(DataError, match=said):
        write_trace(tmp_path, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_what_could_not_be_written_whole_is_not_there(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timeline, "_write_rank", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        write_trace(two_ranks, two_ranks / "t.json")
    assert sorted(path.name for path in two_ranks.iterdir()) == ["rank-0.records", "rank-1.records"]


def test_records_of_several_runs_are_refused(two_ranks: Path) -> None:
    path = write(two_ranks, 2, [SUM])
    path.write_text(path.read_text().replace('"world_size": 2', '"world_size": 3'))
    with pytest.raises(DataError, match="records of several runs, with different numbers of ranks"):
        write_trace(two_ranks, two_ranks / "t.json")


@pytest.mark.parametrize("time", ["soon", float("nan"), None])
def test_times_that_are_none_are_refused(tmp_path: Path, time: Any) -> None:
    write(tmp_path, 0, [replace(SUM, entered=time)])
    with pytest.raises(DataError, match="damaged records: invalid times in record 1 of rank 0"):
        write_trace(tmp_path, tmp_path / "t.json")


def test_bad_input(tmp_path: Path, two_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in [
        ([str(tmp_path / "gone")], "DIR: expected a folder with the records of a run"),
        (
            [str(two_ranks), "-o", str(tmp_path / "no" / "t.json")],
            "--out: expected a file in an existing folder",
        ),
        ([str(two_ranks), "-o", "/dev/full/x"], "--out: expected a file in an existing folder"),
    ]:
        assert main(["timeline", *words]) == 2
        assert said in capsys.readouterr().err
