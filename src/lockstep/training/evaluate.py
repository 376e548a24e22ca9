"""Evaluation of a model on a data set; every sample counts once over all workers."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from .. import arguments
from ..communicator import Communicator, init
from ..data.loader import Batch, Loader
from ..errors import ConfigError, DataError, counted
from ..flight_recorder import in_method, named
from ..parallel.nested import map_tensors, narrow, tensors_of
from ..parallel.strategy import Strategy, accumulation_dtype
from ..parallel.sync_batchnorm import placeholder_batch
from .batch_parts import parts_of
from .check_schedule import is_due
from .divided_batches import FirstBatch
from .formats import IN_FLIGHT
from .in_flight import InFlightLimit, check_in_flight
from .loaders import loader_of
from .losses.loss import Computation, Forward, Loss, LossFn
from .losses.mean_check import MeanCheck, Problem, raise_problem
from .losses.own_loss import IGNORED
from .losses.torch_losses import classification_loss
from .modes import evaluating
from .recovery import repeated
from .replica_check import compare_weights
from .step.out_of_memory import explaining_out_of_memory
from .step.precision import Precision, full_precision

_log = logging.getLogger(__name__)

Metric = Callable[[Any, Any], Any] | Any
"""A metric: (output, target) of n samples → the mean over the samples (a 0-dim floating tensor or a
float), or one value for each sample (shape (n,)), or (sum, count) if the mean is over something
else, such as labels or pixels: the rule for losses. Means are compared by halves again and again,
see `lockstep.training.losses.mean_check`. What no sum over samples gives, such as AUC, is a
`whole_set` metric, or an object of torchmetrics.
"""


class WholeSet:
    """A metric of a whole data set, which no sum over samples gives, such as AUC or F1, see
    `whole_set`.

    Args:
        fn: (outputs, targets) of all samples → a number; also an attribute.
    """

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.fn = fn
        self._outputs: list[Any] = []
        self._targets: list[Any] = []

    def reset(self) -> None:
        """Forget all samples."""
        self._outputs = []
        self._targets = []

    def update(self, output: Any, target: Any) -> None:
        """Add samples."""
        self._outputs.append(output)
        self._targets.append(target)

    def compute(self) -> float:
        """Return the metric of all samples."""
        return float(self.fn(_concatenate(self._outputs), _concatenate(self._targets)))


def whole_set(fn: Callable[[Any, Any], Any]) -> WholeSet:
    """Return a metric that calls `fn` once, with the outputs and the targets of all samples of the
    data set.

    They are gathered from all workers in the order of the data set, on the CPU of every worker, so
    the result does not depend on the number of workers:

        def auc(output, target):
            return roc_auc_score(target, output[:, 1])

        metrics={"auc": lockstep.whole_set(auc)}

    Where a `collate_fn` pads its samples to the longest of their batch, the number of workers
    decides what is padded with what. Shorter outputs and targets are padded to the longest of the
    whole set: floating numbers with NaN, whole numbers with -100. Leave padding out in `fn`, e.g.
    by ``target != -100``.

    Objects with `reset`, `update` and `compute`, such as those of torchmetrics, are metrics too,
    and get the gathered outputs and targets of one global batch after the other.

    Args:
        fn: (outputs, targets) of all samples → a number: a tensor without dimensions, or a
            float.

    Examples:
        >>> import torch, lockstep
        >>> def worst(output, target):
        ...     return torch.nn.functional.cross_entropy(output, target, reduction="none").max()
        >>> _, test = lockstep.data.digits()
        >>> loader = torch.utils.data.DataLoader(test, batch_size=64)
        >>> metrics = {"worst": lockstep.whole_set(worst)}
        >>> results = lockstep.evaluate(
        ...     lockstep.models.mlp(), loader, torch.nn.CrossEntropyLoss(), metrics
        ... )
        >>> results["worst"] >= results["loss"]
        True
    """
    return WholeSet(fn)


def _is_accuracy(metric: Any) -> bool:
    return metric is accuracy or (isinstance(metric, partial) and metric.func is accuracy)


def _is_stateful(metric: Any) -> bool:
    """Return whether a metric has a state that is updated batch by batch, as those of
    torchmetrics.
    """
    return all(callable(getattr(metric, name, None)) for name in ("reset", "update", "compute"))


def _concatenate(parts: list[Any]) -> Any:
    """Concatenate tensors along the first dimension, in nested structures of one form; see
    `_join`.
    """
    tensors = [tensors_of(part) for part in parts]
    columns = iter(
        [_join(column) if column[0].dim() else column[0] for column in zip(*tensors, strict=True)]
    )
    return map_tensors(lambda _: next(columns), parts[0])


def _gather(tree: Any, comm: Communicator) -> Any:
    """Concatenate the tensors of all workers in rank order, on the CPU of every worker; each has
    the same form.
    """
    return map_tensors(
        lambda tensor: _join(comm.allgather(tensor.detach().contiguous())).cpu(), tree
    )


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dimension; shorter ones are padded in the other
    dimensions.

    A `collate_fn` that pads its samples to the longest one gives parts of other lengths to each
    batch and each worker.

    Raises:
        ConfigError: for other numbers of dimensions.
    """
    dims = {part.dim() for part in parts}
    if len(dims) > 1:
        raise ConfigError(
            "model",
            "outputs and targets with the same number of dimensions in each part of a batch",
            found=" and ".join(str(list(part.shape)) for part in parts[:2]),
        )
    inner = {part.shape[1:] for part in parts if len(part)} or {parts[0].shape[1:]}
    longest = [max(sizes) for sizes in zip(*inner, strict=True)]
    return torch.cat([_padded(part, longest) for part in parts])


