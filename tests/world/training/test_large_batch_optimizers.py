"""LARS and LAMB on several workers: the same bits with virtual workers, and norms of whole
parameters when sharded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from support.pool import Pool

DATA = TensorDataset(
    torch.randn(48, 6, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3
)


def train(kind: str, **options: Any) -> tuple[str, list[list[float]]]:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    trust = {"trust": 0.05} if kind == "LARS" else {}
    optimizer = getattr(lockstep, kind)(model.parameters(), 0.1, weight_decay=0.01, **trust)
    trainer = lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), 12, callbacks=[], **options)
    history = trainer.fit(DATA, 3)
    return trainer.step.strategy.fingerprint(model, optimizer), [
        row["train_loss"] for row in history
    ]


@pytest.mark.leaks("a device mesh outlives its job, and its group with it")
@pytest.mark.parametrize("kind", ["LARS", "LAMB"])
def test_any_number_of_workers_gives_the_same_model(pool: Pool, kind: str) -> None:
    one, two = (pool.run(train, kind, virtual_workers=2, workers=workers)[0] for workers in (1, 2))
    assert one == two
    sharded = pool.run(train, kind, strategy="sharded", workers=2)[0][1]
    assert sharded == pytest.approx(one[1], rel=1e-5)
    assert one[1][-1] < 0.999 * one[1][0]
