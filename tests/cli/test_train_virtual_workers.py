"""`lockstep train --virtual-workers`: one fingerprint at any number of workers, and what a
checkpoint keeps of it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.cli.train import choose_workers
from lockstep.training.options import TrainOptions

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.leaks("matplotlib keeps its fonts open"),
]

SMALL = ["--data", "synthetic", "--model", "mlp", "--quiet"]


def train(out: str, *arguments: str) -> int:
    return main(["train", *SMALL, "--run-dir", out, *arguments])


def left(out: str, name: str) -> Any:
    return json.loads((Path(out) / name).read_text())


def test_any_number_of_workers() -> None:
    assert train("alone", "--epochs", "1", "--workers", "1", "--virtual-workers", "8") == 0
    assert train("both", "--epochs", "1", "--workers", "2", "--virtual-workers", "8") == 0
    assert (
        left("alone", "config.json")["virtual_workers"]
        == left("both", "config.json")["virtual_workers"]
        == 8
    )
    results = [json.loads((Path(out) / "result.json").read_text()) for out in ("alone", "both")]
    for name in ("fingerprint", "train_loss", "val_loss"):
        assert results[0][name] == results[1][name]
    assert train("plain", "--epochs", "1", "--workers", "1") == 0
    assert left("plain", "result.json")["fingerprint"] != results[0]["fingerprint"]


def test_other_conditions_are_refused(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert train("first", "--epochs", "1", "--workers", "1", "--virtual-workers", "4") == 0
    capsys.readouterr()
    arguments = ["--epochs", "2", "--resume", "first", "--threads", "2", "--virtual-workers", "2"]
    assert train("first", *arguments) == 2
    said = capsys.readouterr().err
    assert (
        "virtual_workers 4 → 2, threads 1 → 2. allow_different_hardware=True "
        "(--allow-different-hardware) resumes all" in said
    )
    assert len(left("first", "result.json")) > 0
    caplog.clear()
    assert train("first", *arguments, "--allow-different-hardware") == 0
    assert [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "determinism" in r.getMessage()
    ] == [
        "the run continues under other determinism settings, and with other bits: virtual_workers "
        "4 → 2, threads 1 → 2"
    ]


def test_a_run_without_virtual_workers_does_not_become_one_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("first", "--epochs", "1", "--workers", "1") == 0
    assert train("first", "--epochs", "2", "--resume", "first", "--virtual-workers", "8") == 2
    assert "virtual_workers None → 8" in capsys.readouterr().err


def test_workers_are_no_more_than_virtual_workers() -> None:
    assert choose_workers(TrainOptions(virtual_workers=1, global_batch_size=4096)) == 1
    assert main(["train", *SMALL, "--workers", "3", "--virtual-workers", "2"]) == 2
