"""The communicator's examples run alone and under a launcher."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from support.pool import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_a_rank(program: str, *arguments: str) -> None:
    with mock.patch.object(sys, "argv", [program, *arguments]):
        runpy.run_path(program)


def result(workers: int) -> str:
    return f"workers {workers}  sum 28  squares [0, 1, 4, 9, 16, 25, 36, 49]\n"


def test_array_work_alone_and_under_torchrun() -> None:
    program = str(EXAMPLES / "array_work.py")
    assert run(sys.executable, program) == result(1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    assert run(*torchrun, program) == result(2)


@pytest.mark.parametrize("workers", [1, 3])
def test_array_work_of_parts_that_are_not_even(pool: Pool, workers: int) -> None:
    shown = [outcome.output for outcome in pool.outcomes(as_a_rank, str(EXAMPLES / "array_work.py"), workers=workers)]
    assert shown == [""] * (workers - 1) + [result(workers)]


def test_rank0_first(pool: Pool, tmp_path: Path) -> None:
    program = str(EXAMPLES / "rank0_first.py")
    assert run(sys.executable, program, str(tmp_path / "alone")) == "rank 0 of 1 uses {'lr': 0.1}\n"
    pool.run(as_a_rank, program, str(tmp_path / "together"), workers=3)
    written = [path.read_text() for path in sorted((tmp_path / "together").glob("*.log"))]
    assert written == [f"rank {rank} of 3 uses {{'lr': 0.1}}\n" for rank in range(3)]
