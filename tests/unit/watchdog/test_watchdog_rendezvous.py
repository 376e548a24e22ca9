"""The rendezvous of ranks: where their flight recorders are, and what becomes of those that find no
place.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep import environment
from lockstep.errors import LockstepError
from lockstep.flight_recorder import jobs, layout
from lockstep.launcher.supervisor import WatchdogFiles
from lockstep.launcher.worker_options import WatchdogOptions
from lockstep.system import private_folders
from lockstep.watchdog import rendezvous
from support.openings import SQUATS, squat


def test_where_one_rank_has_no_space_for_records_the_watchdog_is_off_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = rendezvous._make_recorder
    monkeypatch.setattr(
        rendezvous,
        "_make_recorder",
        lambda folder, rank, size: (rank != 1 and record(folder, rank, size)) or None,
    )
    folder = tmp_path / "job" / "attempt-0"
    folder.mkdir(parents=True)
    monkeypatch.setenv("LOCKSTEP_WATCHDOG_DIR", str(folder))
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> str:
        with pytest.raises(rendezvous.NoSpaceError) as caught:
            rendezvous.rendezvous(store, rank, 3, "here")
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        said = set(pool.map(join, range(3)))
    assert said == {f"no space in {tmp_path} for the flight recorders of ranks [1]"}
    assert not list(folder.iterdir())


def test_two_launchers_on_one_host_do_not_look_for_ranks_in_the_folder_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an elastic job of two launchers, where an earlier group has left the record of another
    rank 1.
    """
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    rendezvous._make_recorder(folders[0], 1, 2)
    of_thread = threading.local()
    monkeypatch.setattr(environment, "records_dir", lambda: of_thread.folder)
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> rendezvous.Rendezvous:
        of_thread.folder = folders[rank]
        return rendezvous.rendezvous(store, rank, 2, "here")

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(join, range(2)))
    assert [each.hosts for each in found] == [((0,), (1,))] * 2
    assert [each.peers for each in found] == [{}, {}]
    for each in found:
        each.recorder.close()
        each.lock.close()
        if each.heartbeat is not None:
            each.heartbeat.close()


@pytest.mark.parametrize(
    "runtime", [True, False], ids=["runtime directory", "no runtime directory"]
)
@pytest.mark.parametrize("kind", SQUATS)
def test_nobody_can_keep_ranks_from_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, runtime: bool
) -> None:
    """The usual folder's name can be guessed; others, or containers that share the memory, may take
    its place.
    """
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
        met = list(pool.map(lambda rank: rendezvous.rendezvous(store, rank, 3, "here"), range(3)))
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


@pytest.mark.parametrize(
    "said", [{"token": "../../home"}, {"base": "/etc"}, {"base": "lockstep/../.."}]
)
def test_a_rank_does_not_record_in_any_folder_that_the_store_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    monkeypatch.setattr(environment, "runtime_dir", lambda: None)
    jobs.make_base()
    first = {"token": "0123456789ab", "base": "", **said}
    with pytest.raises(
        LockstepError, match=r"twelve hexadecimal digits|not a private folder of this user"
    ):
        rendezvous._make_folder(first["token"], first["base"], [0], 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"lockstep-{os.getuid()}"]
