"""Which modules are gathered whole when a model is cut over workers."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models import build
from lockstep.parallel.sharded import batch_norm_layers, wrap_policy


class Running(nn.Module):
    """Has a forward pass, which nobody calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Encoder(Running):
    def __init__(self, blocks: int, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(blocks))
        self.out = nn.Linear(8, 50)
        if tied:
            self.out.weight = self.words.weight


class Attending(Running):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.out = nn.Linear(8, 8)


class Listed(Running):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        )


def test_blocks_of_a_transformer() -> None:
    assert wrap_policy(Encoder(6), 100) == [
        "words",
        *(f"blocks.{number}" for number in range(6)),
        "out",
    ]
    # what is too small goes with the model itself
    assert wrap_policy(Encoder(6), 500) == [f"blocks.{number}" for number in range(6)]
    assert wrap_policy(Encoder(6)) == []


def test_what_is_shared_goes_with_the_model_itself() -> None:
    assert wrap_policy(Encoder(6, tied=True), 100) == [f"blocks.{number}" for number in range(6)]


def test_layers_whose_children_are_not_called() -> None:
    # the attention is more than a quarter of the model, and uses its out_proj's parameters itself
    assert wrap_policy(Attending(), 50) == ["attention", "out"]


def test_a_sequence_is_looked_into() -> None:
    assert wrap_policy(Listed(), 50) == [f"layers.{number}" for number in (0, 2, 3, 4)]
    # together small enough, but a loop over the layers would not call their sequence
    assert wrap_policy(nn.ModuleDict({"a": Listed(), "b": nn.Linear(100, 100)}), 50) == ["a", "b"]
    assert wrap_policy(nn.ModuleList([Listed().layers, nn.Linear(100, 100)]), 300) == ["1"]


def test_a_residual_network() -> None:
    model = build("resnet18", 10, (3, 32, 32))
    found = wrap_policy(model)
    counted = [p for name in found for p in model.get_submodule(name).parameters()]
    assert len({id(p) for p in counted}) < len(list(model.parameters()))
    assert sum(p.numel() for p in {id(p): p for p in counted}.values()) > 0.95 * sum(
        p.numel() for p in model.parameters()
    )


def test_inner_units_come_first() -> None:
    model = nn.ModuleDict({"big": Encoder(6), "small": nn.Linear(2, 2)})
    model["big"].extra = nn.Parameter(torch.zeros(20, 30))
    found = wrap_policy(model, 100)
    assert found[-1] == "big"
    assert all(found.index(name) < found.index("big") for name in found if name.startswith("big."))


def test_layers_with_running_statistics() -> None:
    plain, counting = nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)
    model = nn.Sequential(plain, counting, nn.BatchNorm1d(3, affine=False), nn.LayerNorm(3))
    assert batch_norm_layers(model) == [counting]
