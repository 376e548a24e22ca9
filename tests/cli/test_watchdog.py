"""The launcher's side of the watchdog: last words are waited for, and one report is the end of the
screen.

The programs here say what watchers would; that real ones do is the business of tests/world.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.cli import main
from lockstep.errors import ConfigError
from lockstep.flight_recorder import jobs, layout
from lockstep.launcher import fixed_host
from lockstep.launcher.options import JobOptions
from lockstep.launcher.supervisor import WatchdogFiles
from lockstep.launcher.worker_options import WatchdogOptions
from lockstep.launcher.worker_process.script import Script
from lockstep.watchdog import report as reports
from support import warm_python

DEADLINE = 60.0

HEAD = """
import os, signal, sys, time
from pathlib import Path
from lockstep.errors import DesyncError, RankLostError
from lockstep.flight_recorder.jobs import write_message
from lockstep.watchdog.report import Call, RankStatus, Report, write_once
rank = int(os.environ["RANK"])
folder = Path(os.environ["LOCKSTEP_WATCHDOG_DIR"])
(folder / f"rank-{rank}").touch()
waits = RankStatus(0, "waits", call=Call("barrier()", "program.py:3 in main", "barrier()", 4), waiting_s=0.5)
"""

DEAD = """
if rank == 0:
    write_message(folder, "rank 1 is a straggler")
while not Path("go").exists():
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1.5)  # watchers take their time to be sure
report = Report("lost", "Rank 1 has died.", (waits, RankStatus(1, "died", "gone")), (1,))
assert write_once(folder, report)
raise RankLostError(1, "this text is in the report", report.to_json())
"""

ALIKE = """
report = Report("desync", "Ranks have diverged.", (waits, RankStatus(1, "waits")))
write_once(folder, report)
raise DesyncError("this text is in the report", report.to_json())
"""


def start(folder: Path, body: str, *words: str) -> warm_python.WarmProcess:
    program = folder / "program.py"
    program.write_text(HEAD + textwrap.dedent(body))
    return warm_python.popen(["-m", "lockstep", "run", "-np", 2, *words, program], folder)


def run(folder: Path, body: str, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    with start(folder, body, *words) as launcher:
        out, err = launcher.communicate(timeout=DEADLINE)
        return launcher.returncode, out, err


def test_last_messages_are_waited_for_and_the_report_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, DEAD) as launcher:
        assert launcher.stderr is not None
        lines = [launcher.stderr.readline().rstrip(), launcher.stderr.readline().rstrip()]
        assert lines[1] == "lockstep: rank 1 is a straggler"  # while it is so
        (tmp_path / "go").touch()
        told = launcher.communicate(timeout=DEADLINE)[1]
        assert launcher.returncode == 137, told
    lines += told.splitlines()
    killed = "killed by SIGKILL (as the kernel does when memory runs out)"
    assert lines[2:6] == [
        f"lockstep run: error: rank 1: exit: {killed}",
        "",
        "Rank 1 has died.",
        "",
    ]
    assert lines[7:9] == [
        "  0     0.5 s    in barrier() #4",
        "                   program.py:3 in main: barrier()",
    ]
    assert "  1              died: killed by SIGKILL (as the kernel does when memory runs" in lines
    assert "Traceback" not in told and "this text" not in told
    [written] = tmp_path.glob("reports/*-program-*/report.json")
    assert f"Written to {written.relative_to(tmp_path)};" in " ".join(lines[-3:])
    assert reports.read(written).ranks[1].note == killed
    assert "Rank 1 has died." in written.with_suffix(".txt").read_text()
    monkeypatch.chdir(tmp_path)
    assert main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[4:-3]


def test_an_exception_is_shown_and_kept(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        row = RankStatus(1, "raised", "ValueError: x")
        write_once(folder, Report("raised", "Rank 1 raised ValueError.", (RankStatus(0, "ended"), row), (1,)))
        raise ValueError("x")
    time.sleep(1000)
    """
    code, _, told = run(tmp_path, body)
    assert code == 1
    assert "\nlockstep run: error: rank 1: ValueError: x\n\nRank 1 raised ValueError.\n" in told
    assert (
        'raise ValueError("x")\nValueError: x\n' in told
        and told.count("Traceback (most recent call last)") == 1
    )
    [written] = tmp_path.glob("reports/*-program-*/report.json")
    assert f"Written to {written.relative_to(tmp_path)};" in told
    assert reports.read(written).ranks[1].note == "ValueError: x"


def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    # a rank that is still starting when the other one fails is ended before it has a log
    both = """
    import pathlib
    while len(list(pathlib.Path("out").glob("rank-*.log"))) < 2:
        time.sleep(0.01)
    """
    code, _, told = run(tmp_path, textwrap.dedent(both) + ALIKE, "--output-dir", "out")
    assert code == 1
    lines = told.splitlines()
    assert lines[1:4] == ["lockstep run: error: Ranks have diverged.", "", "  rank  waiting  where"]
    assert lines[-1] == "Written to out/report.json; `lockstep explain out` shows it again."
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "rank-0.log",
        "rank-1.log",
        "report.json",
        "report.txt",
    ]
    assert not (tmp_path / "runs").exists()


