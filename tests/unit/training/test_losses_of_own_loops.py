"""Losses of a loop with `prepare` that parts of a batch do not add up to, and like ones that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError

SAMPLES = 16
WEIGHT = torch.tensor([1.0, 3.0, 0.5, 2.0])


def train(body: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any], count: Any = None, **options: Any) -> int:
    """Train with the losses of `body` for four batches; returns the number of steps."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (4 * SAMPLES,), generator=generator)
    labels[5::7] = -100
    data = TensorDataset(torch.randn(4 * SAMPLES, 3, generator=generator), labels)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = lockstep.prepare(model, optimizer, DataLoader(data, batch_size=SAMPLES), **options)
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        body(model, x, y).backward()
        optimizer.step(count=None if count is None else count(y))
        steps += optimizer.stepped
    return steps


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y.clamp(0), WEIGHT)


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y.clamp(0))


@pytest.mark.parametrize(
    ("body", "count", "said"),
    [
        (weighted, lambda y: WEIGHT[y.clamp(0)].sum(), r"weights of its labels' classes.*step\(count=weight\[targets"),
        (lambda *each: F.cross_entropy(each[0](each[1]), each[2]), lambda y: (y >= 0).sum(), "labels that are not ign"),
    ],
    ids=["class weights", "ignored labels"],
)
def test_a_mean_over_something_else_needs_its_count(body: Any, count: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(body)
    assert train(body, count) == 4
    assert train(body, virtual_workers=4) == 4  # whose parts are the same on any number of workers


def test_a_mean_over_samples_needs_none() -> None:
    assert train(plain) == 4


def hardest(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A triplet loss with the hardest samples of the batch."""
    output = model(x)
    distances = torch.cdist(output, output)
    same = y[:, None] == y
    return (distances.where(same, 0).amax(1) - distances.where(~same, 1e6).amin(1) + 1).relu().mean()


def to_prototypes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distances to as many points as there are samples, which are parameters."""
    return torch.cdist(model(x), model.weight.repeat(6, 2)[:SAMPLES, :4]).mean()  # type: ignore[operator]


def prompted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Scores by the outputs for as many constant prompts as there are samples."""
    prompts = torch.linspace(-1, 1, SAMPLES * 3).reshape(SAMPLES, 3)
    return F.cross_entropy(model(x) @ model(prompts).T, y.clamp(0))


def test_distances_among_samples_are_seen() -> None:
    with pytest.raises(ConfigError, match="samples of a part of the batch depend on each other"):
        train(hardest)


@pytest.mark.parametrize("body", [to_prototypes, prompted])
def test_comparisons_with_what_is_no_sample_are_not(body: Any) -> None:
    assert train(body) == 4
