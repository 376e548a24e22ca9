"""The folders of jobs: who may use them, and which jobs are alive."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import environment
from lockstep.flight_recorder import jobs, layout
from lockstep.system import private_folders
from lockstep.system.job_folders import JobFolderLock


def base_in(parent: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path | None = None) -> Path:
    """The folder for this user's jobs, in `parent` instead of the host's memory."""
    monkeypatch.setattr(layout, "parent", lambda: parent)
    monkeypatch.setattr(environment, "runtime_dir", lambda: runtime)
    return jobs.make_base()


def test_a_folder_of_an_unknown_user_is_not_taken_for_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container all users of the host whom it does not know have one number, which may be this
    user's.
    """
    base = base_in(tmp_path, monkeypatch)
    monkeypatch.setattr(private_folders.os, "access", lambda path, mode: Path(path) != base)
    assert jobs.make_base() != base


def test_jobs_of_other_containers_are_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their process ids say nothing here: a lock says whether a process of the job lives."""
    base = base_in(tmp_path, monkeypatch)
    locks = {}
    for name in ("dead", "living"):
        folder = base / name / "attempt-0"
        folder.mkdir(parents=True)
        jobs.write_description(folder, jobs.JobDescription("program", 0, 1))
        locks[name] = JobFolderLock(folder.parent)
    locks["dead"].close()
    jobs.remove_dead()
    locks["living"].close()
    assert [path.name for path in base.iterdir()] == ["living"]


def test_a_job_that_ends_while_others_look_for_jobs_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_in(tmp_path, monkeypatch)
    for name in ("ended", "other"):
        (base / name / "attempt-0").mkdir(parents=True)
        jobs.write_description(
            base / name / "attempt-0", jobs.JobDescription("program", os.getpid(), 1)
        )
    for module, name in (
        (os, "scandir"),
        (os, "listdir"),
        (Path, "iterdir"),
    ):  # in Python 3.10 the last calls neither
        listing = getattr(module, name)

        def gone(path: Any, listing: Callable[[Any], Any] = listing) -> Any:
            if Path(path).name == "ended":
                raise FileNotFoundError(path)
            return listing(path)

        monkeypatch.setattr(module, name, gone)
    jobs.remove_dead()
    assert [folder.parent.name for folder in jobs.find_jobs()] == ["other"]
