"""How a script is run to be profiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep import environment
from lockstep.errors import LockstepError
from lockstep.launcher import fixed_host
from lockstep.launcher.worker_process import fork_server
from lockstep.planning.profiling import Program, record_profiles


def test_each_number_of_workers_has_its_own_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of one worker, on all cores, are not those of two that share the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    monkeypatch.setattr(fork_server, "start_fork_server", lambda: None)
    asked: list[int] = []

    def run_program(script: Any, options: Any, *_: Any) -> None:
        asked.append(options.threads)
        raise LockstepError("not run")

    monkeypatch.setattr(fixed_host, "run_program", run_program)
    (tmp_path / "train.py").write_text("")
    for workers in (1, 2, 4):
        with pytest.raises(LockstepError, match="not run"):
            record_profiles(Program((str(tmp_path / "train.py"),)), workers)
    assert asked == [8, 4, 2]
    assert "OMP_NUM_THREADS" not in os.environ
