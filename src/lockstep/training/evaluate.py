"""Measures a model on a data set, with every sample counted once over all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..data.loader import Loader
from .losses import Forward, LossFn, as_sum, check_fit, default_forward
from .precision import Precision

__all__ = ["Metric", "accuracy", "default_metrics", "evaluate"]

Metric = Callable[[Any, Any], torch.Tensor]
"""(output, target) of some samples → the sum of the metric over these samples, a 0-dim tensor."""


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How many of the samples have their label's class as the largest output: (n, classes), (n,) → 0-dim."""
    return (output.argmax(dim=1) == target).sum()


def default_metrics(loss_fn: LossFn) -> dict[str, Metric]:
    """Accuracy where the loss is one of classification, and nothing otherwise."""
    return {"accuracy": accuracy} if isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) else {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every layer in evaluation mode, and afterwards each back into the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    loss_fn: LossFn,
    metrics: Mapping[str, Metric] | None = None,
    *,
    precision: Precision | None = None,
    forward: Forward | None = None,
) -> dict[str, float]:
    """The mean loss and the mean of each metric over all samples of `loader`, the same on every worker.

    Args:
        model: left in the mode that it is in.
        loader: deals out the data set; its epoch 0 is used.
        loss_fn: see `lockstep.training.losses.LossFn`.
        metrics: name → `Metric`; accuracy when None and the loss is one of classification.
        precision: of the forward passes; float32 when None.
        forward: see `lockstep.training.losses.Forward`.

    Returns:
        {"loss": …, and each metric's name: …}
    """
    metrics = default_metrics(loss_fn) if metrics is None else metrics
    precision = precision or Precision("fp32", loader.comm.device)
    run = forward or default_forward
    device = loader.comm.device
    # loss, what it is a sum over, samples, then the metrics
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(3 + len(metrics), device=device, dtype=wide)
    with evaluating(model):
        for batch in loader.epoch(0):
            if batch.size == 0:
                continue
            with precision.autocast():
                output, target = run(model, batch.data)
                if batch.step == 0:
                    check_fit(loss_fn, output, target)
                loss, count = as_sum(loss_fn(output, target), batch.size)
            totals[0] += loss
            totals[1] += count
            totals[2] += batch.size
            for place, metric in enumerate(metrics.values(), start=3):
                totals[place] += metric(output, target)
    loss_sum, count, samples, *sums = loader.comm.allreduce(totals).tolist()
    means = {name: value / samples for name, value in zip(metrics, sums, strict=True)}
    return {"loss": loss_sum / count, **means}
