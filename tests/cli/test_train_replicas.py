"""`lockstep train --strategy replicas`: several devices in one process, and what cannot go with
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep import environment
from lockstep.cli import main
from lockstep.cli.train import choose_workers
from lockstep.training.options import TrainOptions

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.leaks("matplotlib keeps its fonts open"),
]

SMALL = ["--data", "synthetic", "--model", "mlp"]
REPLICAS = ["--strategy", "replicas", "--devices", "cpu,cpu"]


def train(out: str, *arguments: str) -> int:
    return main(["train", *SMALL, "--run-dir", out, *arguments])


def left(out: str, name: str) -> Any:
    return json.loads((Path(out) / name).read_text())


def test_two_devices_learn_what_one_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("two", "--epochs", "1", *REPLICAS) == 0
    said = capsys.readouterr().out
    assert "1 worker on cpu, 2 replicas each" in said
    assert "samples/s with 1 worker on 2 devices" in said
    assert left("two", "result.json")["devices"] == ["cpu", "cpu"]
    assert [left("two", "config.json")[name] for name in ("strategy", "devices")] == [
        "replicas",
        "cpu,cpu",
    ]
    assert (
        train("one", "--epochs", "1", "--quiet", "--workers", "1", "--max-steps-in-flight", "1")
        == 0
    )
    for name in ("train_loss", "val_loss"):
        assert left("two", "result.json")[name] == pytest.approx(
            left("one", "result.json")[name], rel=1e-4
        )
    assert (
        main(["train", "--resume", "two", "--epochs", "2", "--quiet", "--strategy", "distributed"])
        == 2
    )
    assert "to resume a run of that strategy under another one." in capsys.readouterr().err
    alone = ["--strategy", "distributed", "--devices", "auto", "--run-dir", "on", "--workers", "1"]
    assert main(["train", "--resume", "two", "--epochs", "2", "--quiet", *alone]) == 0
    assert left("on", "result.json")["epochs"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "cpu"], "--devices: expected auto without the strategy replicas, got 'cpu'"),
        (
            [*REPLICAS, "--virtual-workers", "4"],
            "--virtual-workers: expected none with the strategy replicas, got 4. Virtual workers "
            "need",
        ),
        ([*REPLICAS, "--compile"], "--compile: expected false with the strategy replicas"),
        (
            [*REPLICAS, "--sync-batchnorm"],
            "--sync-batchnorm: expected false with the strategy replicas",
        ),
        ([*REPLICAS, "--devices", "cpu,,cpu"], "--devices: expected a device"),
        ([*REPLICAS, "--devices", "cpu,xpu:7"], "--devices: expected available devices (cpu"),
        (
            [*REPLICAS, "--device", "mps"],
            "--devices: expected mps as the first device, as in device, got 'cpu,cpu'",
        ),
        (
            ["--max-steps-in-flight", "0"],
            "--max-steps-in-flight: expected a whole number of at least 1, got '0'",
        ),
    ],
)
def test_what_cannot_be(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


def test_one_process_unless_more_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 4)
    assert choose_workers(TrainOptions(device="cpu", data="mnist")) == 4
    assert choose_workers(TrainOptions(device="cpu", strategy="replicas")) == 1
    assert choose_workers(TrainOptions(device="cpu", strategy="replicas", workers="2")) == 2
