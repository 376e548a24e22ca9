"""A run's folder is one run's only, also where two begin at once; what is removed is what was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.training import out_folder


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_runs_that_begin_at_once_one_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    out = tmp_path / "runs/same"
    if exists:
        out.mkdir(parents=True)
    check = out_folder.check_unused
    winners: list[list[Path]] = []

    def check_then_be_overtaken(folder: Path) -> None:
        check(folder)
        monkeypatch.setattr(out_folder, "check_unused", check)
        winners.append(out_folder.prepare(out, None, fresh=True))

    monkeypatch.setattr(out_folder, "check_unused", check_then_be_overtaken)
    with pytest.raises(ConfigError, match=r"out: expected a folder without another run, got .*same"):
        out_folder.prepare(out, None, fresh=True)
    assert winners == [[] if exists else [tmp_path / "runs", out]]
    assert out.is_dir()


def test_a_run_that_has_made_the_folder_but_is_refused_there_leaves_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, out = out_folder._make, tmp_path / "same"

    def make_then_be_overtaken(folder: Path, made: list[Path]) -> None:
        make(folder, made)
        monkeypatch.setattr(out_folder, "_make", make)
        assert out_folder.prepare(out, None, fresh=True) == []

    monkeypatch.setattr(out_folder, "_make", make_then_be_overtaken)
    with pytest.raises(ConfigError, match="without another run"):
        out_folder.prepare(out, None, fresh=True)
    assert (out / "checkpoints").is_dir()


def test_a_folder_that_another_run_was_faster_to_make_is_not_this_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != tmp_path and exists(path))  # at the time of looking
    assert out_folder.prepare(tmp_path, None, fresh=True) == []


def test_folders_made_in_vain_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="a folder that can be written"):
        out_folder.prepare(tmp_path / "a/b", None, fresh=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_checkpoints_can_be_used_again(tmp_path: Path) -> None:
    out_folder.prepare(tmp_path, None, fresh=True)
    out_folder.release(tmp_path)
    assert out_folder.prepare(tmp_path, None, fresh=True) == []
    (tmp_path / "checkpoints/step-0000000001").mkdir()
    out_folder.release(tmp_path)
    with pytest.raises(ConfigError, match="a folder without an earlier run"):
        out_folder.prepare(tmp_path, None, fresh=True)
