"""Measures a model on a data set, with every sample counted once over all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data.loader import Loader
from ..errors import ConfigError, DataError
from ..shards import bounds
from ..strategies.base import Strategy
from ..strategies.sync_batchnorm import taking_part_without_samples
from .formats import IN_FLIGHT
from .losses import Computation, Forward, LossFn, LossSum, classification, default_forward
from .modes import evaluating
from .precision import Precision
from .settling import Pace, check_in_flight
from .sums import NotAMean, SampleSum, raise_together

__all__ = ["Measures", "Metric", "accuracy", "check_metrics", "default_metrics", "evaluate"]

Metric = Callable[[Any, Any], Any]
"""(output, target) of some samples → the mean over them (a 0-dim floating tensor or a float), or one value for each of
them (shape (n,)), or (sum, count) where the mean is over something else, such as labels or pixels: the rule for losses.
The first batch of the first evaluation shows whether a mean is one, see `lockstep.training.sums`."""


def accuracy(
    output: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """How many of the labels are the class of the largest output, and how many labels there are.

    Args:
        output: shape (n, classes, …).
        target: labels of shape (n, …), or probabilities of the shape of `output`, whose largest is the label.
        ignore_index: labels of this value do not count.

    Returns:
        Two 0-dim tensors.

    Raises:
        ConfigError: for other shapes.
    """
    soft = target.is_floating_point()
    fitting = output.shape if soft else (*output.shape[:1], *output.shape[2:])
    if output.dim() < 2 or target.shape != fitting:
        shapes = f"output {list(output.shape)} and target {list(target.shape)}"
        raise ConfigError(
            "metrics", "outputs (samples, classes, …) for the labels (samples, …) of accuracy", found=shapes
        )
    labels = target.argmax(dim=1) if soft else target
    kept = labels != ignore_index
    return ((output.argmax(dim=1) == labels) & kept).sum(), kept.sum()


def default_metrics(loss_fn: LossFn) -> dict[str, Metric]:
    """Accuracy where the loss is one of classification, over the labels that it counts, and nothing otherwise."""
    of_classes = classification(loss_fn)
    return {} if of_classes is None else {"accuracy": partial(accuracy, ignore_index=of_classes.ignore_index)}


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """See that every metric can be called and has a name of its own.

    Raises:
        ConfigError: naming the first that cannot be used.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "metrics", "a mapping of names to functions (output, target) -> value", found=type(metrics).__name__
        )
    if "loss" in metrics:
        raise ConfigError("metrics", "names other than that of the loss itself", found="'loss'")
    for name, metric in metrics.items():
        if not callable(metric):
            raise ConfigError("metrics", f"a function (output, target) -> value as {name!r}", metric)


def evaluate(
    model: nn.Module,
    loader: Loader,
    loss_fn: LossFn,
    metrics: Mapping[str, Metric] | None = None,
    *,
    precision: Precision | None = None,
    forward: Forward | None = None,
    strategy: Strategy | None = None,
    in_flight: int = IN_FLIGHT,
) -> dict[str, float]:
    """The mean loss and the mean of each metric over all samples of `loader`, the same on every worker.

    Args:
        model: left in the mode that it is in.
        loader: deals out the data set; its epoch 0 is used.
        loss_fn: see `lockstep.training.losses.LossFn`.
        metrics: name → `Metric`; accuracy when None and the loss is one of classification.
        precision: of the forward passes; float32 when None.
        forward: see `lockstep.training.losses.Forward`.
        strategy: that of the training; None for a whole model on every worker.
        in_flight: so many batches may be queued on an accelerator.

    Returns:
        {"loss": …, and each metric's name: …}

    Raises:
        ConfigError: for a metric named "loss" or one that cannot be called, outputs that do not fit the labels, or a
            loss or metric that returns what is no mean over samples.
        DataError: when the loss or a metric counts nothing in the whole data set.
    """
    metrics = default_metrics(loss_fn) if metrics is None else metrics
    measures = Measures(model, loss_fn, metrics, loader.comm.device, forward)
    return measures.over(loader, precision, strategy, in_flight)


class Measures(Computation):
    """A loss and metrics of a model: (data, samples) → by row what each adds up to, and what that is a sum over.

    Args:
        model: see `evaluate`, as all others.
        loss_fn: in the first row.
        metrics: in the others.
        device: where the outputs are.
        forward: of the model.

    Raises:
        ConfigError: for a metric named "loss", or functions that cannot be called.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        metrics: Mapping[str, Metric],
        device: torch.device,
        forward: Forward | None = None,
    ) -> None:
        super().__init__(model)
        check_metrics(metrics)
        self._loss, self._forward = LossSum(loss_fn, device), forward or default_forward
        self._metrics = {name: SampleSum("metrics", metric, name) for name, metric in metrics.items()}

    @torch.no_grad()
    def over(
        self, loader: Loader, precision: Precision | None, strategy: Strategy | None, in_flight: int
    ) -> dict[str, float]:
        """What `evaluate` returns."""
        comm, device = loader.comm, loader.comm.device
        strategy, precision = strategy or Strategy(comm), precision or Precision("fp32", device)
        measured = strategy.spread(self)
        # by part of each batch; by row the loss and the metrics; what they add up to, and what that is a sum over
        totals = torch.zeros(loader.shards or 1, 1 + len(self._metrics), 2, device=device, dtype=_wide(device))
        pace, wrong = Pace(device, check_in_flight(in_flight)), None
        with evaluating(self.model):
            for part, data, size in _parts(loader):
                with precision.autocast():
                    if size:
                        totals[part] += measured(data, size)
                    elif strategy.in_step:
                        with taking_part_without_samples(self.model, data) as stand_in:
                            measured(stand_in, 1)
                wrong = wrong or self._check(precision)
                pace.keep()
        raise_together(wrong, comm)
        # A shard's rows are zero but on one worker, so that this sum is exact; the next one has one order on all.
        return _means(["loss", *self._metrics], comm.allreduce(totals).sum(0).tolist())

    def _check(self, precision: Precision) -> NotAMean | None:
        """What is wrong with the functions that are open, by the first part that they were called with."""
        found = [self._loss.parts.check(precision.autocast)]
        found += [metric.check(precision.autocast, gradients=False) for metric in self._metrics.values()]
        return next((each for each in found if each is not None), None)

    def on(self, model: nn.Module, data: Any, size: int) -> torch.Tensor:
        """See `Computation`."""
        output, target = self._forward(model, data)
        rows: list[tuple[Any, Any]] = [self._loss(output, target, size)]
        rows += [metric(output, target, size) for metric in self._metrics.values()]
        first = rows[0][0]
        device = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
        totals = torch.zeros(len(rows), 2, device=device, dtype=_wide(device))
        for row, (value, count) in zip(totals, rows, strict=True):
            row[0] += value
            row[1] += count
        return totals


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _parts(loader: Loader) -> Iterator[tuple[int, Any, int]]:
    """(its number, its data, its samples) of each part of a batch that is this worker's."""
    for batch in loader.epoch(0):
        if not loader.shards:
            yield 0, batch.data, batch.size
            continue
        run = range(*bounds(loader.shards, loader.comm.size, loader.comm.rank))
        for shard, data in zip(run, batch.data, strict=True):
            low, high = bounds(batch.global_size, loader.shards, shard)
            yield shard, data, high - low


def _means(names: list[str], totals: list[list[float]]) -> dict[str, float]:
    for name, (_, count) in zip(names, totals, strict=True):
        if not count:
            raise DataError(f"evaluation: expected data with something that {name} counts, got none")
    return {name: value / count for name, (value, count) in zip(names, totals, strict=True)}
