"""Synchronised batch normalisation: statistics of the global batch, on every kind of device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator
from ..errors import ConfigError
from . import tree_sum
from .nested import map_tensors


class Exchange(Protocol):
    """Collectives over the parts of a batch that are normalised together."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the 1-d tensors of all parts as the rows of a table."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the `values` of all parts."""

    def is_first(self) -> bool:
        """Return whether the part that is normalised now is the first of this worker's, which
        updates the layer.
        """


class SumOverWorkers(Protocol):
    """What `WorkerExchange` needs of a communicator."""

    @property
    def rank(self) -> int:
        """The number of this worker."""

    @property
    def size(self) -> int:
        """The number of workers."""

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the workers, in place or not, and return the sum."""


class WorkerExchange:
    """Collectives over workers, each of which has one part.

    Args:
        comm: sums over the workers.

    Attributes:
        weight: returns the factor that this worker's gradients are multiplied by after the backward
            pass, up to one that all workers have alike. It is not 1 where each worker's loss is a
            mean over its own part, and parts are of different sizes.
    """

    weight: Callable[[], float]

    def __init__(self, comm: SumOverWorkers) -> None:
        self._comm = comm
        self.weight = lambda: 1.0

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers in the order of their ranks: (n,) → (workers, n)."""
        # An all-reduce in which each row is one worker's and zero on the others is an exact
        # all-gather.
        table = row.new_zeros(self._comm.size, row.numel())
        table[self._comm.rank] = row
        return self._comm.allreduce(table)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of all workers, of their shape: gradients, in the scale of
        this worker's.
        """
        weight = self.weight()
        if weight == 1:
            return self._comm.allreduce(values)
        total = self._comm.allreduce(values * weight)
        return total / weight if weight else total

    def is_first(self) -> bool:
        """Return True: each worker has a layer of its own, and updates its running statistics."""
        return True


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all workers: any (n, c, …) → the same shape.

    In training, mean and variance are those of all workers' samples, so the output does not depend
    on the partition of the batch; in evaluation it is ordinary batch norm. Every worker must run it
    equally often; a part may be empty. The variances of parts are combined as in Chan, Golub,
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

    Attributes:
        exchange: collectives over the workers, which copies of the layer share; while the joint
            passes of a step's shards run, over these.
        absent: whether this worker has no samples; its input is a placeholder that gives later
            layers their shapes.
    """

    exchange: Exchange
    absent = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.exchange)] = self.exchange  # a process group cannot be copied
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                "SyncBatchNorm: expected an input of at least 2 dimensions, got shape "
                f"{list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`, (n, c, …)."""
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                not self.track_running_stats,
                0,
                self.eps,
            )
        present = input[:0] if self.absent else input
        output: torch.Tensor
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            present, self.weight, self.bias, self.eps, self.exchange
        )
        if self.exchange.is_first():
            self._update_statistics(mean, variance, count)
        if self.absent:
            # A placeholder output for later layers; its graph contains the empty output only.
            scale = (variance + self.eps).rsqrt()
            normal = (_wide(input.detach()) - _per_channel(mean, input)) * _per_channel(
                scale, input
            )
            return normal.to(input.dtype) + output.sum()
        return output

    def _update_statistics(
        self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
    ) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            rate = (
                self.momentum
                if self.momentum is not None
                else 1.0 / float(self.num_batches_tracked)
            )
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, exchange: Exchange
    ) -> Any:
        axes = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1] if x.shape[1] else 0
        wide = _wide(x)
        local_mean = wide.mean(axes) if count else wide.new_zeros(x.shape[1])
        local_squares = (wide - _per_channel(local_mean, x)).square().sum(axes)
        # a row for each part: its count, means and sums of squared deviations
        local = torch.cat([local_mean.new_full((1,), count), local_mean, local_squares])
        sizes = [1, x.shape[1], x.shape[1]]
        counts, means, squares = torch.split(exchange.gather(local), sizes, dim=1)
        total = counts.sum()
        # Reading the total makes the host wait for a GPU; if it is 1, no part has more than one
        # value.
        if count <= 1 and total <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list(x.shape)}"
            )
        mean = tree_sum.total(counts * means, torch.add) / total
        variance = tree_sum.total(squares + counts * (means - mean).square(), torch.add) / total
        scale = (variance + eps).rsqrt()
        normal = (wide - _per_channel(mean, x)) * _per_channel(scale, x)
        ctx.exchange = exchange
        ctx.axes = axes
        ctx.has_bias = bias is not None
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        output = normal if weight is None else normal * _per_channel(_wide(weight), x)
        if bias is not None:
            output = output + _per_channel(_wide(bias), x)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        normal, weight, scale, total = ctx.saved_tensors
        wide = _wide(grad_output)
        grad_bias = wide.sum(ctx.axes)
        grad_weight = (wide * normal).sum(ctx.axes)
        sums = ctx.exchange.sum(torch.stack((grad_bias, grad_weight)))
        centred = (
            wide
            - _per_channel(sums[0] / total, wide)
            - normal * _per_channel(sums[1] / total, wide)
        )
        factor = scale if weight is None else scale * _wide(weight)
        grad_input = (centred * _per_channel(factor, wide)).to(grad_output.dtype)
        if weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
            grad_bias = grad_bias.to(weight.dtype)
        return (
            grad_input,
            None if weight is None else grad_weight,
            grad_bias if ctx.has_bias else None,
            None,
            None,
        )


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View `values`, one for each channel, so that they broadcast over `like`, (n, c, …)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


