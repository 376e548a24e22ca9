"""A model whose outputs for a sample depend on the others of the same pass is told from all other
models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training.divided_batches import FirstCall


class Normalised(nn.Module):
    """Batch norm as written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
        return self.second(hidden.relu())


class MinibatchDeviation(nn.Module):
    """The standard deviation over groups of four samples as a further feature."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(4, -1, 6) if len(x) % 4 == 0 else x.reshape(2, -1, 6)
        deviation = groups.std(0).mean(-1, keepdim=True).repeat(len(x) // groups.shape[1], 1)
        return self.out(torch.cat([x, deviation], 1))


class InTrainingOnly(Normalised):
    """Statistics of the batch in training, none in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else self.second(self.first(x).relu())


class AcrossSamples(nn.Module):
    """Attention over the wrong dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None])[0].flatten(1)


def is_mixed(model: nn.Module, x: Any, samples: int, parts: int = 2) -> bool:
    call = FirstCall(model, samples, parts)
    model(x)
    model(x)
    return call.mixes_samples()


@pytest.mark.parametrize("make", [Normalised, MinibatchDeviation, InTrainingOnly, AcrossSamples])
@pytest.mark.parametrize("rows", [4, 5, 16])
def test_outputs_that_depend_on_other_samples_are_found(make: Any, rows: int) -> None:
    if make is MinibatchDeviation and rows == 5:
        rows = 8
    torch.manual_seed(0)
    assert is_mixed(make(), torch.randn(rows, 6), samples=2 * rows)


def test_what_a_model_does_in_the_other_mode_does_not_count() -> None:
    assert not is_mixed(InTrainingOnly().eval(), torch.randn(8, 6), samples=16)


class DrawsBetween(nn.Module):
    """Dropout as a function, whose masks depend on the number of samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.5), 0.5)


class OfTwo(nn.Module):
    """Two inputs, of which one is a table for all samples."""

    def forward(self, x: torch.Tensor, *, table: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": x @ table, "table": table.softmax(0)}


INDEPENDENT = [
    nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3)),
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()),
    nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten()),
    nn.Sequential(nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)),
    torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
    DrawsBetween(),
    nn.Linear(6, 3).double(),
]


@pytest.mark.parametrize("model", INDEPENDENT, ids=lambda model: type(model).__name__)
def test_models_whose_samples_are_independent_are_not(model: nn.Module) -> None:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    assert not is_mixed(model, torch.randn(8, 6, dtype=dtype), samples=16)


def test_what_all_samples_share_is_left_whole() -> None:
    model = OfTwo()
    call = FirstCall(model, 16, 2)
    model(torch.randn(8, 6), table=torch.randn(6, 4))
    assert not call.mixes_samples()


@pytest.mark.parametrize(
    ("samples", "rows"),
    [(7, 3), (16, 5)],  # parts that are too small; a first dimension that is not of the samples
)
def test_calls_of_other_sizes_are_not_looked_at(samples: int, rows: int) -> None:
    assert not is_mixed(Normalised(), torch.randn(rows, 6), samples=samples)


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_a_pass_that_fails_leaves_no_hook() -> None:
    model = Failing(6, 3)
    FirstCall(model, 16, 2)
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 6))
    assert len(model._forward_pre_hooks) == 0


def test_it_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Normalised(), nn.BatchNorm1d(3), nn.Dropout(0.5))
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(0))
    call = FirstCall(model, 16, 2)
    model(torch.randn(8, 6))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    assert call.mixes_samples()
    assert len(calls) == 1  # the user's hook was not called again
    assert len(model._forward_pre_hooks) == 0
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(layer.training for layer in model.modules())
    assert not call.mixes_samples()  # asked once
