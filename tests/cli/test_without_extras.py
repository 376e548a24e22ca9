"""What works where Lockstep alone is installed, without any extra, and what says which one it
needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import Here

EXTRAS = ("cloudpickle", "matplotlib", "pooch", "setproctitle", "sklearn", "yaml")

# `launch` of a function that other processes can import, and of one that they cannot
PROGRAM = """
import os, sys, lockstep
def mine(): return 1
if __name__ == "__main__":
    print("by name:", lockstep.launch(os.getppid, workers=2) > 0)
    for function in (mine, lambda: 2):
        try:
            lockstep.launch(function, workers=2)
        except lockstep.ConfigError as error:
            print(error)
"""

RANKS = """
import lockstep, torch
comm = lockstep.init()
print("sum", comm.allreduce(torch.ones(1), op="sum").item())
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which no Python process finds the packages of the extras."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"
    )
    (tmp_path / "work").mkdir()
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    )
    return tmp_path / "work"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_training_runs_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("matplotlib", "sklearn", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    begun = here("train", "--model", "mlp", "--run-dir", "run", "--epochs", "1", "--workers", "1")
    assert begun.returncode == 0, begun.stderr
    assert not caplog.records  # nobody has asked for a picture
    files = {path.name for path in (folder / "run").iterdir()}
    assert (
        files >= {"config.json", "metrics.csv", "model.safetensors", "result.json"}
        and "curve.png" not in files
    )
    assert "model.safetensors" in begun.stdout and "curve.png" not in begun.stdout
    resumed = here("train", "--resume", "run", "--epochs", "2", "--workers", "1")
    assert resumed.returncode == 0, resumed.stderr
    assert len((folder / "run/metrics.csv").read_text().splitlines()) == 3


def test_functions_that_only_this_process_has_are_refused(bare: Path) -> None:
    (bare / "program.py").write_text(PROGRAM)
    done = run(bare, "program.py")
    assert done.returncode == 0, done.stderr
    needs = "which another process cannot import by its name, needs the package cloudpickle: "
    assert done.stdout.splitlines() == [
        "by name: True",
        *(
            f"{name}, {needs}pip install 'lockstep-train[launch]'"
            for name in ("__main__.mine", "__main__.<lambda>")
        ),
    ]


def test_ranks_run_without_a_title(bare: Path) -> None:
    (bare / "ranks.py").write_text(RANKS)
    done = run(bare, "-m", "lockstep", "run", "-q", "-np", "2", "ranks.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2.0", "[1] sum 2.0"]


def test_a_file_of_options_names_what_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here
) -> None:
    (tmp_path / "a.yaml").write_text("epochs: 1\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = here("train", "--config", tmp_path / "a.yaml")
    assert done.returncode == 2
    assert done.stderr == (
        f"lockstep train: error: {tmp_path / 'a.yaml'} needs the package PyYAML: pip install "
        "'lockstep-train[yaml]'\n"
    )
