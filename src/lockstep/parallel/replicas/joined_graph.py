"""Collectives over the devices of one process, and an autograd function that joins the graphs of
several replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import _engine_run_backward

from ...errors import ConfigError
from ..shards import bounds
from .random_draws import NoDraws
from .replica_threads import Threads, replica_error
from .scatter import concatenate


def allreduce_(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor, one for each device, by the sum of all: the same bits everywhere, in the
    order of the list.

    Each device sums one part of the tensor and sends the result to the others: with k devices each
    sends and receives 2 (k - 1) / k of the size, while a single summing device would receive and
    send k - 1 times the size (reduce-scatter and all-gather: Patarasu and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009). Copies go directly from device to
    device; each sum is in the order of the list.

    Args:
        tensors: dense tensors of one shape and dtype that do not share memory.

    Raises:
        ConfigError: for other tensors.
    """
    _exchange(tensors, receivers=range(len(tensors)))


def reduce_(tensors: Sequence[torch.Tensor]) -> None:
    """Replace the first tensor by the sum of all, see `allreduce_`; the others are undefined
    afterwards.
    """
    _exchange(tensors, receivers=range(1))


def broadcast_(tensors: Sequence[torch.Tensor]) -> None:
    """Copy the first tensor into each of the others, on any devices.

    Args:
        tensors: tensors of one shape and dtype.

    Raises:
        ConfigError: for tensors of several shapes or dtypes.
    """
    _check(tensors)
    with torch.no_grad():
        for tensor in tensors[1:]:
            tensor.copy_(tensors[0], non_blocking=True)


def _exchange(tensors: Sequence[torch.Tensor], receivers: range) -> None:
    _check(tensors)
    addresses = [(tensor.device, tensor.data_ptr()) for tensor in tensors if tensor.numel()]
    if len(set(addresses)) < len(addresses):
        hint = "Two replicas on one device need separate tensors as well."
        raise ConfigError(
            "tensors", "tensors with separate memory", found="the same tensor twice", hint=hint
        )
    with torch.no_grad():
        # views where the memory is contiguous
        flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
        for part in range(len(flat)):
            _sum_part(flat, part, receivers)
        for number in receivers:
            if flat[number].data_ptr() != tensors[number].data_ptr():
                tensors[number].copy_(flat[number].view(tensors[number].shape))


def _sum_part(flat: Sequence[torch.Tensor], part: int, receivers: range) -> None:
    """Sum part `part` on the device of that number, in the order of the list, and copy it to the
    receivers.
    """
    start, stop = bounds(flat[0].numel(), len(flat), part)
    if start == stop:
        return
    device = flat[part].device
    total = flat[0][start:stop].to(device, non_blocking=True)
    # On its own device the first term is summed in place; on another one it is a copy.
    for tensor in flat[1:]:
        total.add_(tensor[start:stop].to(device, non_blocking=True))
    for number in receivers:
        if number or total.data_ptr() != flat[0][start:stop].data_ptr():
            flat[number][start:stop].copy_(total, non_blocking=True)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    if not isinstance(tensors, Sequence) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors
    ):
        raise ConfigError(
            "tensors", "a list with a tensor for each device", found=type(tensors).__name__
        )
    if not tensors:
        raise ConfigError("tensors", "a tensor for each device", found="none")
    kinds = {(tuple(tensor.shape), tensor.dtype, tensor.layout) for tensor in tensors}
    if len(kinds) > 1:
        got = ", ".join(
            f"{list(shape)} {dtype} {layout}" for shape, dtype, layout in sorted(kinds, key=str)
        )
        raise ConfigError("tensors", "one shape, dtype and layout on all devices", found=got)
    if tensors[0].layout != torch.strided:
        raise ConfigError(
            "tensors", "dense tensors", found=str(tensors[0].layout), hint="Use to_dense()."
        )


@dataclass
class Column:
    """One tensor of the output, as all replicas have returned it.

    Attributes:
        tensors: the tensor of each replica, with its graph.
        device: the device of the joined tensor.
        dim: the dimension to join along; None for the sum.
    """

    tensors: list[torch.Tensor]
    device: torch.device
    dim: int | None

    @property
    def requires_grad(self) -> bool:
        """Whether any of the tensors requires a gradient."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def joined(self) -> torch.Tensor:
        """Return the joined tensor."""
        parts = [tensor.to(self.device, non_blocking=True) for tensor in self.tensors]
        return (
            sum(parts[1:], parts[0])
            if self.dim is None
            else concatenate(parts, self.device, self.dim)
        )

    def gradients(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Split the gradient of the joined tensor into the gradients of the replicas' tensors, on
        their devices.
        """
        if self.dim is None:
            parts: Sequence[torch.Tensor] = [gradient] * len(self.tensors)
        elif all(tensor.dim() == 0 for tensor in self.tensors):
            parts = gradient.unbind()
        else:
            parts = gradient.split([tensor.shape[self.dim] for tensor in self.tensors], self.dim)  # type: ignore[no-untyped-call]
        return [part.to(tensor.device) for part, tensor in zip(parts, self.tensors, strict=True)]