@contextmanager
def placeholder_batch(model: nn.Module, data: Any) -> Iterator[Any]:
    """Provide data for the pass of a worker without samples, whose layers take part in collectives
    all the same.

    Args:
        model: the model; its `SyncBatchNorm` layers count no samples meanwhile.
        data: tensors of 0 samples.

    Yields:
        One sample of zeros, because many models fail without samples: ``x.view(x.size(0), -1)`` is
        ambiguous then. If a layer is torch's `nn.SyncBatchNorm`, which would count that sample,
        `data` is yielded unchanged.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    has_torch_layers = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
    for layer in layers:
        layer.absent = True
    try:
        yield data if has_torch_layers else map_tensors(_one_zero_sample, data)
    finally:
        for layer in layers:
            layer.absent = False


def _one_zero_sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(1, *tensor.shape[1:]) if tensor.dim() else tensor


def convert(model: nn.Module, comm: Communicator) -> nn.Module:
    """Replace the batch-norm layers of `model` by `SyncBatchNorm`, in place, with the same
    parameters and buffers.

    Returns the model, or its replacement if it is a batch-norm layer itself. On a single worker it
    only marks the layers for `convert_marked`, except in an elastic job, in which others may join.
    """
    if comm.size == 1 and not isinstance(comm, ElasticCommunicator):
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                layer.synchronised = True  # type: ignore[assignment]
        return model
    if isinstance(model, _BatchNorm) and not isinstance(model, (SyncBatchNorm, nn.SyncBatchNorm)):
        return _replace(model, comm)
    for name, child in model.named_children():
        setattr(model, name, convert(child, comm))
    return model


def convert_marked(model: nn.Module, comm: Communicator) -> list[SyncBatchNorm]:
    """Replace the layers that `convert` has marked on a single worker, and return all
    `SyncBatchNorm` layers.

    Raises:
        ConfigError: if the model itself is a marked layer, which cannot be replaced in place.
    """
    if getattr(model, "synchronised", False) and not isinstance(model, SyncBatchNorm):
        raise ConfigError("model", "a module that has batch norm in it", found=type(model).__name__)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if getattr(child, "synchronised", False) and not isinstance(child, SyncBatchNorm):
                setattr(parent, name, _replace(child, comm))  # type: ignore[arg-type]
    return [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]


def _replace(layer: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
    new = SyncBatchNorm(layer.num_features, layer.eps, layer.momentum, False, False)
    new.affine = layer.affine
    new.track_running_stats = layer.track_running_stats
    new.training = layer.training
    # The same Parameter objects, because the optimizer refers to them.
    new._parameters = layer._parameters
    new._buffers = layer._buffers
    new.exchange = WorkerExchange(comm)
    return new
