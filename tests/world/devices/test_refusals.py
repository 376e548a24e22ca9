"""What loops with `prepare` refuse on the CPU is refused on an accelerator too, played by the toy
device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from support import toy_device
from support.pool import Pool

SAMPLES, BATCH = 96, 16


class WithNumber(nn.Module):
    """Returns a number of the whole batch beside its outputs, which is no mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.choice = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        chosen = self.choice(inputs).softmax(1)
        return self.output(inputs), chosen.mean(0).norm()


def train(ignores: bool, adds: bool, counts: bool) -> str:
    """Train for two epochs; returns the error of the loop, or "" if there was none."""
    toy_device.register()
    lockstep.init("toy")
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (SAMPLES,))
    labels[-1] = -100 if ignores else 0  # in the last batch alone
    model: Any = WithNumber()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(SAMPLES, 8), labels), BATCH)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    try:
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                output, number = model(x)
                (F.cross_entropy(output, y) + (0.01 * number if adds else 0)).backward()
                optimizer.step(count=(y >= 0).sum() if counts else None)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mean_over_labels_of_which_some_are_ignored(toy_pool: Pool, workers: int) -> None:
    """Their number is known when the device has counted them: the error comes by the end of the
    epoch, on all.
    """
    env = toy_device.ONE_EACH
    for said in toy_pool.run(train, True, False, False, workers=workers, init=False, env=env):
        assert "a mean over the labels that are not ignored" in said
    assert (
        toy_pool.run(train, True, False, True, workers=workers, init=False, env=env)
        == [""] * workers
    )
    assert (
        toy_pool.run(train, False, False, False, workers=workers, init=False, env=env)
        == [""] * workers
    )


def test_a_number_of_the_model_that_is_no_mean(toy_pool: Pool) -> None:
    (said,) = toy_pool.run(train, False, True, False, workers=1, init=False)
    assert "each number that a model adds to it, got a number of the model that is" in said
