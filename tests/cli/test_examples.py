"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
