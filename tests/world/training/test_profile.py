"""`Profile` and `LearningRates`: what they record of a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import CSVLog, LearningRates, Profile
from lockstep.errors import ConfigError
from support.pool import Pool

DATA = TensorDataset(torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 3)


def trainer(run_dir: Path | None, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    lockstep.init("cpu")
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.8)
    return lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        4,
        run_dir=run_dir,
        callbacks=list(callbacks),
        **options,
    )


def test_each_rank_records_the_steps_that_are_asked_for(pool: Pool, tmp_path: Path) -> None:
    def train() -> None:
        trainer(tmp_path / "run", Profile(range(3, 5))).fit(DATA, 1)

    pool.run(train, workers=2)
    folder = tmp_path / "run" / "profile"
    names = [f"rank-{rank}-step-3.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    assert sorted(path.name for path in folder.iterdir()) == names
    for rank in (0, 1):
        with gzip.open(folder / f"rank-{rank}-step-3.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        updates = [
            event
            for event in events
            if str(event.get("name", "")).startswith("Optimizer.step#SGD.step")
        ]
        assert len(updates) == 2
        assert "addmm" in (folder / f"rank-{rank}-step-3.txt").read_text()


@pytest.mark.parametrize("steps", [[], [0, 1], [1, 3], [2, 1]])
def test_steps_that_do_not_follow_one_another_are_refused(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match="steps: expected steps from 1 that follow one another"):
        Profile(steps)


def test_steps_that_the_run_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="steps: expected at most 5, the steps of the run, got 12"
    ):
        trainer(tmp_path / "run", Profile()).fit(DATA, 1)
    with pytest.raises(ConfigError, match=r"callbacks.Profile: expected Trainer"):
        trainer(None, Profile()).fit(DATA, 3)


def test_the_learning_rates_of_all_groups_are_columns(tmp_path: Path) -> None:
    schedule = {"schedule": lambda step: 1 / (1 + step)}
    rates = LearningRates(["weight", "bias"], momentum=True)
    (row,) = trainer(tmp_path / "run", rates, CSVLog(), **schedule).fit(DATA, 1)
    assert [row[name] for name in ("lr", "lr_weight", "lr_bias", "momentum_bias")] == pytest.approx(
        [0.02, 0.02, 0.08, 0.8]
    )
    assert (
        "lr_weight,lr_bias,momentum_weight,momentum_bias"
        in (tmp_path / "run" / "metrics.csv").read_text()
    )


def test_names_for_another_number_of_groups_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"names: expected 2 names, one for each group of parameters, got .'all'."
    ):
        trainer(None, LearningRates(["all"])).fit(DATA, 1)
