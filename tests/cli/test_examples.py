"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, cwd: Path) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_accuracy(output: str) -> float:
    return float(output.split()[-1].removesuffix("%"))


def test_own_loop_gives_the_same_under_torchrun(tmp_path: Path) -> None:
    program = str(EXAMPLES / "own_loop.py")
    alone = run(sys.executable, program, "3", cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    together = run(*torchrun, program, "3", cwd=tmp_path)
    assert last_accuracy(alone) > 85
    assert last_accuracy(together) == pytest.approx(last_accuracy(alone), abs=1.5)


def test_notebook(tmp_path: Path) -> None:
    assert last_accuracy(run(sys.executable, str(EXAMPLES / "notebook.py"), cwd=tmp_path)) > 90


def test_ddp_runs_as_it_is_under_lockstep_run(tmp_path: Path) -> None:
    lockstep_run = [sys.executable, "-m", "lockstep", "run", "-np", "2"]
    shown = run(*lockstep_run, str(EXAMPLES / "ddp.py"), "2", cwd=tmp_path)
    assert last_accuracy(shown) > 60
    assert {name.split(".")[0] for name in load_weights(tmp_path / "ddp.pt")} == {"0", "2", "6"}
    assert "lockstep" not in (EXAMPLES / "ddp.py").read_text().split('"""')[2]


@pytest.mark.parametrize(("name", "line"), [("sharded", "epoch 2: train loss"), ("pipeline", "step 60: loss")])
def test_model_parallel_loses_as_one_worker_does(tmp_path: Path, name: str, line: str) -> None:
    program = str(EXAMPLES / f"{name}.py")
    alone = run(sys.executable, program, cwd=tmp_path)
    together = run(sys.executable, "-m", "lockstep", "run", "-np", "2", program, cwd=tmp_path)
    assert loss_after(line, together) == pytest.approx(loss_after(line, alone), rel=1e-3)


def loss_after(line: str, shown: str) -> float:
    return float(shown.partition(line)[2].split()[0].strip(","))


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found
