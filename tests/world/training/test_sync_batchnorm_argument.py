"""`sync_batchnorm=True` gives batch norm the statistics of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def weights_of_a_loop(batch: int, whole: bool) -> list[float]:
    """Train batch norm between two layers in float64 with `prepare`, and return the weights."""
    torch.manual_seed(0)
    samples = 29
    inputs = torch.randn(samples, 4, dtype=torch.float64)
    labels = torch.randint(3, (samples,))
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
    model: nn.Module = nn.Sequential(*layers).double()
    model = lockstep.prepare_model(model, lockstep.init("cpu"), sync_batchnorm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(inputs, labels), batch, shuffle=True)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    lockstep.prepare(model)  # as for another training, which does not run here
    for _ in range(2):
        for part, targets in loader:
            outputs = model(part)
            if whole:
                outputs = lockstep.whole_batch(outputs)
                targets = lockstep.whole_batch(targets)
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()
    return [float(value) for tensor in model.state_dict().values() for value in tensor.flatten()]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("batch", [8, 9])
def test_parts_of_different_sizes_train_the_same_model(pool: Pool, batch: int, whole: bool) -> None:
    """The last batch has 5 or 2 samples, so that one of three workers has none of the latter.

    A worker's gradients for the layers below come from the losses of all, each a mean over its
    own part.
    """
    (alone,) = pool.run(weights_of_a_loop, batch, whole, workers=1)
    for workers in (2, 3):
        together = pool.run(weights_of_a_loop, batch, whole, workers=workers)
        assert together == [pytest.approx(alone, abs=1e-9)] * workers
