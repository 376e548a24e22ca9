"""Makes of any loss function a sum over samples, which parts of a batch can be added up from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..data.nested import map_tensors
from ..errors import ConfigError
from ..strategies.sync_batchnorm import SyncBatchNorm

__all__ = ["Forward", "LossFn", "LossModule", "default_forward"]

LossFn = Callable[[Any, Any], Any]
"""(output, target) → the mean over the samples (a scalar), or the samples' losses (shape (n,)), or (sum, count) where
the mean is over something else, e.g. tokens."""

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, data) → (output, target)."""


def default_forward(model: nn.Module, data: Any) -> tuple[Any, Any]:
    """Run `model` on the first of the pair (inputs, targets).

    Raises:
        ConfigError: when the data is no pair.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ConfigError(
            "forward",
            "a function (model, data) -> (output, target) for data that is no pair (inputs, targets)",
            type(data).__name__,
        )
    return model(data[0]), data[1]


class LossModule(nn.Module):
    """A model and its loss as one module: (data, n) → (sum of the loss, what it is a sum over).

    The loss belongs to the module so that everything a step computes runs inside the strategy's forward pass.

    Args:
        model: the user's model.
        loss_fn: see `LossFn`.
        forward: see `Forward`.

    Raises:
        ConfigError: when `loss_fn` averages with class weights, so that its means cannot be added up.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, forward: Forward | None = None) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = [loss_fn]  # in a list: a loss that is a module must not add names to the state dict
        self._forward = forward or default_forward
        self._checked = False
        # Layers that talk to other workers in their passes must run on every worker, also on one without samples.
        self._talks = any(isinstance(layer, SyncBatchNorm) for layer in model.modules())
        _refuse_weighted_mean(loss_fn)

    def forward(self, data: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The loss of `size` samples; of none, a zero that still reaches every parameter."""
        if size == 0:
            return self.nothing(data), 0
        output, target = self._forward(self.model, data)
        if not self._checked:
            check_fit(self._loss_fn[0], output, target)
            self._checked = True
        return as_sum(self._loss_fn[0](output, target), size)

    def nothing(self, data: Any) -> torch.Tensor:
        """Zero, with a gradient of zeros for every parameter: what a worker without samples has to add."""
        if not self._talks:
            parts = [p.reshape(-1)[:0] for p in self.model.parameters() if p.requires_grad]
        else:
            # Through the model, so that the backward pass comes by the same layers in the same order as elsewhere.
            parts = []
            output, _ = self._forward(self.model, data)
            map_tensors(parts.append, output)
        return torch.stack([part.sum().float() for part in parts]).sum()


def as_sum(value: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
    """What a loss function returned for `size` samples, as (sum, count).

    Raises:
        ConfigError: when it is none of the forms of `LossFn`.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value * size, size
    if isinstance(value, torch.Tensor) and value.numel() == size:
        return value.sum(), size
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise ConfigError(
        "loss_fn",
        f"a scalar mean, {size} losses (one for each sample), or (sum, count)",
        f"{shape}",
        "Where the mean is over tokens or pixels, return their sum and their count.",
    )


def _refuse_weighted_mean(loss_fn: LossFn) -> None:
    if isinstance(loss_fn, nn.Module) and getattr(loss_fn, "reduction", None) == "sum":
        raise ConfigError(
            "loss_fn",
            "a mean over samples, or (sum, count)",
            f"{type(loss_fn).__name__} with reduction='sum'",
            "A sum alone does not say what it is a sum over.",
        )
    if getattr(loss_fn, "weight", None) is not None and getattr(loss_fn, "reduction", None) == "mean":
        raise ConfigError(
            "loss_fn",
            "a loss whose mean is over samples",
            f"{type(loss_fn).__name__} with class weights and reduction='mean'",
            "Its mean is over weights, which differ from part to part. Return (sum, count): the loss with "
            "reduction='sum', and weight[target].sum().",
        )


def check_fit(loss_fn: LossFn, output: Any, target: Any) -> None:
    """See that class labels lie within the model's outputs; other kinds of loss check their arguments themselves.

    Raises:
        ConfigError: naming both shapes, or the label that is too large.
    """
    if not isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return
    shapes = f"output {list(output.shape)} and labels {list(target.shape)}"
    if output.dim() < 2 or target.shape != (output.shape[0], *output.shape[2:]):
        raise ConfigError("model", "an output of shape (samples, classes, …) for labels (samples, …)", shapes)
    labels = target[target != getattr(loss_fn, "ignore_index", -100)]
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < output.shape[1]:
        raise ConfigError(
            "model",
            f"at least as many outputs as the labels need ({int(labels.max()) + 1})",
            f"{output.shape[1]} outputs, and labels from {int(labels.min())} to {int(labels.max())}",
        )
