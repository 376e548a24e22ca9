"""`sync_batchnorm=True` gives batch norm the statistics of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from support.pool import Pool


def fitted(**options: Any) -> list[float]:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
    inputs = torch.randn(33, 4, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = lockstep.Trainer(model, optimizer, nn.MSELoss(), 11, callbacks=[], **options)
    rows = trainer.fit(data, epochs=2, validate=data)
    return [row[name] for row in rows for name in ("train_loss", "val_loss")]


def test_the_statistics_are_those_of_the_global_batch(pool: Pool) -> None:
    wanted = pool.run(fitted, workers=1)[0]
    assert pool.run(fitted, workers=2)[0] != pytest.approx(wanted, rel=1e-3)
    for size in (1, 2, 3):
        for found in pool.run(fitted, sync_batchnorm=True, workers=size):
            assert found == pytest.approx(wanted, rel=1e-9)
    equal = [
        pool.run(fitted, sync_batchnorm=True, virtual_workers=3, workers=size)[0] for size in (1, 2)
    ]
    assert equal[0] == equal[1] == pytest.approx(wanted, rel=1e-9)
