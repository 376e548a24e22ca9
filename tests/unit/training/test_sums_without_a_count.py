"""A sum over a part in which nothing counts is a part of the whole sum; what is no number is
not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def focal(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over all boxes, divided by the number of those with an object, of which a part may
    have none.
    """
    return nn.functional.binary_cross_entropy_with_logits(
        output, target, reduction="sum"
    ), target.sum()


def ignoring(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over what is not ignored, times its number: no number where all is."""
    kept = target >= 0
    count = kept.sum()
    return nn.functional.mse_loss(output[kept], target[kept]) * count, count


def losses(loss: Any, target: torch.Tensor, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 3), target)
    trainer = lockstep.Trainer(model, optimizer, loss, 8, callbacks=[], **options)
    return [row["train_loss"] for row in trainer.fit(data, epochs=3)]


OBJECTS = torch.tensor([0.0, 1, 1, 0, 0, 0, 0, 0])[:, None]
IGNORED = torch.tensor([0.5, 1, 1, -1, -1, -1, -1, -1])[:, None]


@pytest.mark.parametrize(
    ("loss", "target"), [(focal, OBJECTS), (ignoring, IGNORED)], ids=["focal", "ignored"]
)
@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 4}, {"virtual_workers": 4}], ids=str
)
def test_a_part_that_counts_nothing(
    loss: Any, target: torch.Tensor, options: dict[str, int]
) -> None:
    # another seed would shuffle samples into other parts, which changes no sum
    assert losses(loss, target, **options) == pytest.approx(losses(loss, target), rel=1e-5)
