"""A rank that outlives the others is told about, once in a while, and not while something else
is.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.flight_recorder import FlightRecorder
from lockstep.watchdog import last_rank
from lockstep.watchdog.last_rank import LastRankWatch, describe_activity


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(last_rank, "time", made)
    return made


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[FlightRecorder]:
    made = FlightRecorder(tmp_path, 1, 2, "here", "program")
    yield made
    made.close()


def notes_of(
    folder: Path, clock: Clock, silent: bool = False, seconds: int = 60
) -> tuple[LastRankWatch, list[str]]:
    notes: list[str] = []
    watch = LastRankWatch(folder, 0, [1], "all other ranks", 5.0, lambda: silent, notes.append)
    tick(watch, clock, seconds)
    return watch, notes


def tick(watch: LastRankWatch, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        watch.tick()


def test_nothing_is_said_while_another_rank_runs(
    tmp_path: Path, clock: Clock, peer: FlightRecorder
) -> None:
    watch, notes = notes_of(tmp_path, clock)
    assert not notes
    peer.set_phase("ended")  # its launcher may keep its process
    tick(watch, clock, 4)
    assert not notes
    tick(watch, clock, 2)
    assert notes == [
        "note: rank 0 still runs, 5 s after all other ranks have ended:\n  "
        f"{notes[0].split('  ')[1]}"
    ]
    tick(watch, clock, 30)
    assert len(notes) == 2  # again after 30 s
    watch._peers.clear()


def test_a_process_that_is_gone_has_ended(tmp_path: Path, clock: Clock) -> None:
    child = subprocess.Popen(["sleep", "100"])
    recorder = FlightRecorder(tmp_path, 1, 2, "here", "program")
    recorder.memory[20:24] = child.pid.to_bytes(4, "little")
    try:
        watch, notes = notes_of(tmp_path, clock, seconds=10)
        assert not notes
    finally:
        child.kill()
        child.wait()
    tick(watch, clock, 6)
    assert len(notes) == 1
    recorder.close()


def test_what_is_reported_otherwise_is_not_said_twice(
    tmp_path: Path, clock: Clock, peer: FlightRecorder
) -> None:
    peer.set_phase("ended")
    assert not notes_of(tmp_path, clock, silent=True)[1]


def test_a_rank_that_its_launcher_keeps_says_nothing(
    tmp_path: Path, clock: Clock, peer: FlightRecorder
) -> None:
    own = FlightRecorder(tmp_path, 0, 2, "here", "program")
    watch, notes = notes_of(tmp_path, clock, seconds=1)
    watch.note_end()
    assert own.phase == "ended"
    peer.set_phase("ended")
    tick(watch, clock, 60)
    assert not notes
    own.close()


def test_threads_that_are_joined_at_the_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its main thread is at " in describe_activity()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="uploader")
    thread.start()
    frame = SimpleNamespace(
        f_code=SimpleNamespace(co_filename=threading.__file__, co_name="_shutdown"), f_back=None
    )
    monkeypatch.setattr(last_rank, "main_frame", lambda: frame)
    try:
        assert describe_activity().startswith("the thread uploader keeps it running, at ")
    finally:
        release.set()
        thread.join()


def test_the_place_where_a_worker_ends_its_threads_exists() -> None:
    """It is known by the name of a function in a file of another package."""
    from lockstep.launcher.worker_process import script

    assert (script.__file__, script._finish.__name__) in last_rank._ENDS
    assert Path(script.__file__).samefile(last_rank._ENDS[1][0])
