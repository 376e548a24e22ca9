"""`.ci/run` runs failed tests again, each alone, and names those that then pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / ".ci" / "run_failed_again.py"

TESTS = '''
import pathlib
import pytest

@pytest.mark.parametrize("number", range(4))
def test_unstable(number):
    """As a test that fails while others run beside it."""

def test_broken():
    assert 1 == 2
'''


def noted(folder: Path, status: int, failed: Iterable[str]) -> None:
    """Leave behind in `folder` what a run of pytest does."""
    (folder / "test_some.py").write_text(TESTS)
    cache = folder / ".pytest_cache" / "v"
    (cache / "lockstep").mkdir(parents=True)
    (cache / "lockstep" / "exit_status").write_text(str(status))
    (cache / "cache").mkdir()
    (cache / "cache" / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))


def again(folder: Path) -> tuple[int, str, list[str]]:
    """Run the failed tests of `folder` again; returns (exit status, output, names of unstable
    tests).
    """
    unstable = folder / "unstable"
    command = [sys.executable, str(PROGRAM), str(unstable)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    names = unstable.read_text().splitlines() if unstable.exists() else []
    return done.returncode, done.stdout + done.stderr, names


UNSTABLE = [f"test_some.py::test_unstable[{number}]" for number in range(4)]
BROKEN = "test_some.py::test_broken"


def test_up_to_two_tests_may_pass_the_second_time(tmp_path):
    noted(tmp_path, 1, UNSTABLE[:2])

    status, _, names = again(tmp_path)

    assert (status, names) == (0, UNSTABLE[:2])


def test_three_unstable_tests_are_too_many(tmp_path):
    noted(tmp_path, 1, UNSTABLE[:3])

    status, output, names = again(tmp_path)

    assert (status, names) == (1, UNSTABLE[:3])
    assert "3 tests failed once and passed alone; at most 2 may." in output


def test_a_test_that_fails_again_fails_the_run_and_is_shown(tmp_path):
    noted(tmp_path, 1, [UNSTABLE[0], BROKEN])

    status, output, names = again(tmp_path)

    assert (status, names) == (1, UNSTABLE[:1])
    assert "assert 1 == 2" in output


def test_many_failures_are_not_run_again(tmp_path):
    noted(tmp_path, 1, [f"{BROKEN}[{number}]" for number in range(13)])

    status, output, names = again(tmp_path)

    assert (status, names) == (1, [])
    assert "13 tests failed" in output


@pytest.mark.parametrize("status", [2, 3, 5])
def test_a_run_that_was_cut_off_is_no_success(tmp_path, status):
    noted(tmp_path, status, [])

    assert again(tmp_path)[::2] == (1, [])


def test_a_run_that_never_ended_is_no_success(tmp_path):
    assert again(tmp_path)[::2] == (1, [])


def test_the_end_of_a_run_is_noted_for_it(tmp_path):
    one = "tests/unit/test_messages.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        f"cache_dir={tmp_path}",
        "-k",
        "no_such_test",
        one,
    ]

    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)

    assert (tmp_path / "v" / "lockstep" / "exit_status").read_text() == "5"  # no test was selected