def test_workers_find_where_to_record_and_nothing_stays(tmp_path: Path) -> None:
    body = """
    about = __import__("json").loads((folder / "job.json").read_text())
    names = ("LOCKSTEP_WATCHDOG", "LOCKSTEP_STALL_TIMEOUT", "LOCKSTEP_TIMELINE")
    print(__import__("json").dumps([str(folder), about, {name: os.environ.get(name) for name in names}]))
    """
    words = ("--strict", "--stall-timeout", "7.5", "--timeline", "lines", "--no-prefix")
    code, out, told = run(tmp_path, body, *words)
    assert code == 0, told
    folder, about, found = json.loads(out.splitlines()[0])
    assert Path(folder).parent.parent == jobs.make_base() and not Path(folder).parent.exists()
    assert found == {
        "LOCKSTEP_WATCHDOG": "strict",
        "LOCKSTEP_STALL_TIMEOUT": "7.5",
        "LOCKSTEP_TIMELINE": str(tmp_path / "lines"),
    }
    assert (about["workers"], about["first_rank"], about["cwd"]) == (2, 0, str(tmp_path))
    assert "program.py" in about["program"] and about["pid"] not in (0, os.getpid())


def test_ranks_that_are_started_afresh_are_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    watchdog = WatchdogFiles("run", WatchdogOptions(), None, print)
    base = tmp_path / f"lockstep-{os.getuid()}"
    for attempt in range(2):
        watchdog.start_attempt(attempt, 0, 2)
    assert list(jobs.find_jobs()) == [watchdog.folder] == [base / "run" / "attempt-1"]
    watchdog.close()
    assert not list(base.iterdir())


def test_without_space_for_flight_records_ranks_run_without_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    base = tmp_path / f"lockstep-{os.getuid()}"
    told: list[str] = []
    watchdog = WatchdogFiles("run", WatchdogOptions("strict"), None, told.append)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "write_description", fill_the_disk)
        watchdog.start_attempt(0, 0, 2)
    assert told == [f"lockstep: the watchdog is off: {base}: No space left on device"]
    assert watchdog.variables() == {"LOCKSTEP_WATCHDOG": "off", "LOCKSTEP_WATCHDOG_DIR": ""}
    assert (
        watchdog.report() is None and not watchdog.any_recorded([0, 1]) and not list(base.iterdir())
    )
    watchdog.start_attempt(1, 0, 2)
    assert watchdog.variables()["LOCKSTEP_WATCHDOG"] == "strict" and watchdog.folder is not None
    watchdog.close()
    assert not list(base.iterdir())


def test_a_launcher_that_is_killed_leaves_no_flight_records(tmp_path: Path) -> None:
    with start(tmp_path, "print(folder, flush=True); time.sleep(1000)", "--no-prefix") as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        assert folder.is_dir()
        launcher.kill()
    deadline = time.monotonic() + DEADLINE
    while folder.parent.exists():
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.01)


def test_the_error_of_a_launched_function_is_the_report() -> None:
    def part() -> None:
        import torch.distributed as dist

        rank = lockstep.init().rank
        dist.all_reduce(torch.ones(2)) if rank else dist.broadcast(torch.ones(2), 0)

    with pytest.raises(lockstep.DesyncError, match="rank  waiting  where") as caught:
        lockstep.launch(part, workers=2)
    assert "in all_reduce(float32[2], sum) #1" in str(caught.value)
    assert reports.from_json(caught.value.report_json).kind == "desync"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-watchdog", "--strict"], "--strict: expected not to be given with --no-watchdog"),
        (
            ["--no-watchdog", "--timeline", "x"],
            "--timeline: expected not to be given with --no-watchdog",
        ),
        (
            ["--stall-timeout", "0"],
            "--stall-timeout: expected a number of seconds, above 0, got '0'",
        ),
        (
            ["--stall-timeout", "soon"],
            "--stall-timeout: expected a number of seconds, above 0, got 'soon'",
        ),
        (
            ["--timeline", __file__],
            "--timeline: expected a folder, which is created if it does not exist",
        ),
    ],
)
def test_options_that_do_not_fit(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words, __file__]) == 2
    assert said in capsys.readouterr().err


def test_an_invalid_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WATCHDOG", "loud")
    with pytest.raises(
        ConfigError, match="LOCKSTEP_WATCHDOG: expected on, strict or off, got 'loud'"
    ):
        fixed_host.run_host_share(Script(__file__), JobOptions((__file__,)), 2, None, None)  # type: ignore[arg-type]
