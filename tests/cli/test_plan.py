"""``lockstep plan``: what it prints and writes for scripts that train, and one line for everything
that is wrong.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from lockstep.cli import main
from support.command import Here

HEAD = """
import sys
import torch
from torch import nn
import lockstep
"""

TRAINER = """
lockstep.init("cpu")
train, _ = lockstep.data.synthetic(train=512)
model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), int(sys.argv[1]), run_dir="runs/mine").fit(train, epochs=50)
"""


def write(folder: Path, body: str, name: str = "train.py") -> str:
    (folder / name).write_text(HEAD + textwrap.dedent(body))
    return name


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_script_is_planned_and_left_as_it_was(folder: Path, here: Here) -> None:
    script = write(folder, TRAINER)
    asked = ("--workers", "1..4", "--network", "1Gbit,50us", "--price", 2)
    ended = here("plan", "--one", "--steps", 8, *asked, "--json", "plan.json", script, 16)
    assert ended.returncode == 0, ended.stderr
    assert (
        "train.py, global batch 16, network 1Gbit,50us" in ended.stdout
        and "90 % interval" in ended.stdout
    )
    assert "This assumes:" in ended.stdout and "per M samples" in ended.stdout
    found = json.loads((folder / "plan.json").read_text())
    assert [each["workers"] for each in found["forecasts"]] == [1, 2, 3, 4]
    for each in found["forecasts"]:
        assert 0 < each["low_s"] <= each["step_s"] <= each["high_s"]
        assert each["cost_per_hour"] == 2 * each["workers"]
        assert sum(each["shares"].values()) == pytest.approx(each["step_s"], rel=0.5)
    assert (folder / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert not (folder / "runs").exists() and not [*folder.glob(".*")]


def test_two_workers_are_compared_with_what_was_predicted_from_one(
    folder: Path, here: Here
) -> None:
    script = write(folder, TRAINER)
    options = (
        "--steps",
        6,
        "--workers",
        "1,2",
        "--no-picture",
        "--held-out",
        "--json",
        "plan.json",
    )
    ended = here("plan", *options, script, 16, "--workers", 4)
    assert ended.returncode == 0, ended.stderr
    assert (
        "--workers after train.py goes to the script; write it before train.py for lockstep plan"
        in ended.stderr
    )
    rows = json.loads((folder / "plan.json").read_text())["held_out"]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("print('no steps here')", "train.py ended without a step: expected a script that trains"),
        (
            "raise ValueError('my mistake')",
            "train.py:6 failed: ValueError: my mistake. `lockstep run",
        ),
        (
            TRAINER + "\nsys.exit(3)",
            "workers: expected at most 16, the samples of a global batch, got 64",
        ),
    ],
)
def test_scripts_that_cannot_be_planned(folder: Path, here: Here, body: str, problem: str) -> None:
    script = write(folder, body)
    ended = here(
        "plan", "--one", "--steps", 5, "--workers", "1,64", "--json", "plan.json", script, 16
    )
    (line,) = [each for each in ended.stderr.splitlines() if "plan: error:" in each]
    assert ended.returncode and problem in line and ended.stderr.endswith(f"{line}\n")
    assert not (folder / "plan.json").exists() and not (folder / "plan.png").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--workers", "0"], "--workers: expected a whole number from 1 to 100000, got '0'"),
        (
            ["--workers", "8..4"],
            "--workers: expected N..M with N at most M, such as 1..64, got '8..4'",
        ),
        (["--workers", "many"], "--workers: expected a whole number from 1 to 100000, got 'many'"),
        (["--network", "0Gbit,5us"], "--network: expected a bandwidth above 0, got '0Gbit,5us'"),
        (["--network", "fast"], "--network: expected the file of a measurement"),
        (
            ["--network", "other.json"],
            "other.json: expected the format 'lockstep network 1', got ''",
        ),
        (["--network", "none.json"], "none.json: cannot be read: No such file or directory"),
        (["--price", "-1"], "--price: expected an amount per hour and worker, 0 or more, got '-1'"),
        (
            ["--price", "nan"],
            "--price: expected an amount per hour and worker, 0 or more, got 'nan'",
        ),
        (["--batch", "half"], "--batch: expected auto, global or per-worker, got 'half'"),
        (["--steps", "none"], "--steps: expected a whole number from 1 to 10000, got 'none'"),
        (["--per-host", "0"], "--per-host: expected a whole number of at least 1, got '0'"),
        (
            ["--json", "none/plan.json"],
            "--json: expected a file in an existing folder, got 'none/plan.json'",
        ),
        (
            ["--picture", "plan.doc"],
            "--picture: expected a file that ends in .png, .svg or .pdf, got 'plan.doc'",
        ),
    ],
)
def test_bad_options_are_one_line_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    (folder / "other.json").write_text('{"something": "else"}')
    assert main(["plan", *words, write(folder, "raise SystemExit(9)")]) == 2
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


def test_a_missing_script_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "none.py"]) == 2
    assert "script: expected an existing Python file" in capsys.readouterr().err
