"""What `benchmarks/long_run.py` compares of a job whose processes come and go."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def long_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.delitem(sys.modules, "elastic", raising=False)  # the example of the same name
    return importlib.import_module("long_run")


def sample(seconds: float, workers: int, loaders: int, files: int) -> dict[str, Any]:
    roles = ["launcher", "survivor", "loader of the survivor", "loader of the survivor"]
    roles += ["worker"] * (workers - 1) + ["loader"] * loaders
    held = [
        {"role": role, "pid": 1000 * number + int(seconds)} for number, role in enumerate(roles)
    ]
    counts = {"processes": len(roles), "shm": files, "temporary": 3 * workers, "run_files": 5}
    return {"seconds": seconds, "workers": workers, "held": held, **counts}


def problems(long_run: Any, first: dict[str, Any], *later: dict[str, Any]) -> list[str]:
    end = {"digest": "a", "losses": [1.0], "epochs": 1}
    last = later[-1] | {"step": 9}
    found = {"first": first, "last": last, "samples": [first, *later], "end": end}
    found |= {"undisturbed": end, "left": {"shm": 0, "temporary": 0}, "events": {}, "seconds": 9}
    result: list[str] = long_run.problems(found)
    return result


def test_a_worker_that_starts_a_loader_is_no_growth(long_run: Any) -> None:
    first = sample(100.0, 4, 5, 16)
    then = sample(900.0, 4, 6, 16)
    assert problems(long_run, first, then, sample(2000.0, 4, 6, 16)) == []
    assert problems(long_run, first, then, sample(2000.0, 4, 6, 17)) == ["job: shm 16 → 17"]
    assert "nothing is compared" in problems(long_run, first, sample(2000.0, 4, 6, 16))[0]


def test_files_of_the_largest_number_of_workers_are_no_growth(long_run: Any) -> None:
    first = sample(100.0, 4, 6, 12)
    six = sample(900.0, 6, 10, 16)
    after = sample(1000.0, 4, 6, 16)
    assert problems(long_run, first, six, after, sample(2000.0, 4, 6, 16)) == []
    assert problems(long_run, first, six, after, sample(2000.0, 4, 6, 18)) == ["job: shm 16 → 18"]


def test_a_window_is_complete_when_each_worker_has_its_loaders(long_run: Any) -> None:
    assert long_run.has_all_loaders(sample(1.0, 4, 6, 1))
    assert not long_run.has_all_loaders(sample(1.0, 4, 5, 1))
    window = [sample(1.0, 4, 6, 16), sample(2.0, 4, 5, 99), sample(3.0, 4, 6, 16)]
    assert long_run.usual(window)["shm"] == 16
