"""``lockstep top``: which jobs it finds, and what it shows of one; the recordings are made here."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.cli import main, top
from lockstep.cli.top import _Display
from lockstep.flight_recorder import (
    CallSignature,
    FlightRecorder,
    jobs,
    layout,
    live_ranks,
    rank_progress,
    writer,
)
from lockstep.flight_recorder.jobs import JobDescription
from lockstep.flight_recorder.live_ranks import LiveRanks
from lockstep.flight_recorder.rank_progress import OtherHosts, RankProgress, SlowRank
from lockstep.launcher import job_totals
from lockstep.launcher.job_totals import JobTotals
from lockstep.system.job_folders import JobFolderLock


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the recordings of jobs."""
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return jobs.make_base()


@pytest.fixture
def process() -> Iterator[int]:
    """The number of a process that lives."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        yield child.pid


def make_job(base: Path, name: str, about: JobDescription) -> Path:
    folder = base / name / "attempt-0"
    folder.mkdir(parents=True)
    jobs.write_description(folder, about)
    return folder


def make_rank(folder: Path, rank: int, pid: int | None = None, size: int = 3) -> FlightRecorder:
    with pytest.MonkeyPatch.context() as patch:
        if pid is not None:
            patch.setattr(os, "getpid", lambda: pid)
        return FlightRecorder(folder, rank, size, "here", "train.py")


def call(
    recorder: FlightRecorder,
    sequence: int,
    what: str = "all_reduce()",
    line: str = "",
    now: float = 0.0,
) -> int:
    """Record that a rank enters the collective `sequence` of the only group, at the time `now` if
    it is given.
    """
    if sequence == 1:
        recorder.uints[(recorder.layout.group_keys >> 3) + recorder.open_group(1)] = 1
    signature = CallSignature(1, what, recorder.texts.intern(what))
    return recorder.enter(
        1, 0, sequence, signature, 1, recorder.texts.intern(line), 0, 0, -1, now=now
    )


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["top", "--once", *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_one_job_is_shown_rank_by_rank(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_job(
        base, "run", JobDescription("run -np 2 train.py \x1b[2J", os.getpid(), 2, started=0.0)
    )
    ranks = [make_rank(folder, rank) for rank in range(2)]
    for rank in ranks:
        rank.note_batch(7, 1)
        rank.note_samples(640)
    call(ranks[1], 1, "barrier()", "train.py:9 in main\ndist.barrier()")
    call(ranks[0], 1, "barrier()", "train.py:9 in main\ndist.barrier()")
    number = call(
        ranks[0],
        2,
        "all_reduce(float32[10], sum)",
        "train.py:3 in main\ndist.all_reduce(x)\x1b[31m",
    )
    ranks[0].begin_wait(number, time.monotonic())
    # for how long a rank waits or computes is shown from one second on
    lines = [re.sub(r"(waits|computes) \d+ s", r"\1", line) for line in shown(capsys)]
    assert lines[0].startswith(f"run -np 2 train.py   PID {os.getpid()}, ")
    assert lines[0].endswith("2 of 3 ranks are on this host")
    assert lines[2].split() == [
        "rank",
        "PID",
        "state",
        "batch",
        "waiting",
        "samples/s",
        "memory",
        "collective",
    ]
    assert lines[3].split()[:4] == ["0", str(os.getpid()), "waits", "7"] and "MiB" in lines[3]
    assert lines[3].endswith("all_reduce(float32[10], sum)")
    assert lines[4].strip() == "train.py:3 in main: dist.all_reduce(x)"
    assert lines[5].split()[:4] == ["1", str(os.getpid()), "computes", "7"] and lines[5].endswith(
        "barrier()"
    )
    assert all(line.isprintable() for line in lines)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of `lockstep top`: `now`, in seconds."""
    made = SimpleNamespace(now=time.monotonic() + 4)
    monkeypatch.setattr(live_ranks, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_rates_are_those_of_the_last_seconds(
    base: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = clock.now - 4
    # the clock of the ranks stands still until it is given
    of_ranks = SimpleNamespace(monotonic=lambda: begin, time=time.time)
    monkeypatch.setattr(writer, "time", of_ranks)
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 2))
    rank, slow = (make_rank(folder, number, size=2) for number in range(2))
    watched = LiveRanks(folder)
    call(rank, 1), call(slow, 1)
    rank.note_samples(100)
    first = watched.poll()[0]
    assert (first.state, round(first.samples_s or 0)) == ("no heartbeat", 25)
    assert first.waiting == pytest.approx(0.0, abs=0.01)
    rank.note_samples(50)
    rank.begin_wait(call(rank, 2, now=clock.now), clock.now)
    clock.now += 2
    second = watched.poll()[0]
    assert (second.samples_s, second.seconds) == (25.0, 2.0)
    assert second.waiting == pytest.approx(
        2 / 6, abs=0.01
    )  # the ranks have existed for six seconds
    for _ in range(6):
        clock.now += 2
        last = watched.poll()[0]
    assert (last.samples_s, last.waiting) == (0.0, 1.0)
    watched.close()


