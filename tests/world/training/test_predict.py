"""Predictions and metrics of whole data sets are the same at any number of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from support.pool import Pool

SAMPLES = 13  # the last global batch of 4 has one sample, so that other workers have none
INPUTS = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, torch.arange(SAMPLES) % 2)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, 2)


def auc(output: torch.Tensor, target: torch.Tensor) -> float:
    """The share of pairs of a positive and a negative sample that are in the right order."""
    scores = output[:, 1] - output[:, 0]
    right = scores[target == 1][:, None] > scores[target == 0]
    return float(right.double().mean())


class Tokens(nn.Module):
    """Returns several outputs."""

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        return {"sums": inputs.sum(1), "both": (inputs[:, :2], inputs[:, 2:])}


class Median:
    """A metric as those of torchmetrics: with a state that is updated batch by batch."""

    def reset(self) -> None:
        self.values: list[torch.Tensor] = []

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.values.append(output[range(len(target)), target])

    def compute(self) -> torch.Tensor:
        return torch.cat(self.values).median()


def predicted(virtual_workers: int | None) -> Any:
    loader = lockstep.Loader(DATA, 4, shuffle=False, virtual_workers=virtual_workers)
    several = lockstep.predict(Tokens(), lockstep.Loader(DATA, 4, shuffle=False))
    return lockstep.predict(model(), loader), several["sums"], *several["both"]


@pytest.mark.parametrize("virtual_workers", [None, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_predictions_are_in_the_order_of_the_data_set(
    pool: Pool, workers: int, virtual_workers: int | None
) -> None:
    expected = (model()(INPUTS), INPUTS.sum(1), INPUTS[:, :2], INPUTS[:, 2:])
    for results in pool.run(predicted, virtual_workers, workers=workers):
        assert all(
            torch.allclose(ours, theirs) for ours, theirs in zip(results, expected, strict=True)
        )


def test_a_trainer_predicts_for_inputs_alone_and_in_full_precision() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    trainer = lockstep.Trainer(
        made, optimizer, nn.CrossEntropyLoss(), 4, callbacks=[], precision="bf16"
    )
    assert torch.allclose(trainer.predict(INPUTS), made(INPUTS), atol=0.1)
    assert trainer.predict(DATA).dtype == torch.float32
    doubled = trainer.predict(DATA, forward=lambda model, data: 2 * model(data[0]))
    assert torch.equal(doubled, 2 * trainer.predict(DATA))


def test_predictions_of_shuffled_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="loader: expected one with shuffle=False"):
        lockstep.predict(model(), DataLoader(DATA, 4, shuffle=True))


def evaluated(virtual_workers: int | None) -> dict[str, float]:
    metrics = {
        "auc": lockstep.whole_set(auc),
        "median": Median(),
        "first": lambda output, target: output[:, 0],
    }
    loader = lockstep.Loader(DATA, 4, shuffle=False, virtual_workers=virtual_workers)
    lockstep.evaluate(
        model(), loader, nn.CrossEntropyLoss(), metrics
    )  # a second time, metrics begin anew
    return lockstep.evaluate(model(), loader, nn.CrossEntropyLoss(), metrics)


@pytest.mark.parametrize("virtual_workers", [None, 3])
def test_metrics_of_the_whole_set_do_not_depend_on_the_workers(
    pool: Pool, virtual_workers: int | None
) -> None:
    output = model()(INPUTS).detach()
    expected = {
        "auc": auc(output, DATA.tensors[1]),
        "median": float(output[range(SAMPLES), DATA.tensors[1]].median()),
        "first": float(output[:, 0].mean()),
    }
    for workers in (1, 2, 3):
        for results in pool.run(evaluated, virtual_workers, workers=workers):
            assert list(results) == ["loss", "auc", "median", "first"]
            assert {name: results[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_metrics_with_several_values_are_several_columns() -> None:
    class Both(Median):
        def compute(self) -> Any:
            values = torch.cat(self.values)
            return {"low": values.min(), "high": values.max()}

    loader = lockstep.Loader(DATA, 4, shuffle=False)
    results = lockstep.evaluate(model(), loader, nn.CrossEntropyLoss(), {"score": Both()})
    assert list(results) == ["loss", "score_low", "score_high"]
    assert results["score_low"] < results["score_high"]


def test_they_are_refused_with_outputs_on_several_devices() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    options: dict[str, Any] = {
        "strategy": "replicas",
        "devices": ["cpu", "cpu"],
        "metrics": {"auc": lockstep.whole_set(auc)},
    }
    trainer = lockstep.Trainer(made, optimizer, nn.CrossEntropyLoss(), 4, callbacks=[], **options)
    with pytest.raises(
        ConfigError, match="metrics: expected functions of samples with the strategy replicas"
    ):
        trainer.evaluate(DATA)


def test_scikit_learns_metrics_take_what_is_gathered() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    loader = lockstep.Loader(DATA, 4, shuffle=False)
    score = lockstep.whole_set(lambda output, target: metrics.f1_score(target, output.argmax(1)))
    results = lockstep.evaluate(model(), loader, nn.CrossEntropyLoss(), {"f1": score})
    assert results["f1"] == pytest.approx(
        metrics.f1_score(np.arange(SAMPLES) % 2, model()(INPUTS).argmax(1).numpy())
    )
