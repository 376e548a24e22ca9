"""`lockstep verify`: equal bits at several numbers of workers, and what is said where they are
not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from support.command import Here

MODEL = """
import time
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.line = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        return self.line(x.flatten(1) * (1 + time.time() % 1))
"""


def test_the_bits_are_the_same_with_shards_and_not_without(here: Here) -> None:
    ended = here("verify", "--workers", "1,3", "--steps", "2", "--model", "mlp", "--compare-ddp")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    first, last = lines.index("The same bits at every number of workers."), lines[-1]
    for line in lines[2:first]:
        step, *fingerprints = line.split()
        assert step.isdecimal() and len(fingerprints) == 2 and len(set(fingerprints)) == 1
    assert "plain DDP" in lines[first + 1] and "≠" in "".join(lines[first:])
    assert any(line.startswith("3 workers diverge from 1 at step 0, first in") for line in lines), (
        last
    )


def test_a_model_that_is_not_repeatable_is_found_out(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clocked.py").write_text(MODEL)
    ended = here("verify", "--model", "clocked:Net", "--workers", "1,2", "--steps", "2")
    assert ended.returncode == 1, ended.stderr
    assert (
        "2 workers diverge from 1 at step 0, first in line.weight (4 of 4 tensors)." in ended.stdout
    )
    assert "two runs with 1 worker diverge too" in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "2"], "--workers: expected two or more different numbers of workers"),
        (
            ["--workers", "1,9"],
            "--workers: expected at most as many as there are virtual workers (8), got 9",
        ),
        (["--steps", "0"], "--steps: expected a whole number of at least 1"),
    ],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
