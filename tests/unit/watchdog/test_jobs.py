"""The folders of jobs: who may use them, and which jobs are alive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep import environment
from lockstep.errors import LockstepError
from lockstep.flight_recorder import layout
from lockstep.launcher.run_config import WatchdogOptions
from lockstep.launcher.supervisor import WatchdogFiles
from lockstep.system import private_folders
from lockstep.system.job_folders import JobFolderLock
from lockstep.watchdog import jobs
from support.openings import SQUATS, squat


def test_where_one_rank_has_no_space_for_records_the_watchdog_is_off_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = jobs._make_recorder
    monkeypatch.setattr(
        jobs, "_make_recorder", lambda folder, rank, size: (rank != 1 and record(folder, rank, size)) or None
    )
    folder = tmp_path / "job" / "attempt-0"
    folder.mkdir(parents=True)
    monkeypatch.setenv("LOCKSTEP_WATCHDOG_DIR", str(folder))
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> str:
        with pytest.raises(jobs.NoSpaceError) as caught:
            jobs.rendezvous(store, rank, 3, "here")
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        said = set(pool.map(join, range(3)))
    assert said == {f"no space in {tmp_path} for the flight recorders of ranks [1]"}
    assert not list(folder.iterdir())


def test_two_launchers_on_one_host_do_not_look_for_ranks_in_the_folder_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an elastic job of two launchers, where an earlier group has left the record of another rank 1."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    jobs._make_recorder(folders[0], 1, 2)
    of_thread = threading.local()
    monkeypatch.setattr(environment, "records_dir", lambda: of_thread.folder)
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> jobs.Rendezvous:
        of_thread.folder = folders[rank]
        return jobs.rendezvous(store, rank, 2, "here")

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(join, range(2)))
    assert [each.hosts for each in found] == [((0,), (1,))] * 2
    assert [each.peers for each in found] == [{}, {}]
    for each in found:
        each.recorder.close()
        each.lock.close()
        if each.heartbeat is not None:
            each.heartbeat.close()


def base_in(parent: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path | None = None) -> Path:
    """The folder for this user's jobs, in `parent` instead of the host's memory."""
    monkeypatch.setattr(layout, "parent", lambda: parent)
    monkeypatch.setattr(environment, "runtime_dir", lambda: runtime)
    return jobs.make_base()


@pytest.mark.parametrize("runtime", [True, False], ids=["runtime directory", "no runtime directory"])
@pytest.mark.parametrize("kind", SQUATS)
def test_nobody_can_keep_ranks_from_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, runtime: bool
) -> None:
    """The usual folder's name can be guessed; others, or containers that share the memory, may take its place."""
    taken, own = tmp_path / f"lockstep-{os.getuid()}", tmp_path / "runtime"
    squat(taken, kind)
    own.mkdir(mode=0o700)
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    monkeypatch.setattr(environment, "runtime_dir", lambda: own if runtime else None)
    before = set(tmp_path.iterdir())

    # ranks that a launcher has started
    told: list[str] = []
    watchdog = WatchdogFiles("run", WatchdogOptions(), None, told.append)
    watchdog.start_attempt(0, 0, 2)
    assert told == [] and watchdog.folder is not None
    assert watchdog.variables()["LOCKSTEP_WATCHDOG_DIR"] == str(watchdog.folder)
    assert list(jobs.find_jobs()) == [watchdog.folder]  # for `lockstep top`
    watchdog.close()

    # ranks without one
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda rank: jobs.rendezvous(store, rank, 3, "here"), range(3)))
    assert len({each.folder for each in met}) == 1 and list(jobs.find_jobs()) == [met[0].folder]
    base = met[0].folder.parent.parent
    assert base.parent == (own if runtime else tmp_path) and private_folders.is_private(base)
    for each in met:
        each.recorder.close()
        each.lock.close()
        for peer in each.peers.values():
            peer.close()
    jobs.remove(met[0].folder.parent)

    assert set(tmp_path.iterdir()) == before
    if taken.is_dir():
        assert list(taken.iterdir()) == []  # nothing is entrusted to what others can change


def test_a_folder_of_an_unknown_user_is_not_taken_for_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container all users of the host whom it does not know have one number, which may be this user's."""
    base = base_in(tmp_path, monkeypatch)
    monkeypatch.setattr(private_folders.os, "access", lambda path, mode: Path(path) != base)
    assert jobs.make_base() != base


@pytest.mark.parametrize("said", [{"token": "../../home"}, {"base": "/etc"}, {"base": "lockstep/../.."}])
def test_a_rank_does_not_record_in_any_folder_that_the_store_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    base_in(tmp_path, monkeypatch)
    first = {"token": "0123456789ab", "base": "", **said}
    with pytest.raises(LockstepError, match=r"twelve hexadecimal digits|not a private folder of this user"):
        jobs._make_folder(first["token"], first["base"], [0], 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"lockstep-{os.getuid()}"]


def test_jobs_of_other_containers_are_not_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_job_that_ends_while_others_look_for_jobs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_in(tmp_path, monkeypatch)
    for name in ("ended", "other"):
        (base / name / "attempt-0").mkdir(parents=True)
        jobs.write_description(base / name / "attempt-0", jobs.JobDescription("program", os.getpid(), 1))
    for module, name in ((os, "scandir"), (os, "listdir"), (Path, "iterdir")):  # in Python 3.10 the last calls neither
        listing = getattr(module, name)

        def gone(path: Any, listing: Callable[[Any], Any] = listing) -> Any:
            if Path(path).name == "ended":
                raise FileNotFoundError(path)
            return listing(path)

        monkeypatch.setattr(module, name, gone)
    jobs.remove_dead()
    assert [folder.parent.name for folder in jobs.find_jobs()] == ["other"]
