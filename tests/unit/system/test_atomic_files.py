"""Files and folders appear whole or not at all, and leftovers of dead processes go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.system import atomic_files

HAS_PROC = Path("/proc/self/stat").exists()


class Disk:
    """Notes each flush and each renaming, and fails at the one with number `fail_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
        self.events: list[str] = []
        self.names: dict[int, str] = {}
        self.error, self.fail_at = error, 10**9
        real_fsync, real_rename, real_replace = os.fsync, Path.rename, Path.replace

        def fsync(descriptor: int) -> None:
            self.note("flush " + self.name(os.fstat(descriptor).st_ino))
            real_fsync(descriptor)

        def rename(path: Path, target: Path) -> Path:
            self.note(
                f"name {Path(target).name}" if path.name.startswith(".") else f"park {path.name}"
            )
            return real_rename(path, target)

        def replace(path: Path, target: Path) -> Path:
            self.note(f"name {Path(target).name}")
            return real_replace(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(Path, "replace", replace)

    def watch(self, parent: Path) -> None:
        self.names[parent.stat().st_ino] = "parent"

    def name(self, inode: int) -> str:
        return self.names.get(inode, "content")

    def note(self, event: str) -> None:
        self.events.append(event)
        if len(self.events) == self.fail_at:
            assert self.error is not None
            raise self.error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def leftover(
    folder: Path,
    kind: str = "tmp",
    host: str | None = None,
    pid: int | None = None,
    started: int | None = None,
) -> Path:
    """A folder with content, named as `atomic` names what process `pid` is busy with."""
    pid = os.getpid() if pid is None else pid
    started = (atomic_files._started(pid) or 0) if started is None else started
    path = folder / f".{kind}-{host or atomic_files._host()}-{pid}-{started}-0123abcd-thing"
    path.mkdir()
    (path / "part").write_bytes(b"old")
    return path


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def zombie_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"", b"third\x00\xff"):
        atomic_files.write_bytes(path, data)
        assert path.read_bytes() == data
        assert names(tmp_path) == ["file"]


def test_a_text_file_is_utf8_with_its_line_ends_as_they_are(tmp_path: Path) -> None:
    atomic_files.write_text(tmp_path / "text", "Grüße\r\n→\n")
    assert (tmp_path / "text").read_bytes() == "Grüße\r\n→\n".encode()


def test_a_file_gets_the_rights_that_any_new_file_gets(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_files.write_bytes(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("letter", ["n", "ü"])
def test_the_longest_name_that_the_file_system_takes_can_be_written(
    tmp_path: Path, letter: str
) -> None:
    path = tmp_path / (letter * (255 // len(letter.encode())))
    atomic_files.write_bytes(path, b"data")
    assert path.read_bytes() == b"data"


def test_a_file_is_flushed_before_it_is_named_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.watch(tmp_path)
    atomic_files.write_bytes(tmp_path / "file", b"data")
    assert disk.events == ["flush content", "name file", "flush parent"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, fail_at: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    Disk(monkeypatch, error).fail_at = fail_at
    with pytest.raises(type(error)):
        atomic_files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_json_has_null_where_a_float_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    atomic_files.write_json(
        path,
        {"nan": float("nan"), "rows": [1.5, float("inf"), (float("-inf"), True)], "name": "Zoë"},
    )

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    value = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    assert value == {"nan": None, "rows": [1.5, None, [None, True]], "name": "Zoë"}


def test_what_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        atomic_files.write_json(path, {"object": object()})
    assert path.read_text() == "old"
    assert names(tmp_path) == ["result.json"]


def test_a_folder_appears_when_its_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with atomic_files.folder(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".tmp-")
        (temporary / "deep").mkdir()
        (temporary / "deep" / "file").write_bytes(b"new")
        assert not path.exists()
    assert (path / "deep" / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["run"]


def test_a_folder_replaces_the_one_that_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for text in ("first", "second"):
        with atomic_files.folder(path) as temporary:
            (temporary / text).write_text(text)
    assert names(path) == ["second"]
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_folder_does_not_replace_what_is_no_folder(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    path.write_text("mine") if kind == "file" else path.symlink_to("nowhere")
    with pytest.raises(NotADirectoryError, match="run"), atomic_files.folder(path):
        raise AssertionError("the block was entered")
    assert names(tmp_path) == ["run"]
    assert path.is_symlink() or path.read_text() == "mine"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_in_the_block_leaves_the_old_folder(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises(type(error)), atomic_files.folder(path) as temporary:
        (temporary / "new").write_text("half")
        raise error
    assert names(path) == ["old"]
    assert names(tmp_path) == ["run"]


def test_all_of_a_folder_is_flushed_before_it_is_named_and_its_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    disk = Disk(monkeypatch)
    disk.watch(tmp_path)
    with atomic_files.folder(path) as temporary:
        (temporary / "a").write_text("a")
        (temporary / "deep").mkdir()
        (temporary / "deep" / "b").write_text("b")
        for entry, name in (
            (temporary, "folder"),
            *((temporary / name, name) for name in ("a", "deep", "deep/b")),
        ):
            disk.names[entry.stat().st_ino] = name
    assert set(disk.events[:4]) == {"flush a", "flush deep", "flush deep/b", "flush folder"}
    assert disk.events[4:] == ["park run", "name run", "flush parent"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_folder_that_cannot_be_flushed_or_named_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, fail_at: int
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "old").write_text("old")
    disk = Disk(monkeypatch, error)
    disk.fail_at = fail_at
    with pytest.raises(type(error)), atomic_files.folder(path) as temporary:
        (temporary / "new").write_text("new")
    assert disk.events[:4] == ["flush content", "flush content", "park run", "name run"][:fail_at]
    assert names(path) == ["old"]
    assert names(tmp_path) == ["run"]


def test_a_file_system_that_cannot_flush_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, OSError(22, "Invalid argument")).fail_at = 3
    atomic_files.write_bytes(tmp_path / "file", b"data")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_remove_takes_a_file_or_a_folder_away(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("folder", "file"):
        atomic_files.remove(tmp_path / name)
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        atomic_files.remove(tmp_path / "folder")


def test_sweep_removes_what_a_dead_process_left(tmp_path: Path, dead_pid: int) -> None:
    leftover(tmp_path, pid=dead_pid)
    (tmp_path / f".tmp-{atomic_files._host()}-{dead_pid}-0-0123abcd-file").write_text("half")
    atomic_files.remove_abandoned(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.skipif(not HAS_PROC, reason="only /proc tells that a process is a zombie")
def test_sweep_takes_a_zombie_for_dead(tmp_path: Path, zombie_pid: int) -> None:
    leftover(tmp_path, pid=zombie_pid)
    atomic_files.remove_abandoned(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.skipif(not HAS_PROC, reason="only /proc tells when a process began")
def test_sweep_takes_a_process_number_used_again_for_dead(tmp_path: Path) -> None:
    leftover(tmp_path, started=1)
    atomic_files.remove_abandoned(tmp_path)
    assert names(tmp_path) == []


def test_sweep_leaves_what_a_live_process_works_on(tmp_path: Path) -> None:
    with atomic_files.folder(tmp_path / "run") as temporary:
        leftover(tmp_path)
        atomic_files.remove_abandoned(tmp_path)
        assert temporary.exists()
    assert len(names(tmp_path)) == 2


def test_sweep_leaves_what_another_host_works_on_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leftover(tmp_path, host="00000000", pid=1)
    atomic_files.remove_abandoned(tmp_path)
    assert path.exists()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    atomic_files.remove_abandoned(tmp_path)
    assert not path.exists()


def test_sweep_leaves_everything_of_another_name(tmp_path: Path) -> None:
    for name in (
        ".tmp-",
        ".tmp-mine",
        ".old-1-2-3-4-x",
        "tmp-00000000-1-1-0123abcd-x",
        ".hidden",
        "step-0000000001",
    ):
        (tmp_path / name).write_text("")
    before = names(tmp_path)
    atomic_files.remove_abandoned(tmp_path)
    assert names(tmp_path) == before


def test_sweep_of_no_folder_does_nothing(tmp_path: Path) -> None:
    atomic_files.remove_abandoned(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    atomic_files.remove_abandoned(tmp_path / "file")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("housekeeping", [atomic_files.restore, atomic_files.remove_abandoned])
def test_a_folder_whose_replacement_was_cut_short_comes_back(
    tmp_path: Path, dead_pid: int, housekeeping: object
) -> None:
    leftover(tmp_path, "old", pid=dead_pid)
    assert callable(housekeeping)
    housekeeping(tmp_path)
    assert names(tmp_path) == ["thing"]
    assert (tmp_path / "thing" / "part").read_bytes() == b"old"


def test_a_folder_that_cannot_come_back_is_not_removed(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leftover(tmp_path, "old", pid=dead_pid)
    Disk(monkeypatch, OSError(5, "Input/output error")).fail_at = 1
    atomic_files.remove_abandoned(tmp_path)
    assert (path / "part").read_bytes() == b"old"


def test_a_folder_that_was_replaced_does_not_come_back(tmp_path: Path, dead_pid: int) -> None:
    leftover(tmp_path, "old", pid=dead_pid)
    (tmp_path / "thing").mkdir()
    atomic_files.remove_abandoned(tmp_path)
    assert names(tmp_path) == ["thing"]
    assert names(tmp_path / "thing") == []


def test_a_folder_that_is_being_replaced_does_not_come_back(tmp_path: Path) -> None:
    path = leftover(tmp_path, "old")
    atomic_files.remove_abandoned(tmp_path)
    assert names(tmp_path) == [path.name]