def test_the_rank_that_enters_last_waits_least_though_no_call_blocks(
    base: Path, clock: SimpleNamespace
) -> None:
    """So it is with the all-reduces of a backward pass: they are asynchronous, and torch waits for
    them in C++.
    """
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 2))
    fast, slow, watched = make_rank(folder, 0), make_rank(folder, 1), LiveRanks(folder)
    begin = clock.now
    for step in range(1, 31):
        at = begin + 0.1 * step
        fast.leave(call(fast, step, now=at), at + 0.09)
        slow.begin_wait(
            call(slow, step, now=at + 0.08), at + 0.08
        )  # a short blocking wait for data to arrive
        slow.leave(step, at + 0.09)
    slow.set_phase("runs")
    for rank in (fast, slow):
        rank.floats[layout.StateWords().since] = begin - 3.0  # the end of the last blocking call
        rank.floats[layout.StateWords().heartbeat] = begin + 3.15
    clock.now = begin + 3.15
    shown = watched.poll()
    waiting = [each.waiting or 0.0 for each in shown]
    assert (
        waiting[0] > 0.3 and waiting[1] < 0.01
    )  # 30 times 0.08 s of the 7.15 s since the start; nothing
    assert [each.state for each in shown] == ["computes", "computes"]
    assert all(
        each.seconds < 0.1 for each in shown
    )  # since the last collective, not since the last blocking call
    call(fast, 31, "all_reduce(next)", now=clock.now)
    clock.now += 2
    for rank in (fast, slow):
        rank.floats[layout.StateWords().heartbeat] = clock.now
    shown = watched.poll()
    assert [(each.state, round(each.seconds)) for each in shown] == [("waits", 2), ("computes", 2)]
    assert shown[0].collective == "all_reduce(next)" and top._stragglers(shown) == [1]
    watched.close()


def test_an_elastic_job_is_shown_with_its_members_and_its_last_events(
    base: Path, process: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 3, control="/somewhere"))
    watched = LiveRanks(folder, is_elastic=True)
    make_rank(folder, 0, pid=2**22 + 1)  # ends
    make_rank(folder, 1, pid=process)
    call(make_rank(folder, 2), 1, "before()")
    assert [rank.pid for rank in watched.poll()] == [process, os.getpid()]
    make_rank(folder, 0, pid=process)  # the next group, of whose records rank 2's is none
    call(make_rank(folder, 1), 1, "after()")
    texts = [f"12:00:0{number} event {number}" for number in range(7)]
    (folder / jobs.EVENTS).write_text("".join(f"{text}\x1b[2J\n" for text in texts))
    shown_ranks = [(rank.rank, rank.pid, rank.collective) for rank in watched.poll()]
    assert shown_ranks == [(0, process, ""), (1, os.getpid(), "after()")]
    lines = shown(capsys)
    assert [line[:16].strip() for line in lines[-6:]] == ["", *(text[:16] for text in texts[2:])]
    assert all(line.isprintable() for line in lines)
    watched.close()


