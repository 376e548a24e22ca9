"""Elastic jobs with random faults at named points end with the bits of an undisturbed one; `make chaos` runs many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import warm_python

CHAOS = Path(__file__).parents[2] / "support" / "elastic_chaos.py"


@pytest.mark.parametrize(("backend", "count"), [("shm", 36), ("gloo", 24)])
def test_faults_change_no_bit(backend: str, count: int, tmp_path: Path, warm: None) -> None:
    words = [CHAOS, count, "--first", 100, "--backend", backend]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHAOS.parents[1])}
    done = warm_python.run(words, tmp_path, variables, timeout=110.0)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert f"{count} jobs" in done.stdout and " 0 wrong" in done.stdout