@dataclass
class Inputs:
    """The inputs that require a gradient, and the parts of each on the replicas, detached from the
    inputs' graphs.

    Attributes:
        tensors: the inputs.
        parts: the parts of each input, one leaf on every replica.
        dim: the dimension that they were split along.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    parts: list[list[torch.Tensor]] = field(default_factory=list)
    dim: int = 0

    def gradients(self) -> list[torch.Tensor | None]:
        """Join the gradients of the parts into those of the inputs, and remove them from the
        parts.
        """
        return [
            self._gradient(tensor, parts)
            for tensor, parts in zip(self.tensors, self.parts, strict=True)
        ]

    def _gradient(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        gradients = _take_gradients(parts)
        if all(gradient is None for gradient in gradients):
            return None
        if tensor.dim() == 0:
            return _sum([gradient for gradient in gradients if gradient is not None], tensor.device)
        filled = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parts, gradients, strict=True)
        ]
        return concatenate(filled, tensor.device, self.dim)


OutputGradient = tuple[torch.Tensor, torch.Tensor]
"""(an output of a replica, its gradient)."""


@dataclass
class ForwardPass:
    """One forward pass of several replicas.

    Attributes:
        columns: the outputs.
        inputs: the inputs that require a gradient.
        parameters: the model's parameters.
        replicas: the parameters of each replica, in the same order.
        threads: a thread for each replica if all are on the CPU; otherwise autograd has a thread
            for each device.
        shapes: the shapes of each replica's inputs, for errors.
    """

    columns: list[Column]
    inputs: Inputs
    parameters: list[nn.Parameter]
    replicas: list[list[nn.Parameter]]
    threads: Threads | None
    shapes: list[str]

    def backward(
        self, gradients: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> list[torch.Tensor | None]:
        """Compute the gradients of the parameters and the inputs from those of the joined
        outputs.
        """
        roots = self._roots(gradients)
        try:
            self._run(roots, keep_graph)
            return [*self._parameter_gradients(), *self.inputs.gradients()]
        finally:
            _take_gradients([leaf for leaves in self.replicas for leaf in leaves])
            _take_gradients([leaf for leaves in self.inputs.parts for leaf in leaves])

    def _roots(self, gradients: Sequence[torch.Tensor | None]) -> list[list[OutputGradient]]:
        """Return the outputs of each replica that have a graph, with their gradients."""
        roots: list[list[OutputGradient]] = [[] for _ in self.replicas]
        for column, joined_gradient in zip(self.columns, gradients, strict=True):
            if joined_gradient is not None:
                pairs = zip(column.tensors, column.gradients(joined_gradient), strict=True)
                for of_replica, (tensor, gradient) in zip(roots, pairs, strict=True):
                    if tensor.requires_grad:
                        of_replica.append((tensor, gradient))
        return roots

    def _run(self, roots: Sequence[Sequence[OutputGradient]], keep_graph: bool) -> None:
        if self.threads is not None:
            self.threads.run(
                [
                    partial(self._run_one, number, pairs, keep_graph)
                    for number, pairs in enumerate(roots)
                ]
            )
        else:
            # One call from this thread, which may be autograd's own for one of the devices: it then
            # continues with that device's work itself. Calls from other threads would wait for it.
            _backward([pair for pairs in roots for pair in pairs], keep_graph)

    def _run_one(self, number: int, pairs: Sequence[OutputGradient], keep_graph: bool) -> None:
        try:
            _backward(pairs, keep_graph)
        except Exception as error:
            raise replica_error(
                error, number, len(self.replicas), pairs[0][0].device, self.shapes[number]
            ) from error

    def _parameter_gradients(self) -> list[torch.Tensor | None]:
        """Return each parameter's gradient, summed over the replicas in order; None if no replica
        used it.
        """
        summed: list[torch.Tensor | None] = []
        for parameter, *leaves in zip(self.parameters, *self.replicas, strict=True):
            gradients = [gradient for gradient in _take_gradients(leaves) if gradient is not None]
            summed.append(_sum(gradients, parameter.device) if gradients else None)
        return summed


def _backward(pairs: Sequence[OutputGradient], keep_graph: bool) -> None:
    if not pairs:
        return
    tensors, gradients = zip(*pairs, strict=True)
    with NoDraws():
        # torch.autograd.backward() would disable the mode for the functions called inside of it.
        _engine_run_backward(
            tensors, gradients, keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )


def _take_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of `leaves`, and set them to None."""
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def _sum(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum `gradients` in the order of the replicas, and return the sum on `device`; the first may
    be overwritten.
    """
    first = gradients[0]
    if (
        len(gradients) > 2
        and len({g.device for g in gradients}) > 1
        and all(not g.is_sparse for g in gradients)
    ):
        reduce_(gradients)
    else:
        for gradient in gradients[1:]:
            first.add_(gradient.to(first.device))
    return first.to(device)


class Join(torch.autograd.Function):
    """(forward pass, parameters, inputs) → the joined outputs; the backward pass runs those of all
    replicas.
    """

    @staticmethod
    def forward(
        ctx: Any, forward_pass: ForwardPass, *anchors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the joined outputs; `anchors` are the model's parameters and the inputs, which get
        the gradients.
        """
        ctx.forward_pass = forward_pass
        ctx.set_materialize_grads(False)
        # detach() gives a new tensor object for this function's graph; it is no view, so it can be
        # changed in place.
        joined = [column.joined().detach() for column in forward_pass.columns]
        columns = zip(joined, forward_pass.columns, strict=True)
        ctx.mark_non_differentiable(
            *(tensor for tensor, column in columns if not column.requires_grad)
        )
        return tuple(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the anchors: the sums over the replicas."""
        keep_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
        return None, *ctx.forward_pass.backward(gradients, keep_graph())