def _padded(part: torch.Tensor, longest: list[int]) -> torch.Tensor:
    """Return `part` with these sizes in all dimensions but the first."""
    if list(part.shape[1:]) == longest:
        return part
    if not len(part):  # of a worker without samples
        return part.new_empty(0, *longest)
    missing = [
        (0, size - size_of_part) for size, size_of_part in zip(longest, part.shape[1:], strict=True)
    ]
    return torch.nn.functional.pad(
        part, [length for pair in reversed(missing) for length in pair], value=_fill_of(part)
    )


def _fill_of(part: torch.Tensor) -> float:
    """Return a number for missing elements that no valid element has."""
    if part.is_floating_point() or part.is_complex():
        return math.nan
    return 0 if part.dtype in (torch.bool, torch.uint8) else IGNORED


def accuracy(
    output: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Count the labels that are the class of the largest output.

    Args:
        output: shape (n, classes, …).
        target: labels of shape (n, …), or probabilities of the shape of `output`, the largest of
            which is the label.
        ignore_index: labels of this value do not count.

    Returns:
        (correct labels, all labels), two 0-dim tensors.

    Raises:
        ConfigError: for other shapes.
    """
    soft = target.is_floating_point()
    fitting = output.shape if soft else (*output.shape[:1], *output.shape[2:])
    if output.dim() < 2 or target.shape != fitting:
        shapes = f"output {list(output.shape)} and target {list(target.shape)}"
        raise ConfigError(
            "metrics",
            "outputs (samples, classes, …) for the labels (samples, …) of accuracy",
            found=shapes,
        )
    labels = target.argmax(dim=1) if soft else target
    kept = labels != ignore_index
    return ((output.argmax(dim=1) == labels) & kept).sum(), kept.sum()


def default_metrics(loss_fn: LossFn) -> dict[str, Metric]:
    """Return accuracy for a loss of classification, over the labels that the loss counts; otherwise
    no metrics.
    """
    loss = classification_loss(loss_fn)
    return {} if loss is None else {"accuracy": partial(accuracy, ignore_index=loss.ignore_index)}


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Check that every metric can be called with an output and a target, and that none has the name
    "loss".

    Raises:
        ConfigError: naming the first invalid metric.
    """
    expected = "a mapping of names to functions (output, target) -> value"
    arguments.instance("metrics", metrics, Mapping, expected)
    if "loss" in metrics:
        raise ConfigError("metrics", "names other than that of the loss itself", found="'loss'")
    for name, metric in metrics.items():
        called: Any = metric
        if _is_stateful(metric) and not isinstance(metric, type):
            called = metric.fn if isinstance(metric, WholeSet) else called.update
        expected = f"a function (output, target) -> value as {name!r}"
        arguments.function("metrics", called, expected, takes=2, of_class=False)


def predict(
    model: nn.Module,
    loader: Loader | DataLoader[Any],
    *,
    precision: Precision | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Any:
    """Return the outputs of `model` for all samples of `loader`, in their order, the same on every
    worker.

    Args:
        model: the model; its mode (training or evaluation) is restored.
        loader: the loader of the data set, with ``shuffle=False``; its epoch 0 is used. If its
            items are pairs, the first elements are the inputs.
        precision: the precision of the forward passes; float32 when None.
        forward: (model, data) → output; that of the inputs when None.

    Returns:
        The outputs on the CPU, concatenated along the first dimension: a tensor, or a tuple, list
        or dict of tensors as the model returns them. Outputs of other sizes in other dimensions are
        padded, see `whole_set`.

    Raises:
        ConfigError: for a loader that shuffles.
        MismatchError: if the workers have other weights.

    Examples:
        >>> import lockstep
        >>> _, test = lockstep.data.digits()
        >>> with lockstep.Loader(test, global_batch_size=64, shuffle=False) as loader:
        ...     outputs = lockstep.predict(lockstep.models.mlp(), loader)
        >>> outputs.shape  # 360 images, 10 classes
        torch.Size([360, 10])
    """
    _check_arguments(model, precision)
    if forward is not None:
        arguments.function("forward", forward, "a function (model, data) -> output", takes=2)
    with in_method("lockstep.predict"), _opened(loader) as opened:
        compare_weights(opened.comm, model)
        return Prediction(model, forward or _output_of).run(opened, precision)


def evaluate(
    model: nn.Module,
    loader: Loader | DataLoader[Any],
    loss_fn: LossFn = None,
    metrics: Mapping[str, Metric] | None = None,
    *,
    precision: Precision | None = None,
    forward: Forward | None = None,
    strategy: Strategy | None = None,
    max_steps_in_flight: int = IN_FLIGHT,
) -> dict[str, float]:
    """Return the mean loss and the mean of each metric over all samples of `loader`, the same on
    every worker.

    Args:
        model: the model; its mode (training or evaluation) is restored.
        loader: the loader of the data set; its epoch 0 is used. Of a `DataLoader` of torch, the
            batch size is the global batch size.
        loss_fn: (output, target) → the mean over the samples, one value for each, or (sum, count),
            see `lockstep.training.losses.loss.LossFn`. When None, the model computes its loss
            itself.
        metrics: name → function (output, target), see `lockstep.training.evaluate.Metric`; when
            None, accuracy for a loss of classification.
        precision: the precision of the forward passes; float32 when None.
        forward: (model, data) → (output, target), for data that is no pair, see
            `lockstep.training.losses.loss.Forward`.
        strategy: the strategy of the training; None for the whole model on every worker.
        max_steps_in_flight: number of batches that may be queued on an accelerator.

    Returns:
        {"loss": …, and each metric's name: …}

    Raises:
        ConfigError: for a metric named "loss" or one that is not callable, outputs that do not fit
            the labels, or a loss or metric that is not a mean over samples.
        DataError: if the loss or a metric counts nothing in the whole data set.
        MismatchError: if the workers have other weights.

    Examples:
        >>> import torch, lockstep
        >>> _, test = lockstep.data.digits()
        >>> model = lockstep.models.mlp()
        >>> loader = torch.utils.data.DataLoader(test, batch_size=64)
        >>> results = lockstep.evaluate(model, loader, torch.nn.CrossEntropyLoss())
        >>> sorted(results)
        ['accuracy', 'loss']
    """
    _check_arguments(model, precision)
    if forward is not None:
        arguments.function(
            "forward", forward, "a function (model, data) -> (output, target)", takes=2
        )
    if strategy is not None:
        expected = "the strategy of a TrainStep or Trainer: trainer.step.strategy"
        arguments.instance("strategy", strategy, Strategy, expected)
    chosen = default_metrics(loss_fn) if metrics is None else metrics

    def measure() -> dict[str, float]:
        with in_method("lockstep.evaluate"), _opened(loader) as opened:
            if strategy is None or not strategy.sharded_state:
                compare_weights(opened.comm, model)
            measures = Evaluation(model, loss_fn, chosen, opened.comm.device, forward)
            return measures.run(opened, precision, strategy, max_steps_in_flight)

    return repeated(measure)


def _check_arguments(model: Any, precision: Any) -> None:
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    if precision is not None:
        expected = "a Precision, such as trainer.step.precision"
        hint = (
            "lockstep.training.step.precision.Precision(name, device) makes one."
            if isinstance(precision, str)
            else ""
        )
        arguments.instance("precision", precision, Precision, expected, hint)


@contextmanager
def _opened(loader: Loader | DataLoader[Any]) -> Iterator[Loader]:
    prepared = getattr(loader, "loader", None)  # of `prepare`
    loader = prepared if isinstance(prepared, Loader) else loader
    if isinstance(loader, Loader):
        yield loader
        return
    if not isinstance(loader, DataLoader):
        kind = (
            "a data set" if isinstance(loader, Dataset) else f"one of type {type(loader).__name__}"
        )
        hint = (
            "lockstep.Loader(dataset, global_batch_size=256, shuffle=False) makes one of a data "
            "set."
        )
        raise ConfigError("loader", "a lockstep.Loader, or a DataLoader", found=kind, hint=hint)
    opened = loader_of(loader, init())
    try:
        yield opened
    finally:
        opened.close()


def _output_of(model: nn.Module, data: Any) -> Any:
    return model(data[0] if isinstance(data, (tuple, list)) else data)


_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models whose first pass was watched: they may be evaluated often, and it takes a copy of the
model.
"""


def _first_batch(model: nn.Module, loader: Loader, batch: Batch) -> FirstBatch | None:
    """Return what watches a model's first pass over a part of a batch, if batches are divided among
    workers.
    """
    if loader.virtual_workers is not None or loader.comm.size == 1 or model in _WATCHED:
        return None
    _WATCHED.add(model)
    return FirstBatch(model, loader.comm, batch.global_size, trains=False)


class Prediction(Computation):
    """The outputs of a model: (data, samples) → output.

    Args:
        model: see `predict`, as for the other arguments.
        forward: see `predict`.
    """

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__(model)
        self._forward = forward

    @torch.no_grad()
    def run(self, loader: Loader, precision: Precision | None) -> Any:
        """Return the outputs, see `predict`."""
        if loader.shuffle:
            expected = "one with shuffle=False, in the order of the data set"
            raise ConfigError("loader", expected, found="one that shuffles")
        comm = loader.comm
        precision = precision or Precision("fp32", loader.comm.device)
        outputs: list[Any] = []
        with evaluating(self.model):
            for batch in loader.epoch(0):
                parts = [(data, size) for _, data, size in parts_of(batch, comm) if size]
                results: list[Any] = []
                for data, size in parts or [(loader.stand_in(), 0)]:
                    first = _first_batch(self.model, loader, batch)
                    with precision.autocast():
                        output = map_tensors(full_precision, self(data, size))
                    if first is not None:
                        first.tell()
                    results.append(output if size else narrow(output, 0, 0))
                outputs.append(_gather(_concatenate(results), comm))
        return _concatenate(outputs)

    @override
    def on(self, model: nn.Module, data: Any, size: int) -> Any:
        return self._forward(model, data)


class Evaluation(Computation):
    """A loss and metrics of a model: (data, samples) → a table with a row (sum, count) for the loss
    and each metric.

    Args:
        model: see `evaluate`, as for the other arguments.
        loss_fn: the loss, in the first row.
        metrics: the metrics, in the other rows.
        device: the device of the outputs.
        forward: see `evaluate`.

    Raises:
        ConfigError: for a metric named "loss", or functions that are not callable.
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
        self._loss = Loss(loss_fn, device, forward, model)
        self._stateful: dict[str, Any] = {
            name: metric for name, metric in metrics.items() if _is_stateful(metric)
        }
        of_samples = {
            name: metric for name, metric in metrics.items() if name not in self._stateful
        }
        self._metrics = {
            name: MeanCheck("metrics", metric, name, compares=not _is_accuracy(metric))
            for name, metric in of_samples.items()
        }
        self._warned_of: list[str] = []
        self._names = list(metrics)
        self._kept = cast(list[tuple[Any, Any]], [])

    @property
    def names(self) -> list[str]:
        """The names of the results; those of `may_be_several` may have several others instead."""
        return ["loss", *self._names]

    @property
    def may_be_several(self) -> list[str]:
        """The names of metrics that may give several results, NAME_KEY."""
        return [name for name, metric in self._stateful.items() if not isinstance(metric, WholeSet)]

    @torch.no_grad()
    def run(
        self,
        loader: Loader,
        precision: Precision | None,
        strategy: Strategy | None,
        max_steps_in_flight: int,
    ) -> dict[str, float]:
        """Run the evaluation and return its results, see `evaluate`."""
        comm = loader.comm
        device = loader.comm.device
        strategy = strategy or Strategy(comm)
        precision = precision or Precision("fp32", device)
        self._reset_stateful(strategy)
        wrapped = strategy.wrap_evaluation(self)
        # (shard, loss or metric, sum or count)
        shape = (loader.virtual_workers or 1, 1 + len(self._metrics), 2)
        totals = torch.zeros(shape, device=device, dtype=accumulation_dtype(device))
        limit = InFlightLimit(device, check_in_flight(max_steps_in_flight))
        self._loss.problem = problem = None
        purpose = f"an evaluation in batches of {counted(loader.global_batch_size, 'sample')}"
        advice = "Evaluate with a Loader with a smaller global_batch_size, or with more workers."
        with (
            evaluating(self.model, self._loss.modules),
            explaining_out_of_memory(comm, purpose, lambda: advice),
        ):
            for number, batch in enumerate(loader.epoch(0)):
                self._expect(number, is_last=number + 1 == loader.steps)
                for shard, data, size in parts_of(batch, comm):
                    with precision.autocast():
                        if size:
                            first = _first_batch(self.model, loader, batch)
                            totals[shard if loader.virtual_workers else 0] += wrapped(data, size)
                            if first is not None:
                                first.tell()
                        elif strategy.collective_forward:
                            with placeholder_batch(self.model, data) as placeholder:
                                wrapped(placeholder, 1)
                                self._kept.clear()
                    limit.record()
                problem = problem or self._check(precision, strategy)
                if self._stateful:
                    self._update_stateful(loader, precision)
        if problem is not None:  # told to all workers by their sums: a count that is infinite
            totals[0, 0, 1] = math.inf
        # A shard's rows are nonzero on one worker only, so the all-reduce is exact; the sum over
        # shards has one order.
        with named("sums of loss and metrics"):
            sums = comm.allreduce(totals).sum(0)
        if not sums[0, 1].isfinite():
            with named("check of loss and metrics"):
                raise_problem(problem, comm)
        if comm.size > 1 and comm.rank == 0:
            self._warn_of_changes()
        results = _means(["loss", *self._metrics], sums.tolist())
        return self._with_stateful(results)

    def _warn_of_changes(self) -> None:
        """Say once what metrics keep outside of themselves, of which each worker has only its
        part.
        """
        for name, metric in self._metrics.items():
            if metric.changes_outside and name not in self._warned_of:
                self._warned_of.append(name)
                _log.warning(
                    "metrics: %r changes %s, outside of itself. Each worker's is of its part of "
                    "the samples only. For all samples: lockstep.whole_set(fn), or an object with "
                    "reset, update and compute.",
                    name,
                    " and ".join(metric.changes_outside),
                )

    def _reset_stateful(self, strategy: Strategy) -> None:
        if self._stateful and len(strategy.devices) > 1:
            expected = (
                "functions of samples with the strategy replicas, whose outputs are on several "
                "devices"
            )
            raise ConfigError(
                "metrics", expected, found=f"{next(iter(self._stateful))!r}, a metric with a state"
            )
        self._kept.clear()
        for metric in self._stateful.values():
            metric.reset()
            parts: Iterable[Any] = metric.modules() if isinstance(metric, nn.Module) else ()
            for part in parts:
                # of torchmetrics: all workers have all samples already
                if hasattr(part, "distributed_available_fn"):
                    part.distributed_available_fn = lambda: False

    def _update_stateful(self, loader: Loader, precision: Precision) -> None:
        """Update the metrics with a state, on every worker with the outputs and targets of all
        workers for a batch.
        """
        kept = self._kept
        self._kept = []
        if not kept:  # of a worker without samples, for the form of the outputs
            with precision.autocast():
                kept = [narrow(self._loss.forward(self.model, loader.stand_in()), 0, 0)]
        outputs, targets = (
            _gather(
                _concatenate([map_tensors(full_precision, pair[at]) for pair in kept]), loader.comm
            )
            for at in (0, 1)
        )
        for metric in self._stateful.values():
            metric.update(outputs, targets)

    def _with_stateful(self, results: dict[str, float]) -> dict[str, float]:
        """Return `results` with those of the metrics with a state, in the order in which the
        metrics were given.
        """
        for name, metric in self._stateful.items():
            value = metric.compute()
            several = value.items() if isinstance(value, Mapping) else ()
            results |= (
                {f"{name}_{key}": float(number) for key, number in several}
                if several
                else {name: float(value)}
            )
        names = [
            key
            for name in ("loss", *self._names)
            for key in results
            if key == name or key.startswith(f"{name}_")
        ]
        return {name: results[name] for name in dict.fromkeys(names)}

    def _expect(self, number: int, is_last: bool) -> None:
        """Begin a batch, whose loss and metrics may be due to be checked; those of the last one,
        often short, are.
        """
        due = is_last or is_due(number)
        self._loss.expect(number, due)
        for metric in self._metrics.values():
            metric.expect(number, due)

    def _check(self, precision: Precision, strategy: Strategy) -> Problem | None:
        """Check loss and metrics with a batch; returns the first that is not a mean over
        samples.
        """
        problem = self._loss.check(
            precision.autocast, compares_model=not strategy.collective_forward
        )
        for metric in self._metrics.values():
            problem = problem or metric.check(precision.autocast, gradients=False)
        return problem

    @override
    def on(self, model: nn.Module, data: Any, size: int) -> torch.Tensor:
        output, target = self._loss.forward(model, data, size)
        if self._stateful:
            self._kept.append((output, target))
        rows: list[tuple[Any, Any]] = [self._loss(output, target, size)]
        rows += [metric(output, target, size) for metric in self._metrics.values()]
        first = rows[0][0]
        device = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
        totals = torch.zeros(len(rows), 2, device=device, dtype=accumulation_dtype(device))
        for row, (value, count) in zip(totals, rows, strict=True):
            row[0] += value
            row[1] += count
        sums, counts = totals.unbind(1)
        # The sum over nothing may be no number: the mean over nothing, times nothing.
        return torch.stack([sums.where(sums.isfinite() | (counts != 0), 0.0), counts], dim=1)


def _means(names: list[str], totals: list[list[float]]) -> dict[str, float]:
    for name, (_, count) in zip(names, totals, strict=True):
        if not count:
            raise DataError(
                f"evaluation: expected data with something that {name} counts, got none"
            )
    return {name: value / count for name, (value, count) in zip(names, totals, strict=True)}
