"""A small classifier of vectors, and samples for it: what the tests of divided optimizers train."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

__all__ = ["make_classifier", "make_samples"]

INPUTS, CLASSES = 16, 5


def make_classifier() -> nn.Module:
    """Return a model with batch norm, dropout, small tensors, a frozen one, and one that is sent by
    itself.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(INPUTS, 1024),
        nn.BatchNorm1d(1024),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(1024, 300),
        nn.Tanh(),
        nn.Linear(300, CLASSES),
    )
    model[6].bias.requires_grad_(False)
    return model


def make_samples(count: int) -> TensorDataset:
    """Return so many random samples, always the same."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, INPUTS, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))
