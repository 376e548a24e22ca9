"""What `make` says when the package cannot be installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_FOUND = """
  ERROR: Could not find a version that satisfies the requirement setuptools>=77 (from versions: none)
  ERROR: No matching distribution found for setuptools>=77
  error: subprocess-exited-with-error
ERROR: Failed to build 'file:///somewhere' when installing build dependencies
"""
CONFLICT = """
ERROR: Cannot install lockstep-train[demo]==0.1.0 because these package versions have conflicting dependencies.
ERROR: ResolutionImpossible: for help visit https://pip.pypa.io
"""
RETRIED = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('... "
    "refused')'"
)
NOT_FETCHED = (
    "Could not fetch URL http://127.0.0.1:9/simple/torch/: connection error: Max retries exceeded"
)
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(folder: Path, said: str) -> str:
    """Run `make train` where pip writes `said` and fails; what the user sees."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "said").write_text(said)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\ncat said\nexit 1\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "train"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert not list((folder / ".venv").glob(".ready*"))
    return done.stderr


@pytest.mark.parametrize("reason", [RETRIED, NOT_FETCHED])
@pytest.mark.parametrize("consequence", [NOT_FOUND, CONFLICT])
def test_a_missing_network_is_the_only_message(
    tmp_path: Path, reason: str, consequence: str
) -> None:
    seen = make(tmp_path, f"{reason}\n{consequence}")
    assert "the package index cannot be reached" in seen
    assert "Check the network" in seen
    for misleading in (
        "Could not find a version",
        "conflicting",
        "ResolutionImpossible",
        "subprocess",
        "Failed to build",
    ):
        assert misleading not in seen


def test_a_conflict_is_shown(tmp_path: Path) -> None:
    seen = make(tmp_path, CONFLICT)
    assert "conflicting dependencies" in seen
    assert ".venv/install.log says why" in seen
    assert "network" not in seen


def test_another_error_after_a_slow_network_is_shown(tmp_path: Path) -> None:
    seen = make(tmp_path, f"{RETRIED}\n{FULL}\n")
    assert "No space left on device" in seen
    assert ".venv/install.log says why" in seen
    assert "network" not in seen


def test_the_end_of_the_log_is_shown_where_it_names_no_error(tmp_path: Path) -> None:
    assert "killed" in make(tmp_path, "many\nlines\nkilled\n")
