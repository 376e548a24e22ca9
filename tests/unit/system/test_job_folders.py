"""The folder of a job is abandoned when no process of it lives, whatever the numbers of its
processes are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.system.job_folders import JobFolderLock, is_abandoned, temporary_job_folder

HOLDER = """
import sys
from pathlib import Path
from lockstep.system.job_folders import JobFolderLock
lock = JobFolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_in_use_until_all_have_closed_their_locks(tmp_path: Path) -> None:
    locks = [JobFolderLock(tmp_path), JobFolderLock(tmp_path)]
    states = [is_abandoned(tmp_path)]
    for lock in locks:
        lock.close()
        states.append(is_abandoned(tmp_path))
    assert states == [False, False, True]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_in_use_until_its_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert not is_abandoned(tmp_path)
        holder.kill()
    assert is_abandoned(tmp_path)


def test_a_folder_without_a_lock_is_nobodys_to_remove(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path)
    assert not is_abandoned(tmp_path / "missing")
    (tmp_path / ".in-use").symlink_to("elsewhere")
    assert not is_abandoned(tmp_path)


def test_the_next_job_removes_what_a_killed_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, of_others = tmp_path / "lockstep-dead", tmp_path / "lockstep-not-a-job"
    for folder in (dead, of_others):
        (folder / "attempt-0").mkdir(parents=True)
        folder.chmod(0o700)
    JobFolderLock(dead).close()
    with temporary_job_folder() as living:
        assert {*tmp_path.iterdir()} == {living, of_others}
        with temporary_job_folder() as other:
            assert {*tmp_path.iterdir()} == {living, of_others, other}
    assert {*tmp_path.iterdir()} == {of_others}


def test_a_file_system_without_locks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("lockstep.system.job_folders.fcntl.flock", refuse)
    JobFolderLock(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
