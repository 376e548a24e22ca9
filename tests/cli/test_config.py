"""Options come from files as well, under the flags."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.cli.main import _parser
from lockstep.cli.resolved_options import resolve
from lockstep.training.options import TrainOptions

SMALL = ["--data", "synthetic", "--model", "mlp", "--workers", "1", "--epochs", "1", "--quiet"]
pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.leaks("matplotlib keeps its fonts open"),
]


def run(*arguments: str) -> int:
    return main(["train", *SMALL, *arguments])


def resolved(*arguments: str) -> TrainOptions:
    return resolve(_parser().parse_args(["train", *arguments]))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "epoch: 3", "Did you mean epochs"),
        ("a.yaml", "global_bach: 3", "Did you mean global_batch_size"),
        (
            "a.yaml",
            "keep_checkpoints: three",
            "a.yaml: keep_checkpoints: expected a whole number of at least 1, got 'three'",
        ),
        ("a.yaml", "- 1\n- 2", "to hold options by name"),
        ("a.yaml", "", "to hold options by name, such as `epochs: 20`, got an empty file"),
        ("a.yaml", "lr: [1", "to be YAML"),
        ("a.yaml", "lr: " + "[" * 5000, "to be YAML"),
        ("a.toml", "lr = ", "to be YAML, or TOML or JSON with the ending"),
        ("a.yaml", "!!python/object/apply:os.mkdir [hacked]", "to be YAML"),
        ("a.yaml", "compile: maybe", "a.yaml: compile: expected true or false, got 'maybe'"),
        (
            "a.toml",
            "max-grad-norm = 'big'",
            "a.toml: max-grad-norm: expected a finite number above 0, got 'big'",
        ),
        # of the right kind, but not to be used
        ("a.yaml", "lr: -1", "a.yaml: lr: expected a finite number above 0, got -1"),
        (
            "a.yaml",
            "optimizer: adamm",
            "a.yaml: optimizer: expected sgd, adam, adamw, lars or lamb, got 'adamm'. Did you",
        ),
        ("a.yaml", "momentum: .nan", "a.yaml: momentum: expected a finite number"),
        (
            "a.yaml",
            "warmup-epochs: 2",
            "a.yaml: warmup-epochs: expected less than the 1 epoch of the run",
        ),
        (
            "a.yaml",
            "resume: nowhere",
            "a.yaml: resume: expected a checkpoint, a run directory, or latest, got nowhere",
        ),
        (
            "a.yaml",
            "run_dir: mine.py/run",
            "a.yaml: run_dir: expected a folder that can be written",
        ),
        (
            "a.yaml",
            "data_dir: here",
            "a.yaml: data_dir: expected nothing, as synthetic reads no files",
        ),
    ],
)
def test_bad_config_files(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    (folder / name).write_text(text)
    assert run("--config", name) == 2
    error = capsys.readouterr().err
    assert said in error
    assert name in error
    assert len(error.splitlines()) == 1
    assert {path.name for path in folder.iterdir()} - {"mine.py", "__pycache__"} == {name}


def test_a_flag_in_place_of_a_bad_key_is_what_an_error_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.yaml").write_text("lr: -1")
    assert run("--config", "a.yaml", "--lr", "0") == 2
    assert "error: --lr: expected a finite number above 0, got '0'" in capsys.readouterr().err


def test_a_file_that_is_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_bytes(b"\xff\xfe")
    assert run("--config", "a.yaml") == 2
    said = capsys.readouterr().err
    assert (
        "--config: expected a YAML, TOML or JSON file that can be read, got a.yaml ('utf-8'" in said
    )


def test_numbers_as_yaml_1_1_reads_them(folder: Path) -> None:
    (folder / "a.yaml").write_text("lr: 1e-3\nweight-decay: 1E4\nwarmup_epochs: 1\n")
    options = resolved("--config", "a.yaml")
    assert (options.lr, options.weight_decay, options.warmup_epochs) == (0.001, 10000.0, 1.0)


def test_switches_can_be_turned_off_again(folder: Path) -> None:
    names = [option.name for option in fields(TrainOptions) if option.type == "bool"]
    (folder / "a.yaml").write_text("".join(f"{name}: true\n" for name in names))
    assert all(getattr(resolved("--config", "a.yaml"), name) for name in names)
    off = resolved("--config", "a.yaml", *("--no-" + name.replace("_", "-") for name in names))
    assert not any(getattr(off, name) for name in names)


def test_home_is_found_in_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    (folder / "home/a.yaml").write_text("run_dir: ~/runs/one\n")
    assert resolved("--config=~/a.yaml").run_dir == str(folder / "home/runs/one")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "global-batch-size: 100\nlr: 0.25\nrun-dir: done\nquiet: false\n"),
        ("a.toml", "global_batch_size = 100\nlr = 0.25\nrun_dir = 'done'\n"),
    ],
)
def test_flags_win_over_a_config_file_and_all_is_written_down(
    folder: Path, name: str, text: str
) -> None:
    (folder / name).write_text(text)
    assert run("--config", name, "--lr", "0.01") == 0
    config = json.loads((folder / "done/config.json").read_text())
    assert set(config) == {option.name for option in fields(TrainOptions)} - {
        "run_dir",
        "resume",
        "allow_different_hardware",
        "quiet",
    }
    expected: dict[str, Any] = {
        "global_batch_size": 100,
        "lr": 0.01,
        "workers": "1",
        "device": "cpu",
    }
    assert {key: config[key] for key in expected} == expected
    # and the file is itself a config file, for a run in another folder
    assert main(["train", "--config", "done/config.json"]) == 0
    (again,) = (folder / "runs").iterdir()
    fingerprints = [
        json.loads((run / "result.json").read_text())["fingerprint"]
        for run in (folder / "done", again)
    ]
    assert fingerprints[0] == fingerprints[1]
