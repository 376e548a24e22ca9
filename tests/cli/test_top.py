"""``lockstep top``: which jobs it finds, and what it shows of one; the recordings are made here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.cli import main
from lockstep.cli.top import _Picture
from lockstep.recorder import Call, Recorder, places
from lockstep.watch import jobs, live
from lockstep.watch.jobs import About


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the recordings of jobs."""
    monkeypatch.setattr(places, "parent", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return jobs.make_base()


@pytest.fixture
def process() -> Iterator[int]:
    """The number of a process that lives."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        yield child.pid


def make_job(base: Path, name: str, about: About) -> Path:
    folder = base / name / "attempt-0"
    folder.mkdir(parents=True)
    jobs.describe(folder, about)
    return folder


def make_rank(folder: Path, rank: int, pid: int | None = None) -> Recorder:
    with pytest.MonkeyPatch.context() as patch:
        if pid is not None:
            patch.setattr(os, "getpid", lambda: pid)
        return Recorder(folder, rank, 3, "here", "train.py")


def enter(recorder: Recorder, what: str, line: str) -> int:
    call = Call(1, what, recorder.texts.number(what))
    return recorder.enter(1, recorder.open_lane(1), 1, call, 1, recorder.texts.number(line), 0, 0, -1)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["top", "--once", *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_one_job_is_shown_rank_by_rank(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_job(base, "run", About("run -np 2 train.py \x1b[2J", os.getpid(), 2, started=0.0))
    ranks = [make_rank(folder, rank) for rank in range(2)]
    for rank in ranks:
        rank.note_batch(7, 1)
        rank.note_samples(640)
    number = enter(ranks[0], "all_reduce(float32[10], sum)", "train.py:3 in main\ndist.all_reduce(x)\x1b[31m")
    ranks[0].wait(number, time.monotonic())
    enter(ranks[1], "barrier()", "train.py:9 in main\ndist.barrier()")
    lines = shown(capsys)
    assert lines[0].startswith(f"run -np 2 train.py   PID {os.getpid()}, ")
    assert lines[0].endswith("2 of 3 ranks are on this machine")
    assert lines[2].split() == ["rank", "state", "batch", "waiting", "samples/s", "memory", "collective"]
    assert lines[3].split()[:3] == ["0", "waits", "7"] and "MiB" in lines[3]
    assert lines[3].endswith("all_reduce(float32[10], sum)")
    assert lines[4].strip() == "train.py:3 in main: dist.all_reduce(x)"
    assert lines[5].split()[:3] == ["1", "computes", "7"] and lines[5].endswith("barrier()")
    assert all(line.isprintable() for line in lines)


def test_rates_are_those_of_the_last_seconds(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_job(base, "run", About("x", os.getpid(), 2))
    rank, watched = make_rank(folder, 0), live.Live(folder)
    clock = SimpleNamespace(now=time.monotonic() + 4)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock.now))
    rank.note_samples(100)
    first = watched.look()[0]
    assert (first.state, round(first.samples_s or 0), first.waiting) == ("no heartbeat", 25, 0.0)
    rank.note_samples(50)
    rank.wait(enter(rank, "barrier()", ""), clock.now)
    clock.now += 2
    second = watched.look()[0]
    assert (second.samples_s, second.seconds, second.waiting) == (25.0, 2.0, 1.0)
    for _ in range(6):
        clock.now += 2
        last = watched.look()[0]
    assert (last.samples_s, last.waiting) == (0.0, 1.0)
    watched.close()


def test_a_process_that_is_gone_or_stopped(base: Path, process: int) -> None:
    folder = make_job(base, "run", About("x", os.getpid(), 2))
    watched = live.Live(folder)
    make_rank(folder, 0, pid=process)
    make_rank(folder, 1, pid=2**22 + 1)  # beyond the greatest number of a process
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)
    try:
        assert [rank.state for rank in watched.look()] == ["stopped", "gone"]
        assert [rank.memory > 0 for rank in watched.look()] == [True, False]
    finally:
        os.kill(process, signal.SIGCONT)
        watched.close()


def test_several_jobs_are_listed_and_one_is_chosen(
    base: Path, process: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    make_job(base, "a", About("first.py\x1b[2J", os.getpid(), 4, started=1.0, cwd="/somewhere"))
    folder = make_job(base, "b", About("second.py", process, 2, started=2.0, cwd="/else", folder=str(tmp_path / "out")))
    make_rank(folder, 0)
    lines = shown(capsys)
    assert lines[0].split() == ["PID", "ranks", "running", "for", "folder", "program"]
    assert [line.split()[0] for line in lines[1:]] == [str(os.getpid()), str(process)]
    assert lines[1].endswith("first.py") and "/somewhere" in lines[1]
    for word in (str(process), str(tmp_path / "out"), "/else", str(folder)):
        assert shown(capsys, word)[0].startswith("second.py")
    for word in ("1", "/nowhere"):
        assert main(["top", "--once", word]) == 2
        told = capsys.readouterr().err
        assert f"job: expected the PID or the folder of a job that is running here ({os.getpid()}, {process})" in told


def test_a_job_stays_on_the_screen_until_it_ends(base: Path, process: int) -> None:
    def title() -> str:
        return str(picture.draw().renderables[0]).split()[0]  # type: ignore[union-attr]

    picture = _Picture(None)
    first = make_job(base, "a", About("first.py", os.getpid(), 2, started=1.0))
    assert title() == "first.py"
    make_job(base, "b", About("second.py", process, 2, started=2.0))
    assert title() == "first.py"
    first.rename(first.with_name("attempt-1"))  # its ranks have been started afresh
    assert title() == "first.py"
    shutil.rmtree(first.parent)
    assert picture.draw() is None
    picture.close()


def test_no_job(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(base, "dead", About("x", 2**22 + 1, 1))
    (make_job(base, "damaged", About("x", os.getpid(), 1)) / "job.json").write_text('{"program": 3}')
    assert "No job is running here" in shown(capsys)[0]
    assert main(["top", "--interval", "0"]) == 2
    assert "--interval: expected a number of seconds from 0.1 to 3600" in capsys.readouterr().err


def test_what_the_dead_have_left_is_removed(base: Path) -> None:
    living = make_job(base, "living", About("x", os.getpid(), 1))
    dead = make_job(base, "dead", About("x", 2**22 + 1, 1))
    orphan = make_job(base, "orphan", About("x", 2**22 + 1, 1))
    make_rank(orphan, 1)  # of this process, which lives
    make_rank(dead, 1, pid=2**22 + 1)
    jobs.remove_dead()
    assert living.exists() and orphan.exists() and not dead.parent.exists()
    assert set(jobs.find_jobs()) == {living, orphan}
