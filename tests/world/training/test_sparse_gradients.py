"""Sparse gradients are clipped, corrected and reduced as dense ones are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigError
from support.pool import Pool

generator = torch.Generator().manual_seed(0)
ROWS = torch.randint(20, (50, 4), generator=generator)
TARGETS = torch.randn(50, 1, generator=generator)


class Bag(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 3, sparse=sparse)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(self.rows(x).sum(1))
        return output


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = target > 0
    return ((output - target).square() * positive).sum(), positive.sum()


def fitted(
    sparse: bool = True, loss_fn: Any = None, **options: Any
) -> tuple[list[float], list[float]]:
    """Return the losses and the weights."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = Bag(sparse)
    trainer = lockstep.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn or nn.MSELoss(),
        16,
        callbacks=[],
        max_grad_norm=0.5,
        **options,
    )
    rows = trainer.fit(TensorDataset(ROWS, TARGETS), epochs=2)
    return [row["train_loss"] for row in rows], [
        value for p in model.parameters() for value in p.flatten().tolist()
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_fn": counted},
        {"gradient_accumulation_steps": 2},
        {"strategy": "replicas", "devices": ["cpu", "cpu"]},
        {"precision": "fp16"},
    ],
)
def test_sparse_gradients_are_clipped_as_dense_ones(pool: Pool, options: dict[str, Any]) -> None:
    wanted = pool.run(fitted, sparse=False, **options, workers=1)[0]
    tolerance = {"rel": 0.02, "abs": 1e-2} if "precision" in options else {"rel": 1e-4, "abs": 1e-5}
    for size in (1, 2, 3):
        for found in pool.run(fitted, **options, workers=size):
            for one, other in zip(found, wanted, strict=True):
                assert one == pytest.approx(other, **tolerance)


def test_virtual_workers_name_a_sparse_layer_before_the_first_step() -> None:
    model = Bag()
    with pytest.raises(ConfigError, match="Embedding at rows: its gradients are sparse"):
        lockstep.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), 16, virtual_workers=2
        )
