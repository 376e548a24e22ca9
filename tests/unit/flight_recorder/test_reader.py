"""A rank's reader: what is written is what others read, while it is written and after its rank has
gone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.loader import Loader
from lockstep.flight_recorder import (
    CallSignature,
    FlightRecorder,
    RecorderReader,
    RecordLog,
    activity,
    call_writer,
    current,
    in_method,
    named,
    note_batch,
    note_samples,
    open_job,
    read_log,
    read_log_header,
)
from lockstep.flight_recorder.layout import GROUP_SLOTS, RING, TEXT_SLOTS, rank_file
from lockstep.training.callbacks import Callback
from lockstep.training.callbacks.group import CallbackGroup

KEY = 12345


@pytest.fixture(params=["native", "python"])
def recorder(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FlightRecorder]:
    """One that writes calls with the native extension where that is installed, and one without."""
    if request.param == "python":
        monkeypatch.setattr(call_writer, "_native", None)
    made = FlightRecorder(tmp_path, 3, 8, "here", "train.py --lr 1")
    yield made
    current.recorder = None
    made.close()


@pytest.fixture
def reader(recorder: FlightRecorder) -> Iterator[RecorderReader]:
    with RecorderReader(recorder.path) as opened:
        yield opened


def enter(
    recorder: FlightRecorder,
    slot: int,
    sequence: int,
    what: str = "barrier()",
    call_site: str = "a.py:1 in f\nx()",
) -> int:
    call = CallSignature(sequence, what, recorder.texts.intern(what))
    return recorder.enter(KEY, slot, sequence, call, 7, recorder.texts.intern(call_site), 0, 0, -1)


def test_a_collective_is_read_as_it_was_written(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    slot = recorder.open_group(KEY)
    recorder.note_batch(4, 1)
    number = enter(
        recorder,
        slot,
        1,
        "all_reduce(float32[4], sum)",
        "train.py:31 in main\ndist.all_reduce(loss)",
    )
    recorder.begin_wait(number, time.monotonic())
    state = reader.state()
    assert (state.rank, state.world_size, state.host, state.program) == (
        3,
        8,
        "here",
        "train.py --lr 1",
    )
    assert (state.phase, state.records, state.batch, state.finished) == ("waits", 1, 4, False)
    call = state.call
    assert call is not None
    assert (call.what, call.call_site, call.source) == (
        "all_reduce(float32[4], sum)",
        "train.py:31 in main",
        "dist.all_reduce(loss)",
    )
    assert (call.sequence, call.batch, call.left) == (1, 4, None)
    ended = time.monotonic()
    recorder.end_wait(ended)
    recorder.leave(number, ended)
    assert reader.phase == "runs"
    (record,) = reader.records()
    assert record.left is not None
    assert record.left >= record.entered
    assert reader.state().waited_s >= record.left - record.entered - 0.01


def test_others_find_a_collective_by_its_group_and_number(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    slots = [recorder.open_group(key) for key in (99, KEY)]
    for sequence in range(1, 1001):
        enter(recorder, slots[1], sequence)
    slot = reader.group_slot(KEY)
    assert slot == slots[1]
    assert reader.last_sequence(slot) == 1000
    raw = reader.raw(reader.record_number(slot, 990))
    assert raw is not None
    assert (raw.key, raw.sequence, raw.fingerprint) == (KEY, 990, 990)
    assert reader.raw(reader.record_number(slot, 990) - RING) is None
    assert [record.sequence for record in reader.records(3)] == [998, 999, 1000]
    assert len(reader.records()) == RING


def test_a_call_that_was_refused_has_not_been_made(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    slot = recorder.open_group(KEY)
    enter(recorder, slot, 1)
    enter(recorder, slot, 2)
    recorder.cancel_call(slot, 2)
    assert reader.last_sequence(slot) == 1
    assert reader.record_number(slot, 2) == 0


def test_a_group_that_was_left_can_be_read_until_its_room_is_needed(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    left = recorder.open_group(KEY)
    enter(recorder, left, 1)
    recorder.close_group(left)
    for key in range(1, GROUP_SLOTS):
        recorder.open_group(key)
    assert reader.group_slot(KEY) == left
    assert reader.last_sequence(left) == 1
    recorder.open_group(GROUP_SLOTS)
    assert reader.group_slot(KEY) == -1
    assert reader.group_slot(GROUP_SLOTS) == left
    assert reader.last_sequence(left) == 0


class Interrupted(str):
    """A text at each use of which as a key another thread gets the time to write its own text."""

    meanwhile: Callable[[], object]
    threads: list[threading.Thread]

    def __hash__(self) -> int:
        other = threading.Thread(target=self.meanwhile)
        self.threads.append(other)
        other.start()
        other.join(0.05)  # it may have to wait for this thread
        return super().__hash__()


def test_threads_that_write_texts_at_once_get_numbers_of_their_own(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    numbers: dict[str, int] = {}
    names = (f"text {number} of another thread" for number in itertools.count())

    def write() -> None:
        name = next(names)
        numbers[name] = recorder.texts.intern(name)

    text = Interrupted("interrupted")
    text.meanwhile = write
    text.threads = []
    number = recorder.texts.intern(text)
    for thread in text.threads:
        thread.join()
    assert len(numbers) >= 2
    assert number not in numbers.values()
    assert reader.text(number) == "interrupted"
    assert [reader.text(other) for other in numbers.values()] == list(numbers)


def test_texts_that_are_used_stay_readable_however_many_come(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    turns = []
    recorder.texts.on_wraparound = lambda: turns.append(1)
    for number in range(5 * TEXT_SLOTS):
        assert reader.text(recorder.texts.intern("used again and again")) == "used again and again"
        assert reader.text(recorder.texts.intern(f"text {number}")) == f"text {number}"
    assert len(turns) >= 9
    assert reader.text(1) == "?"
    assert reader.text(recorder.texts.intern("é" * 1000)).startswith("é" * 100)


def test_names_begin_with_the_method_that_the_program_has_called() -> None:
    with in_method("Trainer.predict"):
        assert current.thread.name == "Trainer.predict"
        with in_method("lockstep.predict"), named("outputs"):
            assert current.thread.name == "Trainer.predict: outputs"
        assert current.thread.name == "Trainer.predict"
    with named("mine"):
        assert current.thread.name == "mine"
    assert current.thread.name == ""


def test_a_loop_over_a_loader_that_is_left_counts_no_more(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    current.recorder = recorder
    data = TensorDataset(torch.arange(12))
    loops = set()
    for shuffle in (True, False):
        for batch in Loader(data, 4, shuffle=shuffle).epoch(0):
            assert reader.state().batch == batch.step
            loops.add(recorder.loop)
            if batch.step == 1:
                break
        assert (reader.state().batch, recorder.loop) == (None, 0)
    assert len(loops) == 2  # training and evaluation on the same data are not compared


def test_a_hook_of_a_callback_is_what_a_rank_is_doing(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    seen = []

    class Mine(Callback):
        def on_row(self, trainer: Any, row: Any) -> None:
            with activity("a part of it"):
                seen.append((reader.activity, reader.activity_is_own, reader.in_solo_section))
            seen.append((reader.state().activity, reader.activity_is_own, reader.in_solo_section))
            if row is None:
                raise KeyboardInterrupt

    class Own(Mine):
        __module__ = "lockstep.training.callbacks.mine"
        every_rank = True

    current.recorder = recorder
    with pytest.raises(KeyboardInterrupt):
        CallbackGroup([Own(), Mine()], 0).call("on_row", cast("Any", None), None)
    assert seen == [("a part of it", False, False), ("the callback Own.on_row", True, False)]
    assert (reader.activity, reader.activity_is_own, reader.in_solo_section) == ("", False, False)
    seen.clear()
    CallbackGroup([Mine()], 0).call("on_row", cast("Any", None), {})
    assert seen[1] == ("the callback Mine.on_row", False, True)


def test_the_end_of_a_loop_is_distinguished_from_its_batches(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    current.recorder = recorder
    assert reader.state().batch is None
    note_batch(0)
    assert (reader.state().batch, reader.state().finished) == (0, False)
    note_batch(7, finished=True)
    assert (reader.state().batch, reader.state().finished) == (7, True)
    note_samples(32)
    note_samples(8)
    assert reader.state().samples == 40
    with named("loss"):
        assert current.thread.name == "loss"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: current.thread.name).result() == ""
    assert current.thread.name == ""


def test_a_final_traceback_is_kept_completely_or_its_end(
    recorder: FlightRecorder, reader: RecorderReader
) -> None:
    recorder.write_traceback("ValueError: no")
    recorder.set_phase("raised")
    assert (reader.state().phase, reader.state().traceback) == ("raised", "ValueError: no")
    recorder.write_traceback("x" * 100_000 + "the end")
    assert reader.traceback_text().endswith("xthe end")


def test_a_rank_that_has_exited_can_still_be_read(recorder: FlightRecorder) -> None:
    enter(recorder, recorder.open_group(KEY), 1)
    with RecorderReader(recorder.path) as opened:
        recorder.close()
        recorder.path.unlink()
        assert opened.state().records == 1
        recorder.record_heartbeat()  # nobody sees it, and nothing breaks


@pytest.mark.parametrize(
    "data", [b"", b"LOCKSTEP", b"another thing" * 100, b"LOCKSTEP" + b"\xff" * 900]
)
def test_what_is_no_flight_record_is_refused(tmp_path: Path, data: bytes) -> None:
    path = rank_file(tmp_path, 0)
    path.write_bytes(data)
    with pytest.raises(ValueError):
        RecorderReader(path)
    assert open_job(tmp_path) == {}


def test_a_truncated_flight_record_is_refused(recorder: FlightRecorder, tmp_path: Path) -> None:
    path = tmp_path / "rank-9"
    path.write_bytes(recorder.path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        RecorderReader(path)
    found = open_job(tmp_path)
    assert list(found) == [3]
    found[3].close()


def test_the_log_has_every_collective_up_to_the_last_whole_line(
    recorder: FlightRecorder, tmp_path: Path
) -> None:
    slot = recorder.open_group(KEY)
    with RecorderReader(recorder.path) as own:
        log = RecordLog(tmp_path / "logs", own)
        for sequence in range(1, 1201):
            recorder.leave(enter(recorder, slot, sequence), 1.0)
            if log.behind:
                log.flush()
        log.close()
    path = tmp_path / "logs" / "rank-3.records"
    assert [record.sequence for record in read_log(path)] == list(range(1, 1201))
    assert read_log_header(path)["program"] == "train.py --lr 1"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(read_log(path))) == 1199
    path.write_text("something else\n")
    with pytest.raises(ValueError, match=r"is not a log"):
        list(read_log(path))
