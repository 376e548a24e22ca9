"""Batch normalisation with the statistics of the global batch, on every kind of device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import tree
from ..communicator import Communicator
from ..data.nested import map_tensors
from ..errors import ConfigError
from .meeting import Meeting

__all__ = ["SyncBatchNorm", "convert", "convert_noted", "taking_part_without_samples"]


class _Parts(Protocol):
    """The parts of a batch that are normalised together."""

    def table(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all parts, one below the other."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the `values` of all parts."""


class _Workers:
    """The parts of the workers."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def table(self, row: torch.Tensor) -> torch.Tensor:
        # A sum in which each row has one worker's numbers and zeros of the others is an all-gather with exact values.
        table = row.new_zeros(self._comm.size, row.numel())
        table[self._comm.rank] = row
        return self._comm.allreduce(table)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._comm.allreduce(values)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the parts of all workers together: any (n, c, …) → the same shape.

    Mean and variance in training are those of all workers' samples, so the output does not depend on how the batch is
    cut; in evaluation it is ordinary batch norm. Every worker must run it equally often; a part may be empty. The
    variances of parts are combined as in Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979.

    Attributes:
        comm: the workers, which copies of the layer share.
        absent: this worker has no samples: what comes in only keeps the shapes of the layers behind alive.
        meeting: of the shards of a step, while they are computed: then they take the place of the workers.
    """

    comm: Communicator
    absent = False
    meeting: Meeting | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.comm)] = self.comm  # a process group is no data
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: expected an input of at least 2 dimensions, got shape {list(input.shape)}"
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
        parts = self.meeting or _Workers(self.comm)
        output, mean, variance, count = _normalise(present, self.weight, self.bias, self.eps, parts)
        if self.meeting is None or self.meeting.is_first():
            self._update(mean, variance, count)
        if self.absent:
            # Something of the usual size for the layers behind, and in the graph nothing but the empty output.
            normal = (_wide(input.detach()) - _along(mean, input)) * _along((variance + self.eps).rsqrt(), input)
            return normal.to(input.dtype) + output.sum()
        return output

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, parts: _Parts) -> Any:
        axes = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1] if x.shape[1] else 0
        wide = _wide(x)
        own = wide.mean(axes) if count else wide.new_zeros(x.shape[1])
        spread = (wide - _along(own, x)).square().sum(axes)
        counts, means, spreads = _gather(count, own, spread, parts)
        total = counts.sum()
        # To look at the total would make a GPU wait; with a single sample in all, no part has more than one.
        if count <= 1 and total <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
        mean = tree.total(counts * means, torch.add) / total
        variance = tree.total(spreads + counts * (means - mean).square(), torch.add) / total
        scale = (variance + eps).rsqrt()
        normal = (wide - _along(mean, x)) * _along(scale, x)
        ctx.parts, ctx.axes, ctx.has_bias = parts, axes, bias is not None
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        output = normal if weight is None else normal * _along(_wide(weight), x)
        if bias is not None:
            output = output + _along(_wide(bias), x)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normal, weight, scale, total = ctx.saved_tensors
        wide = _wide(gradient)
        for_bias, for_weight = wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)
        sums = ctx.parts.sum(torch.stack((for_bias, for_weight)))
        centred = wide - _along(sums[0] / total, wide) - normal * _along(sums[1] / total, wide)
        factor = scale if weight is None else scale * _wide(weight)
        for_input = (centred * _along(factor, wide)).to(gradient.dtype)
        if weight is not None:
            for_weight, for_bias = for_weight.to(weight.dtype), for_bias.to(weight.dtype)
        return (
            for_input,
            None if weight is None else for_weight,
            for_bias if ctx.has_bias else None,
            None,
            None,
        )


def _normalise(x: torch.Tensor, weight: Any, bias: Any, eps: float, parts: _Parts) -> Any:
    return _Normalise.apply(x, weight, bias, eps, parts)  # type: ignore[no-untyped-call]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _along(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _gather(
    count: int, mean: torch.Tensor, spread: torch.Tensor, parts: _Parts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    channels = mean.numel()
    table = parts.table(torch.cat([mean.new_full((1,), count), mean, spread]))
    return table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]


@contextmanager
def taking_part_without_samples(model: nn.Module, data: Any) -> Iterator[Any]:
    """Gives data for a pass of a worker that has none itself, in which its layers still talk to those of the others.

    Args:
        model: whose `SyncBatchNorm` layers count no samples meanwhile.
        data: tensors of 0 samples.

    Yields:
        One sample of zeros, as many models cannot do with none: ``x.view(x.size(0), -1)`` is ambiguous then. `data` as
        it is where a layer is torch's own `nn.SyncBatchNorm`, which would count that sample.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    foreign = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
    for layer in layers:
        layer.absent = True
    try:
        yield data if foreign else map_tensors(_one_of_zeros, data)
    finally:
        for layer in layers:
            layer.absent = False


def _one_of_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(1, *tensor.shape[1:]) if tensor.dim() else tensor


def convert(model: nn.Module, comm: Communicator) -> nn.Module:
    """`model` with its batch-norm layers exchanged for `SyncBatchNorm`, in place; parameters and buffers are kept.

    The model itself is returned, or its replacement where it is a batch-norm layer. Alone nothing changes, but that
    `convert_noted` knows which layers were meant.
    """
    if comm.size == 1:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                layer.synchronised = True  # type: ignore[assignment]
        return model
    if isinstance(model, _BatchNorm) and not isinstance(model, (SyncBatchNorm, nn.SyncBatchNorm)):
        return _exchange(model, comm)
    for name, child in model.named_children():
        setattr(model, name, convert(child, comm))
    return model


def convert_noted(model: nn.Module, comm: Communicator) -> list[SyncBatchNorm]:
    """The model's `SyncBatchNorm` layers, once those that `convert` has noted on a single worker are some, too.

    Raises:
        ConfigError: when the model itself is such a layer, which nothing can be exchanged in.
    """
    if getattr(model, "synchronised", False) and not isinstance(model, SyncBatchNorm):
        raise ConfigError("model", "a module that has batch norm in it", found=type(model).__name__)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if getattr(child, "synchronised", False) and not isinstance(child, SyncBatchNorm):
                setattr(parent, name, _exchange(child, comm))  # type: ignore[arg-type]
    return [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]


def _exchange(layer: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
    new = SyncBatchNorm(layer.num_features, layer.eps, layer.momentum, False, False)
    new.affine, new.track_running_stats, new.training = (
        layer.affine,
        layer.track_running_stats,
        layer.training,
    )
    # The same Parameter objects: the optimizer holds them.
    new._parameters, new._buffers = layer._parameters, layer._buffers
    new.comm = comm
    return new