def test_records_that_are_overwritten_do_not_count_as_waits(
    base: Path, clock: SimpleNamespace
) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 2))
    fast, slow, watched = make_rank(folder, 0), make_rank(folder, 1), LiveRanks(folder)
    begin, steps = clock.now, layout.RING + 100
    for step in range(1, steps + 1):
        call(fast, step, now=begin + 1e-3 * step)
        call(slow, step, now=begin + 1e-3 * step + 2.5e-4)
    clock.now = begin + 1e-3 * steps + 2.5e-4
    assert [each.waiting for each in watched.poll()] == [pytest.approx(0.25, abs=0.01), 0.0]
    watched.close()


def test_waits_in_messages_count(base: Path, clock: SimpleNamespace) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 2))
    rank, other, watched = make_rank(folder, 0), make_rank(folder, 1), LiveRanks(folder)
    watched.poll()
    rank.add_message_wait(1.0)
    signature = CallSignature(1, "recv", 0)
    rank.begin_wait(rank.enter(1, 0, 0, signature, 1, 0, 0, 0, 1, now=clock.now), clock.now)
    clock.now += 4
    assert [each.waiting for each in watched.poll()] == [1.0, 0.0]
    rank.end_wait(clock.now)
    assert (other.phase, rank.phase) == ("runs", "runs")
    watched.close()


def test_the_only_rank_of_a_job_waits_for_nobody(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 1))
    make_rank(folder, 0, size=1)
    # rank, PID and state come before, and it has no batch
    assert shown(capsys)[3].split()[3] == "?"


def test_the_only_rank_on_a_host_waits_for_others_while_its_calls_block(
    base: Path, clock: SimpleNamespace
) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 1))
    rank, watched = make_rank(folder, 0), LiveRanks(folder)
    watched.poll()
    rank.begin_wait(call(rank, 1, now=clock.now + 1), clock.now + 1)
    clock.now += 4
    assert watched.poll()[0].waiting == pytest.approx(0.75)
    watched.close()


def test_totals_and_the_slowest_rank_of_any_host_are_shown(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 1))
    make_rank(folder, 0)
    far = RankProgress(1, "b\x1b[2J", 7, 1.0, "runs", 9, 109, 72, 0.0, 0.0, 0.0, 0.0)
    slow = SlowRank(1, "b", 0.02, 0.6)
    rank_progress.write_other_hosts(folder, OtherHosts(time.time(), [far], "a", slow))
    totals = JobTotals(
        *(1.0, 11.0, 2, {"a": 1, "b": 1}, 109, 9, 4, 720, 1440.0, 2.0, 3.0, 4.0, 1, 2, 1),
        slowest=slow,
    )
    job_totals.write_totals(folder, totals)
    lines = shown(capsys)
    assert lines[1:4] == [
        "step 109, 0.9 steps/s, 72 samples/s, 144 tokens/s, waits 20% for data, 30% for other "
        "ranks",
        "goodput 40% since the start, 2 workers lost, 1 joined, 1 restart, 4 steps repeated",
        "slowest: rank 1 on b, which waits 2% of its time; another one waits 60%",
    ]
    assert lines[-1].split()[:2] == ["1", "b"] and lines[-1].endswith("computes   109")
    assert all(line.isprintable() for line in lines)
    job_totals.write_totals(folder, JobTotals(1.0, 11.0, 3, {"a": 1, "b": 1}, 109, 9))
    lines = shown(capsys)
    assert lines[1] == "`lockstep top` on a, the first host, shows the totals"
    jobs.write_description(folder, JobDescription("x", os.getpid(), 1, host="a"))
    assert shown(capsys)[1].startswith("step 109, ")


def test_a_process_that_has_ended_or_is_stopped(base: Path, process: int) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 2))
    watched = LiveRanks(folder)
    make_rank(folder, 0, pid=process)
    make_rank(folder, 1, pid=2**22 + 1)  # beyond the greatest number of a process
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)
    try:
        assert [rank.state for rank in watched.poll()] == ["stopped", "gone"]
        assert [rank.memory > 0 for rank in watched.poll()] == [True, False]
    finally:
        os.kill(process, signal.SIGCONT)
        watched.close()


