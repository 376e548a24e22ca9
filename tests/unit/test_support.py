"""The leak checks see each kind of leak, wait for what is only slow to go, and put settings
back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import launcher_chaos, leaks
from support.outcome import Outcome, RanksFailedError
from support.worker import fresh_store

CONFTEST = Path(__file__).parent.parent / "conftest.py"


@pytest.fixture
def after() -> Iterator[ExitStack]:
    """What a test leaks on purpose is undone here."""
    with ExitStack() as stack:
        yield stack


def watch() -> leaks.Watch:
    return leaks.Watch(lambda: ((), ()))


# --- resources
# ----------------------------------------------------------------------------------------------


def test_nothing_done_is_nothing_left() -> None:
    assert watch().finish(linger=0) == []


def test_an_open_file_is_left(tmp_path: Path, after: ExitStack) -> None:
    before = watch()
    after.enter_context((tmp_path / "kept").open("w"))
    assert before.finish(linger=0) == [f"open file descriptor: {tmp_path / 'kept'}"]


def test_one_more_of_the_same_file_is_left(tmp_path: Path, after: ExitStack) -> None:
    after.enter_context((tmp_path / "kept").open("w"))
    before = watch()
    after.enter_context((tmp_path / "kept").open("r"))
    assert before.finish(linger=0) == [f"open file descriptor: {tmp_path / 'kept'}"]


def test_a_file_that_only_a_cycle_holds_is_not_left(tmp_path: Path) -> None:
    before = watch()
    descriptor = os.open(tmp_path / "kept", os.O_CREAT)

    class Holder:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            os.close(descriptor)

    Holder()
    assert before.finish(linger=0) == []


def test_files_of_the_test_run_are_not_left(after: ExitStack) -> None:
    known: set[leaks.File] = set()
    before = leaks.Watch(lambda: ((), known))
    ends = os.pipe()
    for end in ends:
        after.callback(os.close, end)
    known |= {file for file in leaks.descriptors() if file[0] in ends}
    assert len(known) == 2
    assert before.finish(linger=0) == []


def test_a_child_process_is_left(after: ExitStack) -> None:
    before = watch()
    child = after.enter_context(subprocess.Popen(["sleep", "60"]))
    after.callback(child.kill)
    [left] = before.finish(linger=0)
    assert left.startswith(f"child process {child.pid} (")


def test_a_child_that_runs_another_program_by_now_is_not_left(after: ExitStack) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = after.enter_context(
        subprocess.Popen(["sh", "-c", "read line; exec sh -c 'echo; exec cat'"], **pipes)
    )
    after.callback(child.kill)
    before = watch()
    child.stdin.write(b"go on\n")
    child.stdin.flush()
    child.stdout.readline()
    assert before.finish(linger=0) == []


def test_a_grandchild_is_left(after: ExitStack) -> None:
    before = watch()
    child = after.enter_context(
        subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    )
    after.callback(child.kill)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    after.callback(os.kill, grandchild, signal.SIGKILL)
    left = [line for line in before.finish(linger=0) if line.startswith("child process")]
    assert sorted(int(line.split()[2]) for line in left) == sorted([child.pid, grandchild])


def test_a_zombie_is_left(after: ExitStack) -> None:
    before = watch()
    child = subprocess.Popen(["true"])
    after.callback(child.wait)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "(zombie)" in "".join(before.finish(linger=0))


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_is_left(after: ExitStack, daemon: bool) -> None:
    before = watch()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="kept", daemon=daemon)
    thread.start()
    after.callback(thread.join)
    after.callback(done.set)
    assert before.finish(linger=0) == ["daemon thread: kept" if daemon else "thread: kept"]


def test_what_is_slow_to_end_is_waited_for(after: ExitStack) -> None:
    before = watch()
    asked = threading.Event()
    thread = threading.Thread(target=asked.wait)
    thread.start()
    after.callback(thread.join)
    looks: list[list[str]] = []

    def look() -> Any:
        held = before._resources()
        looks.append(sorted((held - before.held).elements()))
        asked.set()  # ends the thread some time after the first look
        return held

    assert leaks.remaining(before.held, look, linger=30) == []
    assert looks[0]
    assert not looks[-1]


def test_garbage_that_another_thread_let_go_of_late_is_no_leak() -> None:
    before = watch()
    cycle: list[Any] = [open(os.devnull)]  # noqa: SIM115, PTH123, left to the garbage collector
    cycle.append(cycle)
    holders = [cycle]
    del cycle
    looks = 0

    def look() -> Any:
        nonlocal looks
        looks += 1
        if looks == 2:  # after the first collection
            holders.clear()
        return before._resources()

    with pytest.warns(ResourceWarning):
        assert leaks.remaining(before.held, look, linger=30) == []
    assert looks > 1


# --- settings
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: os.chdir("/"), "working directory: was "),
        (lambda: torch.set_num_threads(3), "torch thread count: was 1, is 3"),
        (
            lambda: torch.set_default_dtype(torch.float64),
            "torch default dtype: was torch.float32, is torch.float64",
        ),
        (lambda: torch.autograd.set_grad_enabled(False), "torch gradient mode: was True, is False"),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            "torch matmul precision: was 'highest'",
        ),
        (
            lambda: torch._C._set_deterministic_algorithms(True, warn_only=False),
            "torch deterministic algorithms: ",
        ),
        (
            lambda: setattr(torch.backends.cudnn, "benchmark", True),
            "torch.backends.cudnn.benchmark: was False",
        ),
        (
            lambda: setattr(torch.backends.cudnn, "deterministic", True),
            "torch.backends.cudnn.deterministic: was",
        ),
        (
            lambda: os.environ.update(LOCKSTEP_NEW="1"),
            "environment variable LOCKSTEP_NEW: was not set, is '1'",
        ),
        (
            lambda: os.environ.pop("LOCKSTEP_OLD"),
            "environment variable LOCKSTEP_OLD: was '1', is not set",
        ),
        (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "handler of SIGTERM: was "),
        (
            lambda: __import__("multiprocessing").set_start_method("spawn", force=True),
            "multiprocessing start method",
        ),
        (
            lambda: dist.init_process_group("gloo", store=fresh_store(), rank=0, world_size=1),
            "default process group: was False, is True",
        ),
    ],
)
def test_a_changed_setting_is_reported_and_restored(
    change: Callable[[], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD", "1")
    before = watch()
    change()
    [left] = before.finish()
    assert left.startswith(told)
    assert before.finish(linger=0) == []


def test_a_folder_that_has_been_removed_can_be_left(tmp_path: Path) -> None:
    before = watch()
    (tmp_path / "brief").mkdir()
    os.chdir(tmp_path / "brief")
    (tmp_path / "brief").rmdir()
    assert "a folder that is gone" in before.finish()[0]
    assert before.finish() == []


def test_a_communicator_of_an_earlier_job_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import lockstep.communicator

    alone = lockstep.communicator.init(device="cpu")
    assert lockstep.communicator.init() is alone
    leaks.forget_communicator()
    assert lockstep.communicator.init(device="cpu") is not alone


# --- the fixture
# --------------------------------------------------------------------------------------------


LEAKY = """
import os
import pytest

