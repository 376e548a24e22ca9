"""Averages of a model with tensors in formats of 8 bits, in which torch does not calculate."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import AveragedWeights
from lockstep.errors import ConfigError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("table", torch.arange(4.0).to(torch.float8_e4m3fn))
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = (self.table.float() + 1).to(torch.float8_e4m3fn)
        output: torch.Tensor = self.layer(x * self.table.float())
        return output


def fit(model: nn.Module, average: AveragedWeights) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    trainer = lockstep.Trainer(model, optimizer, nn.MSELoss(), 4, callbacks=[average])
    trainer.fit(TensorDataset(X, X.sum(1, keepdim=True)), epochs=2)


@pytest.mark.parametrize("decay", [0.9, None])
def test_buffers_are_those_of_the_newest_model(decay: float | None) -> None:
    torch.manual_seed(0)
    model, average = Scaled(), AveragedWeights(decay)
    fit(model, average)
    assert (
        average.model.get_buffer("table").float().tolist()
        == model.table.float().tolist()
        == [4.0, 5.0, 6.0, 7.0]
    )
    assert not torch.equal(average.model.get_parameter("layer.weight"), model.layer.weight)


def test_parameters_are_named_before_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    model.coarse = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(
        ConfigError, match=r"AveragedWeights.* of parameters of 16 bits or more, got coarse"
    ):
        fit(model, AveragedWeights())
