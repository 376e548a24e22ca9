"""Passes that leave no trace in the buffers of a model, whatever changes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep.training.pass_effects import preserving_buffers


class OwnNorm(nn.Module):
    """Changes its statistics by the kernel of batch norm, which gives them no new version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("unused", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=True) * self.table


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.sum(0)
        return x


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), OwnNorm(), Replacing()]
)
def test_buffers_are_as_before(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    before = {
        name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()
    }
    with preserving_buffers(model):
        model.train()  # also a layer that was in evaluation mode before
        model(torch.randn(5, 3) + 3)
    assert dict(model.named_buffers()).keys() == before.keys()
    for name, buffer in model.named_buffers():
        tensor, values, version = before[name]
        assert buffer is tensor
        assert torch.equal(buffer, values)
        assert buffer._version == version


def test_a_buffer_of_two_layers_is_one_within_the_block_too() -> None:
    one = Replacing()
    other = Replacing()
    other.seen = one.seen
    with preserving_buffers(nn.ModuleList([one, other])):
        assert one.seen is other.seen


def test_a_graph_that_is_kept_can_still_be_used() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    with preserving_buffers(model):
        loss = model(torch.randn(5, 3)).sum()
    model(torch.randn(5, 3))
    loss.backward()
    assert model[1].weight.grad is not None