def test_clean():
    pass

def test_leaks_a_file():
    os.open("kept", os.O_CREAT)

def test_after_a_leak():
    pass

def test_changes_the_environment():
    os.environ["LOCKSTEP_TEST"] = "kept"

def test_environment_was_put_back(monkeypatch):
    assert "LOCKSTEP_TEST" not in os.environ
    monkeypatch.setenv("LOCKSTEP_TEST", "undone before the check")

@pytest.mark.leaks("on purpose")
def test_is_excused():
    os.open("kept", os.O_CREAT)

@pytest.mark.leaks
def test_gives_no_reason():
    pass

def test_fails_and_leaks():
    os.open("kept", os.O_CREAT)
    assert False
"""


@pytest.mark.leaks("the tests run inside leak descriptors")
def test_the_fixture_fails_the_test_that_leaks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "LINGER", 0.05)
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(LEAKY)
    before = leaks.descriptors()
    try:
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rA")
    finally:
        for number, _ in leaks.descriptors() - before:
            os.close(number)
    result.assert_outcomes(passed=6, failed=1, errors=3)
    names = "test_leaks_a_file", "test_changes_the_environment", "test_gives_no_reason"
    result.stdout.fnmatch_lines_random([f"ERROR *::{name}*" for name in names])
    result.stdout.fnmatch_lines(["left behind by this test:", "  open file descriptor: */kept"])
    result.stdout.fnmatch_lines(["  environment variable LOCKSTEP_TEST: was not set, is 'kept'"])
    result.stdout.fnmatch_lines(['*needs a reason: @pytest.mark.leaks("why")*'])


# --- the report of a failed run
# -----------------------------------------------------------------------------


def test_a_death_is_a_cause_and_what_follows_it_at_once_is_not() -> None:
    reaction = Outcome(
        0, "raised", at=10.000, kind="RuntimeError", message="connection closed", trace="trace 0"
    )
    death = Outcome(1, "died", at=10.004, message="killed by signal 9")
    error = RanksFailedError("job", [reaction, death, Outcome(2, "returned", at=9.0)])
    assert error.first is death
    assert str(error).splitlines() == [
        "job: 2 of 3 ranks failed, rank 1 first",
        "--- rank 1 (first): died: killed by signal 9",
        "--- rank 0: raised RuntimeError: connection closed",
        "trace 0",
        "--- rank 2: returned",
    ]


def test_what_is_left_behind_is_a_failure() -> None:
    outcome = Outcome(0, "returned", at=1.0, left=["thread: kept"])
    assert outcome.failed
    assert outcome.line() == "returned but left behind: thread: kept"


# --- jobs whose hosts are lost at random
# ---------------------------------------------------------------------------------


def test_only_who_was_lost_with_all_others_may_have_completed_the_training_in_vain(
    tmp_path: Path,
) -> None:
    job = launcher_chaos.Job(launcher_chaos.Plan.of(0), tmp_path)
    job.killed = {5: frozenset({5, 6, 7}), 6: frozenset({6, 7})}
    assert not job.was_lost_with_all(5)  # 7 was left, and could tell
    job.killed[7] = frozenset({7})
    assert job.was_lost_with_all(5)
    assert not job.was_lost_with_all(8)
