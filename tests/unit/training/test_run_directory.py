"""A run directory is one run's only, also where two begin at once; what is removed is what was
made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep import callbacks
from lockstep.errors import ConfigError
from lockstep.training.run import run_directory


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_runs_that_begin_at_once_one_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    out = tmp_path / "runs/same"
    if exists:
        out.mkdir(parents=True)
    check = run_directory.check_unused
    winners: list[list[Path]] = []

    def check_then_be_overtaken(folder: Path) -> None:
        check(folder)
        monkeypatch.setattr(run_directory, "check_unused", check)
        winners.append(run_directory.prepare(out, None, fresh=True))

    monkeypatch.setattr(run_directory, "check_unused", check_then_be_overtaken)
    with pytest.raises(
        ConfigError, match=r"run_dir: expected a folder without another run, got .*same"
    ):
        run_directory.prepare(out, None, fresh=True)
    assert winners == [[] if exists else [tmp_path / "runs", out]]
    assert out.is_dir()


def test_a_run_that_has_made_the_folder_but_is_refused_there_leaves_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, out = run_directory._create, tmp_path / "same"

    def make_then_be_overtaken(folder: Path, made: list[Path]) -> None:
        make(folder, made)
        monkeypatch.setattr(run_directory, "_create", make)
        assert run_directory.prepare(out, None, fresh=True) == []

    monkeypatch.setattr(run_directory, "_create", make_then_be_overtaken)
    with pytest.raises(ConfigError, match="without another run"):
        run_directory.prepare(out, None, fresh=True)
    assert (out / "checkpoints").is_dir()


def test_a_folder_that_another_run_was_faster_to_make_is_not_this_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: path != tmp_path and exists(path)
    )  # at the time of looking
    assert run_directory.prepare(tmp_path, None, fresh=True) == []


def test_unused_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="a folder that can be written"):
        run_directory.prepare(tmp_path / "a/b", None, fresh=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_checkpoints_can_be_used_again(tmp_path: Path) -> None:
    run_directory.prepare(tmp_path, None, fresh=True)
    run_directory.release(tmp_path)
    assert run_directory.prepare(tmp_path, None, fresh=True) == []
    (tmp_path / "checkpoints/step-0000000001").mkdir()
    run_directory.release(tmp_path)
    with pytest.raises(ConfigError, match="a folder without an earlier run"):
        run_directory.prepare(tmp_path, None, fresh=True)


# --- the lock
# -----------------------------------------------------------------------------------------------


def test_a_second_process_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    lock = run_directory.RunLock(tmp_path)
    message = rf"a run that no other process continues, got .*, where process {os.getpid()} on \S+ has been training since"
    with pytest.raises(ConfigError, match=message):
        run_directory.RunLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    run_directory.RunLock(tmp_path).release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        f"import os; from pathlib import Path; from lockstep.training.run.run_directory import RunLock; \
lock = RunLock(Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    run_directory.RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


CONTENTS = [
    "",
    "{}",
    "[1]",
    '{"pid": "x", "host": 1, "time": 1e400}',
    '{"pid": 1, "host": "a", "time": 1e400}',
    '{"pid": 1, "host": "a", "time": 1e300}',
    '{"pid": 1e40, "host": "a", "time": 1}',
]


@pytest.mark.parametrize("content", CONTENTS)
def test_what_the_file_of_a_lock_holds_may_be_anything(tmp_path: Path, content: str) -> None:
    lock = run_directory.RunLock(tmp_path)
    (tmp_path / ".lock").write_text(content)
    with pytest.raises(ConfigError, match="where another process is training"):
        run_directory.RunLock(tmp_path)
    lock.release()


def test_a_trainer_holds_the_lock_while_it_trains_and_no_longer(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))

    def trainer(run_dir: Path, *made: callbacks.Callback) -> lockstep.Trainer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return lockstep.Trainer(
            model, optimizer, torch.nn.CrossEntropyLoss(), 2, run_dir=run_dir, callbacks=made
        )

    class Second(callbacks.Callback):
        def on_train_start(self, _trainer: object) -> None:
            with pytest.raises(ConfigError, match="a run that no other process continues"):
                trainer(tmp_path / "run").fit(data, 2, resume="latest")

    first = trainer(tmp_path / "run", Second(), callbacks.Checkpoints())
    first.fit(data, 1)
    first.fit(data, 2)
    assert not (tmp_path / "run" / ".lock").exists()
    assert len(trainer(tmp_path / "run").fit(data, 3, resume="latest")) == 3


def test_a_job_that_begins_again_finds_its_own_folder_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "run"
    for folder in (given, tmp_path / "run-2", tmp_path / "other"):
        run_directory.prepare(folder, None, fresh=True)
    assert run_directory.of_this_job(given) is None
    for earlier, found in (("run", True), ("run-2", True), ("other", False), ("run-3", False)):
        monkeypatch.setenv("LOCKSTEP_EARLIER_RUN_DIR", str(tmp_path / earlier))
        assert run_directory.of_this_job(given) == (tmp_path / earlier if found else None)
        if found:
            assert run_directory.prepare(tmp_path / earlier, None, fresh=False) == []


def test_a_lock_is_taken_from_a_holder_that_keeps_it_for_longer_than_the_others_wait(
    tmp_path: Path,
) -> None:
    first = run_directory.RunLock(tmp_path)
    with pytest.raises(
        ConfigError, match=f"run_dir: expected a run that no other .*process {os.getpid()} on "
    ):
        run_directory.RunLock(tmp_path)
    began = time.monotonic()
    second = run_directory.RunLock(tmp_path, patience_s=0.2)
    assert time.monotonic() - began >= 0.2
    first.release()  # which is nobody's lock any more
    with pytest.raises(ConfigError, match="run_dir"):
        run_directory.RunLock(tmp_path)
    second.release()
    run_directory.RunLock(tmp_path).release()


def test_a_job_whose_workers_were_all_started_again_resumes_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))

    def trainer(saves: bool = True) -> lockstep.Trainer:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        made = [callbacks.Checkpoints("1step")] if saves else []
        return lockstep.Trainer(
            model,
            optimizer,
            torch.nn.CrossEntropyLoss(),
            2,
            run_dir=tmp_path / "run",
            callbacks=made,
        )

    trainer().fit(data, 1)
    older = tmp_path / "run" / "checkpoints" / "step-0000000001"
    with pytest.raises(ConfigError, match="expected the newest checkpoint of that run"):
        trainer().fit(data, 2, resume=older)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("LOCKSTEP_RESUME", str(older))
    assert [row["epoch"] for row in trainer(saves=False).fit(data, 2)] == [
        1,
        2,
    ]  # of which the first is the saved one
    monkeypatch.delenv("LOCKSTEP_RESUME")
    monkeypatch.setenv("LOCKSTEP_EARLIER_RUN_DIR", str(tmp_path / "run"))
    begun = trainer()
    assert [row["step"] for row in begun.fit(data, 2)] == [2, 4]
    assert begun.run_dir == tmp_path / "run"
    assert [row["step"] for row in begun.fit(data, 3)] == [2, 4, 6]  # not from a checkpoint again