def test_several_jobs_are_listed_and_one_is_chosen(
    base: Path, process: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    make_job(
        base, "a", JobDescription("first.py\x1b[2J", os.getpid(), 4, started=1.0, cwd="/somewhere")
    )
    folder = make_job(
        base,
        "b",
        JobDescription(
            "second.py", process, 2, started=2.0, cwd="/else", folder=str(tmp_path / "out")
        ),
    )
    make_rank(folder, 0)
    lines = shown(capsys)
    assert lines[0].split() == ["PID", "ranks", "running", "for", "folder", "program"]
    assert [line.split()[0] for line in lines[1:3]] == [str(os.getpid()), str(process)]
    assert lines[3:] == ["", "`lockstep top PID` shows the ranks of one of them."]
    assert lines[1].endswith("first.py") and "/somewhere" in lines[1]
    for word in (str(process), str(tmp_path / "out"), "/else", str(folder)):
        assert shown(capsys, word)[0].startswith("second.py")
    for word in ("1", "/nowhere"):
        assert main(["top", "--once", word]) == 2
        told = capsys.readouterr().err
        assert (
            "job: expected the PID or the folder of a job that is running on this host "
            f"({os.getpid()}, {process})" in told
        )


def test_a_job_is_displayed_until_it_ends(base: Path, process: int) -> None:
    def title() -> str:
        return str(picture.draw().renderables[0]).split()[0]  # type: ignore[union-attr]

    picture = _Display(None)
    first = make_job(base, "a", JobDescription("first.py", os.getpid(), 2, started=1.0))
    assert title() == "first.py"
    make_job(base, "b", JobDescription("second.py", process, 2, started=2.0))
    assert title() == "first.py"
    first.rename(first.with_name("attempt-1"))  # its ranks have been started afresh
    assert title() == "first.py"
    shutil.rmtree(first.parent)
    assert picture.draw() is None
    picture.close()


def test_no_job(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(base, "dead", JobDescription("x", 2**22 + 1, 1))
    (make_job(base, "damaged", JobDescription("x", os.getpid(), 1)) / "job.json").write_text(
        '{"program": 3}'
    )
    assert "No job with a watchdog is running on this host" in shown(capsys)[0]
    assert main(["top", "--interval", "0"]) == 2
    assert "--interval: expected a number of seconds from 0.1 to 3600" in capsys.readouterr().err


def test_what_the_dead_have_left_is_removed(base: Path) -> None:
    living = make_job(base, "living", JobDescription("x", os.getpid(), 1))
    dead = make_job(base, "dead", JobDescription("x", 2**22 + 1, 1))
    orphan = make_job(base, "orphan", JobDescription("x", 2**22 + 1, 1))
    make_rank(orphan, 1)  # of this process, which lives
    make_rank(dead, 1, pid=2**22 + 1)
    locks = [JobFolderLock(living.parent), JobFolderLock(orphan.parent)]
    JobFolderLock(dead.parent).close()
    jobs.remove_dead()
    for lock in locks:
        lock.close()
    assert living.exists() and orphan.exists() and not dead.parent.exists()
    assert set(jobs.find_jobs()) == {living, orphan}


def test_a_step_that_takes_long_has_a_rate(base: Path, clock: SimpleNamespace) -> None:
    folder = make_job(base, "run", JobDescription("x", os.getpid(), 1))
    rank, watched = make_rank(folder, 0), LiveRanks(folder)
    assert watched.poll()[0].samples_s is None  # before the first step
    rank.note_samples(8)
    for _ in range(8):  # in the second step
        clock.now += 2
        (status,) = watched.poll()
    assert status.samples_s == pytest.approx(8 / 20, rel=0.05)
    assert top._rate(0.4) == "0.4"
    assert top._rate(12345.6) == "12,346"
