"""Losses that return one value for each sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nd import NDArray

__all__ = ["L1Loss", "L2Loss", "SoftmaxCrossEntropyLoss"]


def _mean_per_sample(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all dimensions but the first."""
    return values.flatten(1).mean(dim=1) if values.dim() > 1 else values


class SoftmaxCrossEntropyLoss(nn.Module):
    """Cross-entropy of scores (N, C) and labels (N,), or probabilities (N, C) with
    sparse_label=False.
    """

    def __init__(self, sparse_label: bool = True) -> None:
        super().__init__()
        self.sparse_label = sparse_label

    def forward(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the losses, of shape (N,); their `backward()` computes the gradients of the
        sum.
        """
        target = label.long() if self.sparse_label else label
        return F.cross_entropy(pred, target, reduction="none").as_subclass(NDArray)


class L2Loss(nn.Module):
    """Half the squared difference, averaged over the elements of a sample."""

    def forward(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the losses, of shape (N,); their `backward()` computes the gradients of the
        sum.
        """
        return _mean_per_sample((pred - label.reshape(pred.shape)).square() / 2).as_subclass(
            NDArray
        )


class L1Loss(nn.Module):
    """The absolute difference, averaged over the elements of a sample."""

    def forward(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the losses, of shape (N,); their `backward()` computes the gradients of the
        sum.
        """
        return _mean_per_sample((pred - label.reshape(pred.shape)).abs()).as_subclass(NDArray)
