"""A rank's recording: what is written is what others read, while it is written and after its rank has gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.recorder import (
    Call,
    Log,
    Recorder,
    Recording,
    current,
    log_header,
    named,
    note_batch,
    note_samples,
    open_job,
    read_log,
)
from lockstep.recorder.layout import LANES, RING, SLOTS
from lockstep.recorder.places import rank_file

KEY = 12345


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, 3, 8, "here", "train.py --lr 1")
    yield made
    current.recorder = None
    made.close()


@pytest.fixture
def recording(recorder: Recorder) -> Iterator[Recording]:
    with Recording(recorder.path) as opened:
        yield opened


def enter(
    recorder: Recorder, lane: int, sequence: int, what: str = "barrier()", place: str = "a.py:1 in f\nx()"
) -> int:
    call = Call(sequence, what, recorder.texts.number(what))
    return recorder.enter(KEY, lane, sequence, call, 7, recorder.texts.number(place), 0, 0, -1)


def test_a_collective_is_read_as_it_was_written(recorder: Recorder, recording: Recording) -> None:
    lane = recorder.open_lane(KEY)
    recorder.note_batch(4, 1)
    number = enter(recorder, lane, 1, "all_reduce(float32[4], sum)", "train.py:31 in main\ndist.all_reduce(loss)")
    recorder.wait(number, time.monotonic())
    state = recording.state()
    assert (state.rank, state.world_size, state.host, state.program) == (3, 8, "here", "train.py --lr 1")
    assert (state.phase, state.records, state.batch, state.finished) == ("waits", 1, 4, False)
    call = state.call
    assert call is not None
    assert (call.what, call.place, call.source) == (
        "all_reduce(float32[4], sum)",
        "train.py:31 in main",
        "dist.all_reduce(loss)",
    )
    assert (call.sequence, call.batch, call.left) == (1, 4, None)
    recorder.leave(number, recorder.run())
    assert recording.phase == "runs"
    (record,) = recording.records()
    assert record.left is not None
    assert record.left >= record.entered
    assert recording.state().waited_s >= record.left - record.entered - 0.01


def test_others_find_a_collective_by_its_group_and_number(recorder: Recorder, recording: Recording) -> None:
    lanes = [recorder.open_lane(key) for key in (99, KEY)]
    for sequence in range(1, 1001):
        enter(recorder, lanes[1], sequence)
    lane = recording.lane(KEY)
    assert lane == lanes[1]
    assert recording.head(lane) == 1000
    raw = recording.raw(recording.row(lane, 990))
    assert raw is not None
    assert (raw.key, raw.sequence, raw.fingerprint) == (KEY, 990, 990)
    assert recording.raw(recording.row(lane, 990) - RING) is None
    assert [record.sequence for record in recording.records(3)] == [998, 999, 1000]
    assert len(recording.records()) == RING


def test_a_call_that_was_refused_has_not_been_made(recorder: Recorder, recording: Recording) -> None:
    lane = recorder.open_lane(KEY)
    enter(recorder, lane, 1)
    enter(recorder, lane, 2)
    recorder.take_back(lane, 2)
    assert recording.head(lane) == 1
    assert recording.row(lane, 2) == 0


def test_a_group_that_was_left_can_be_read_until_its_room_is_needed(recorder: Recorder, recording: Recording) -> None:
    left = recorder.open_lane(KEY)
    enter(recorder, left, 1)
    recorder.close_lane(left)
    for key in range(1, LANES):
        recorder.open_lane(key)
    assert recording.lane(KEY) == left
    assert recording.head(left) == 1
    recorder.open_lane(LANES)
    assert recording.lane(KEY) == -1
    assert recording.lane(LANES) == left
    assert recording.head(left) == 0


def test_texts_that_are_used_stay_readable_however_many_come(recorder: Recorder, recording: Recording) -> None:
    turns = []
    recorder.texts.on_turn = lambda: turns.append(1)
    for number in range(5 * SLOTS):
        assert recording.text(recorder.texts.number("used again and again")) == "used again and again"
        assert recording.text(recorder.texts.number(f"text {number}")) == f"text {number}"
    assert len(turns) >= 9
    assert recording.text(1) == "?"
    assert recording.text(recorder.texts.number("é" * 1000)).startswith("é" * 100)


def test_the_end_of_a_loop_is_told_from_its_batches(recorder: Recorder, recording: Recording) -> None:
    current.recorder = recorder
    assert recording.state().batch is None
    note_batch(0)
    assert (recording.state().batch, recording.state().finished) == (0, False)
    note_batch(7, finished=True)
    assert (recording.state().batch, recording.state().finished) == (7, True)
    note_samples(32)
    note_samples(8)
    assert recording.state().samples == 40
    with named("loss"):
        assert current.thread.name == "loss"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: current.thread.name).result() == ""
    assert current.thread.name == ""


def test_last_words_are_kept_whole_or_from_their_end(recorder: Recorder, recording: Recording) -> None:
    recorder.say("ValueError: no")
    recorder.turn("raised")
    assert (recording.state().phase, recording.state().words) == ("raised", "ValueError: no")
    recorder.say("x" * 100_000 + "the end")
    assert recording.said().endswith("xthe end")


def test_a_rank_that_has_gone_can_still_be_read(recorder: Recorder) -> None:
    enter(recorder, recorder.open_lane(KEY), 1)
    with Recording(recorder.path) as opened:
        recorder.close()
        recorder.path.unlink()
        assert opened.state().records == 1
        recorder.beat()  # nobody sees it, and nothing breaks


@pytest.mark.parametrize("data", [b"", b"LOCKSTEP", b"another thing" * 100, b"LOCKSTEP" + b"\xff" * 900])
def test_what_is_no_recording_is_refused(tmp_path: Path, data: bytes) -> None:
    path = rank_file(tmp_path, 0)
    path.write_bytes(data)
    with pytest.raises(ValueError):
        Recording(path)
    assert open_job(tmp_path) == {}


def test_a_recording_that_was_cut_off_is_refused(recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "rank-9"
    path.write_bytes(recorder.path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        Recording(path)
    found = open_job(tmp_path)
    assert list(found) == [3]
    found[3].close()


def test_the_log_has_every_collective_up_to_the_last_whole_line(recorder: Recorder, tmp_path: Path) -> None:
    lane = recorder.open_lane(KEY)
    with Recording(recorder.path) as own:
        log = Log(tmp_path / "logs", own)
        for sequence in range(1, 1201):
            recorder.leave(enter(recorder, lane, sequence), 1.0)
            if log.behind:
                log.flush()
        log.close()
    path = tmp_path / "logs" / "rank-3.records"
    assert [record.sequence for record in read_log(path)] == list(range(1, 1201))
    assert log_header(path)["program"] == "train.py --lr 1"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(read_log(path))) == 1199
    path.write_text("something else\n")
    with pytest.raises(ValueError, match=r"no file of records"):
        list(read_log(path))
