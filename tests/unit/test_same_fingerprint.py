"""The table of fingerprints under all launchers: what is left out says why, and what differs is an
error.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("same_fingerprint")


def test_a_launcher_that_is_not_there_is_left_out_with_the_reason(script: Any) -> None:
    def missing(steps: int) -> dict[str, Any]:
        script.needs("no-such-launcher")
        raise AssertionError

    ran = script.measure(
        "python train.py", lambda steps: {"workers": 2, "hosts": 1, "fingerprint": "ab" * 32}, 2
    )
    left_out = script.measure("no-such-launcher train.py", missing, 2)
    assert script.table([ran, left_out]).splitlines()[2:] == [
        "| `python train.py` | 2 | 1 | `abababababababab` |",
        "| `no-such-launcher train.py` | – | – | left out: there is no no-such-launcher here |",
    ]
    assert script.verdict([ran, left_out]) == "1 of 2 ways to start it, one fingerprint."


def test_fingerprints_that_differ_are_an_error(script: Any) -> None:
    rows = [script.Row("a", 1, 1, "12"), script.Row("b", 2, 1, "34")]
    with pytest.raises(SystemExit, match="error: the fingerprints differ"):
        script.verdict(rows)


def test_a_program_that_fails_is_an_error(script: Any) -> None:
    def fails(steps: int) -> dict[str, Any]:
        raise script.FailedError("exit code 1: why")

    with pytest.raises(SystemExit, match="error: a: exit code 1: why"):
        script.measure("a", fails, 2)
