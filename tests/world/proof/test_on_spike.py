"""The same spikes are left out at any number of workers, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.proof.on_spike import SpikeGuard
from support.pool import Pool

STEPS, BATCH = 50, 12


def train(on_spike: Any, value: float, **options: Any) -> tuple[str, list[Any], float]:
    """Train with a sample that is far off; returns the state, what was left out, and the column."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        BATCH,
        callbacks=[],
        on_spike=on_spike,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 6, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    inputs[333] = value
    history = trainer.fit(TensorDataset(inputs, labels), epochs=2)
    *_, guard = trainer.step.guards
    assert isinstance(guard, SpikeGuard)
    state = lockstep.fingerprint(model, optimizer)
    return state, guard.left_out, sum(row["left_out"] for row in history)


@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_with_virtual_workers_bit_for_bit(pool: Pool, action: str, value: float) -> None:
    runs = [
        pool.run(train, action, value, virtual_workers=6, workers=n, init=False) for n in (1, 2, 3)
    ]
    found = [of_rank for run in runs for of_rank in run]
    assert all(each == found[0] for each in found)
    assert found[0][2] >= 2  # the sample is in each of two epochs


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_without_virtual_workers_all_workers_decide_alike(pool: Pool, action: str) -> None:
    for workers in (2, 3):
        found = pool.run(train, action, 1e4, workers=workers, init=False)
        assert all(each == found[0] for each in found)
        assert found[0][2] >= 2


def test_rolling_back_with_cross_check(pool: Pool) -> None:
    plain = pool.run(train, "rollback", 1e4, virtual_workers=6, workers=2, init=False)
    checked = pool.run(
        train, "rollback", 1e4, virtual_workers=6, cross_check=3, workers=2, init=False
    )
    assert plain == checked
