"""Elastic jobs with random faults at named points end with the bits of an undisturbed one; `make
chaos` runs many.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import warm_python
from support.hosts import network, or_skip

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.parametrize(
    ("program", "options", "backend", "count"),
    [
        ("elastic_chaos.py", [], "shm", 18),
        ("elastic_chaos.py", [], "gloo", 12),
        ("elastic_chaos.py", ["--proof"], "shm", 10),
        ("elastic_chaos.py", ["--proof"], "gloo", 6),
        ("elastic_chaos.py", ["--shard-optimizer"], "shm", 9),
        ("elastic_chaos.py", ["--shard-optimizer"], "gloo", 5),
        ("elastic_chaos.py", ["--shard-optimizer", "--again"], "shm", 6),
        ("own_loop_chaos.py", [], "shm", 16),
        ("own_loop_chaos.py", ["--prepare"], "shm", 12),
        ("own_loop_chaos.py", ["--prepare", "--shard-optimizer"], "shm", 8),
    ],
)
def test_faults_change_no_bit(
    program: str, options: list[str], backend: str, count: int, tmp_path: Path, warm: None
) -> None:
    words = [SUPPORT / program, count, "--first", 100, "--backend", backend, *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parent)}
    done = warm_python.run(words, tmp_path, variables, timeout=110.0)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert f"{count} jobs" in done.stdout and " 0 wrong" in done.stdout


@pytest.mark.parametrize("program", ["elastic_chaos.py", "own_loop_chaos.py"])
def test_what_a_state_dict_does_not_have_reaches_workers_that_join(
    program: str, tmp_path: Path, warm: None
) -> None:
    words = [SUPPORT / program, 2, "--first", 101, "--backend", "shm", "--kept"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parent)}
    done = warm_python.run(words, tmp_path, variables, timeout=110.0)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert "2 jobs, 2 completed" in done.stdout and " 0 wrong" in done.stdout


# A job each, as they take from 10 to 50 s on an idle machine; one that hangs ends itself after 90
# s, and is wrong.
@pytest.mark.parametrize("seed", [34, 35, 36, 37])
def test_hosts_that_come_and_go_change_no_bit(seed: int, tmp_path: Path, warm: None) -> None:
    words = [SUPPORT / "launcher_chaos.py", 1, "--first", seed]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parent)}
    done = warm_python.run(words, tmp_path, variables, timeout=110.0)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert "1 jobs" in done.stdout and " 0 wrong" in done.stdout


def test_hosts_that_are_cut_off_in_turn_end_when_nobody_is_left_who_leads(
    tmp_path: Path, warm: None
) -> None:
    """Two that wait to join again would otherwise knock at each other for ever."""
    with or_skip(network(1)):
        pass
    words = [SUPPORT / "cut_chaos.py", 1, "--first", 25]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parent)}
    done = warm_python.run(words, tmp_path, variables, timeout=110.0)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert "1 jobs" in done.stdout and " 0 wrong" in done.stdout
