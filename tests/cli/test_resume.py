"""Going on with a run: from which checkpoint, with which options, and where to."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.folder import CheckpointStore, read
from lockstep.cli import main
from lockstep.cli.main import _parser
from lockstep.cli.resolved_options import resolve
from lockstep.training.options import TrainOptions

SMALL = [
    "--data",
    "synthetic",
    "--model",
    "mlp",
    "--workers",
    "1",
    "--quiet",
    "--global-batch-size",
    "512",
]  # 4 steps
pytestmark = pytest.mark.leaks("matplotlib keeps its fonts open")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two epochs, `runs/first`."""
    folder = tmp_path_factory.mktemp("trained")
    assert (
        main(
            [
                "train",
                *SMALL,
                "--epochs",
                "2",
                "--seed",
                "3",
                "--run-dir",
                str(folder / "runs/first"),
            ]
        )
        == 0
    )
    return folder


@pytest.fixture
def runs(folder: Path, trained: Path) -> Path:
    shutil.copytree(trained / "runs", folder / "runs")
    return folder / "runs"


def resolved(*arguments: str) -> TrainOptions:
    return resolve(_parser().parse_args(["train", *arguments]))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config(run: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((run / "config.json").read_text())
    return written


@pytest.mark.parametrize(
    ("resume", "out", "checkpoint", "to"),
    [
        ("latest", None, "runs/first", "runs/first"),
        ("runs/first", None, "runs/first", "runs/first"),
        ("runs/first", "runs/../runs/first", "runs/first", "runs/../runs/first"),
        ("runs/first", "second", "runs/first", "second"),
        ("latest", "second", "runs/first", "second"),
        (
            "runs/first/checkpoints/step-0000000008",
            None,
            "runs/first/checkpoints/step-0000000008",
            "runs/first",
        ),
        (
            "runs/first/checkpoints/step-0000000004",
            "second",
            "runs/first/checkpoints/step-0000000004",
            "second",
        ),
    ],
)
def test_where_from_and_where_to(
    runs: Path, resume: str, out: str | None, checkpoint: str, to: str
) -> None:
    options = resolved("--resume", resume, *([] if out is None else ["--run-dir", out]))
    assert (options.resume, options.run_dir) == (checkpoint, to)
    # and the options are those of the run
    assert (options.model, options.global_batch_size, options.seed, options.epochs) == (
        "mlp",
        512,
        3,
        2,
    )


def test_the_latest_run_is_that_with_the_newest_checkpoint(runs: Path) -> None:
    shutil.copytree(runs / "first", runs / "second")
    os.utime(runs / "second/checkpoints/step-0000000008", (2e9, 2e9))
    assert resolved("--resume", "latest").run_dir == "runs/second"
    os.utime(runs / "first/checkpoints/step-0000000004", (3e9, 3e9))
    assert resolved("--resume", "latest").run_dir == "runs/first"


def test_flags_win_over_a_file_and_a_file_over_the_run(runs: Path, folder: Path) -> None:
    (folder / "a.yaml").write_text("lr: 0.3\nmomentum: 0.5\nresume: latest\nrun_dir: second\n")
    options = resolved("--config", "a.yaml", "--lr", "0.2")
    assert (options.lr, options.momentum, options.seed) == (0.2, 0.5, 3)
    assert (options.resume, options.run_dir) == ("runs/first", "second")


def test_a_checkpoint_without_a_run(runs: Path, folder: Path) -> None:
    (runs / "first/checkpoints/step-0000000008").rename(folder / "kept")
    options = resolved("--resume", "kept")
    assert options.resume == "kept"
    assert Path(str(options.run_dir)).parent == Path("runs")
    assert options == TrainOptions(resume="kept", run_dir=options.run_dir)


def test_the_number_of_workers_is_the_launchers_and_not_the_saved_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolved("--resume", "latest").workers == "auto"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--resume runs/first --epochs 1",
            "--epochs: expected a whole number of at least 2, as 2 are done already",
        ),
        ("--resume runs/first --model lenet --epochs 3", "a checkpoint of another model"),
        ("--resume runs/first --optimizer adam --epochs 3", "a run with Adam, got one with SGD"),
        (
            "--resume runs/first --global-batch-size 100 --epochs 3",
            "global_batch_size was 512, here it is 100",
        ),
        (
            "--resume runs/first --run-dir runs/other",
            "--run-dir: expected a folder without an earlier run, got 'runs/other'. Resume it "
            "with --resume runs/other",
        ),
        (
            "--run-dir runs/first",
            "got 'runs/first'. Resume it with --resume runs/first, or choose another folder.",
        ),
        (
            "--resume runs/first/checkpoints/step-0000000004 --epochs 3",
            "--resume: expected the newest checkpoint of that run, "
            "runs/first/checkpoints/step-0000000008, got "
            "'runs/first/checkpoints/step-0000000004'. To resume from an earlier one, add "
            "--run-dir DIR",
        ),
        (
            "--resume runs/first/checkpoints/step-0000000004 --run-dir runs/../runs/first "
            "--epochs 3",
            "got 'runs/first/checkpoints/step-0000000004'. To resume from an earlier one, add "
            "--run-dir DIR",
        ),
        (
            "--resume runs/stopped",
            "expected a checkpoint in runs/stopped/checkpoints, got an empty folder or none",
        ),
        (
            "--resume runs/first/result.json",
            "--resume: expected a checkpoint, a run directory, or latest",
        ),
        ("--resume runs/odd", "runs/odd/config.yaml: lr: expected a finite number above 0, got -1"),
    ],
)
def test_what_cannot_be_resumed_gets_one_line_and_changes_nothing(
    runs: Path, folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    for name, text in (("other", ""), ("stopped", "epochs: 1\n"), ("odd", "lr: -1\n")):
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text(text)  # as of versions before 0.2
    shutil.copytree(runs / "first/checkpoints", runs / "odd/checkpoints")
    before = contents(folder)
    assert main(["train", "--quiet", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert {path: data for path, data in contents(folder).items() if path in before} == before
    assert {path for path in contents(folder) if path.suffix != ".pyc"} == set(before)


def test_resuming_gives_the_result_of_an_uninterrupted_run(runs: Path, folder: Path) -> None:
    assert (
        main(
            [
                "train",
                *SMALL,
                "--epochs",
                "3",
                "--seed",
                "3",
                "--run-dir",
                "straight",
                "--schedule",
                "constant",
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "train",
                *SMALL,
                "--epochs",
                "1",
                "--seed",
                "3",
                "--run-dir",
                "parts",
                "--schedule",
                "constant",
            ]
        )
        == 0
    )
    assert main(["train", "--resume", "parts", "--epochs", "3"]) == 0
    results = [
        json.loads((folder / name / "result.json").read_text()) for name in ("parts", "straight")
    ]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    assert results[0]["epochs"] == 3


@pytest.mark.parametrize("resume", ["latest", "runs/first"])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    runs: Path, folder: Path, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    older, newest = (Path(f"runs/first/checkpoints/step-000000000{step}") for step in (4, 8))
    os.truncate(newest / "state.json", 50)
    assert main(["train", "--resume", resume, "--epochs", "3"]) == 0
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"A CHECKPOINT CANNOT BE USED: {newest}: state.json: expected" in record.getMessage()
    assert record.getMessage().endswith(f"Trying the one before it, {older}.")
    assert read(newest).step == 8  # made again
    assert json.loads((runs / "first/result.json").read_text())["epochs"] == 3


def test_resuming_with_another_learning_rate_in_another_folder(
    runs: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(runs)
    arguments = [
        "--resume",
        "runs/first",
        "--run-dir",
        "second",
        "--lr",
        "0.02",
        "--schedule",
        "constant",
        "--epochs",
        "3",
    ]
    assert main(["train", *arguments]) == 0
    assert contents(runs) == before
    # what is written down is what was done
    assert config(folder / "second")["lr"] == 0.02
    assert config(folder / "second")["seed"] == 3
    rows = list(csv.DictReader((folder / "second/metrics.csv").read_text().splitlines()))
    assert [float(row["lr"]) for row in rows][2] == 0.02
    assert [int(row["step"]) for row in rows] == [4, 8, 12]
    state = read(folder / "second/checkpoints/step-0000000012").state["optimizer"]
    assert state["param_groups"][0]["lr"] == 0.02
    assert "lr 0.05 → 0.02" in caplog.text


def test_the_speed_is_that_of_the_epochs_made_now(runs: Path, folder: Path) -> None:
    saved = CheckpointStore(folder / "slow")
    found = read(runs / "first/checkpoints/step-0000000008")
    for row in found.state["history"]:
        row["seconds"], row["samples_per_second"] = 1e9, 1e-9
    path = saved.save(found.state, step=found.step, epoch=found.epoch, info=found.info)
    shutil.rmtree(found.path)
    path.rename(found.path)
    assert main(["train", "--resume", "runs/first", "--epochs", "3"]) == 0
    result = json.loads((runs / "first/result.json").read_text())
    assert result["seconds_per_epoch"] < 1000
    assert result["samples_per_second"] > 1


def test_a_run_that_is_done_is_written_out_again(runs: Path, folder: Path) -> None:
    assert main(["train", "--resume", "runs/first", "--run-dir", "second"]) == 0
    results = [
        json.loads((path / "result.json").read_text())
        for path in (runs / "first", folder / "second")
    ]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]


def test_only_so_many_checkpoints_stay(folder: Path) -> None:
    torch.manual_seed(0)
    arguments = [
        *SMALL,
        "--epochs",
        "1",
        "--checkpoint-every",
        "1steps",
        "--keep-checkpoints",
        "2",
        "--run-dir",
        "one",
    ]
    assert main(["train", *arguments]) == 0
    names = sorted(path.name for path in (folder / "one/checkpoints").iterdir())
    assert names == ["step-0000000003", "step-0000000004"]
