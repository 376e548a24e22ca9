"""Makes one graph of the graphs of several replicas, whose backward pass runs on all of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import _engine_run_backward

from .draws import DrawsRefused
from .failure import describe
from .spread import concatenate
from .summing import reduce_
from .threads import Threads

__all__ = ["Column", "Inputs", "Join", "Plan"]


@dataclass
class Column:
    """What one place of the output holds on every replica.

    Attributes:
        tensors: one of each replica, with its graph.
        device: where the joined one is.
        dim: along which they are joined; None for their sum.
    """

    tensors: list[torch.Tensor]
    device: torch.device
    dim: int | None

    @property
    def wants_gradient(self) -> bool:
        """Whether a graph is behind any of them."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def joined(self) -> torch.Tensor:
        """All as one."""
        parts = [tensor.to(self.device, non_blocking=True) for tensor in self.tensors]
        return sum(parts[1:], parts[0]) if self.dim is None else concatenate(parts, self.device, self.dim)

    def gradients(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The part of the joined one's gradient that is each replica's, there."""
        if self.dim is None:
            parts: Sequence[torch.Tensor] = [gradient] * len(self.tensors)
        elif all(tensor.dim() == 0 for tensor in self.tensors):
            parts = gradient.unbind()
        else:
            parts = gradient.split([tensor.shape[self.dim] for tensor in self.tensors], self.dim)  # type: ignore[no-untyped-call]
        return [part.to(tensor.device) for part, tensor in zip(parts, self.tensors, strict=True)]


@dataclass
class Inputs:
    """The inputs that want a gradient, cut off from their graphs, with the parts that were made of each.

    Attributes:
        wholes: as they came.
        pieces: of each, a leaf on every replica.
        dim: along which they were cut.
    """

    wholes: list[torch.Tensor] = field(default_factory=list)
    pieces: list[list[torch.Tensor]] = field(default_factory=list)
    dim: int = 0

    def gradients(self) -> list[torch.Tensor | None]:
        """What has come to the parts, put together; they have none afterwards."""
        return [self._gradient(whole, pieces) for whole, pieces in zip(self.wholes, self.pieces, strict=True)]

    def _gradient(self, whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
        found = _take_gradients(pieces)
        if all(gradient is None for gradient in found):
            return None
        if whole.dim() == 0:
            return _sum([gradient for gradient in found if gradient is not None], whole.device)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(pieces, found, strict=True)]
        return concatenate(filled, whole.device, self.dim)


@dataclass
class Plan:
    """One forward pass of several replicas.

    Attributes:
        columns: what they returned.
        inputs: what wants a gradient of what they got.
        parameters: the model's.
        replicas: the parameters of each replica, in the same order.
        threads: one for each replica if all are on the CPU; elsewhere autograd has a thread for each device.
        given: the shapes of what each replica was given, for errors.
    """

    columns: list[Column]
    inputs: Inputs
    parameters: list[nn.Parameter]
    replicas: list[list[nn.Parameter]]
    threads: Threads | None
    given: list[str]

    def backward(self, gradients: Sequence[torch.Tensor | None], keep: bool) -> list[torch.Tensor | None]:
        """Gradients of the parameters and of the inputs, from those of the joined outputs."""
        roots = self._roots(gradients)
        try:
            self._run(roots, keep)
            return [*self._summed(), *self.inputs.gradients()]
        finally:
            _take_gradients([leaf for leaves in self.replicas for leaf in leaves])
            _take_gradients([leaf for leaves in self.inputs.pieces for leaf in leaves])

    def _roots(self, gradients: Sequence[torch.Tensor | None]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Of each replica the outputs that have a graph, with their gradients."""
        roots: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.replicas]
        for column, whole in zip(self.columns, gradients, strict=True):
            if whole is not None:
                pairs = zip(column.tensors, column.gradients(whole), strict=True)
                for own, (tensor, gradient) in zip(roots, pairs, strict=True):
                    if tensor.requires_grad:
                        own.append((tensor, gradient))
        return roots

    def _run(self, roots: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], keep: bool) -> None:
        if self.threads is not None:
            self.threads.run([partial(self._backward_of, number, pairs, keep) for number, pairs in enumerate(roots)])
        else:
            # One call from this thread, which may be autograd's own for one of the devices: it then goes on with that
            # device's work itself. Calls from other threads would wait for it.
            _backward([pair for pairs in roots for pair in pairs], keep)

    def _backward_of(self, number: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], keep: bool) -> None:
        try:
            _backward(pairs, keep)
        except Exception as error:
            raise describe(error, number, len(self.replicas), pairs[0][0].device, self.given[number]) from error

    def _summed(self) -> list[torch.Tensor | None]:
        """For each parameter the sum over the replicas, in their order; None where none of them used it."""
        summed: list[torch.Tensor | None] = []
        for parameter, *leaves in zip(self.parameters, *self.replicas, strict=True):
            found = [gradient for gradient in _take_gradients(leaves) if gradient is not None]
            summed.append(_sum(found, parameter.device) if found else None)
        return summed


def _backward(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], keep: bool) -> None:
    if not pairs:
        return
    tensors, gradients = zip(*pairs, strict=True)
    with DrawsRefused():
        # Not torch.autograd.backward(), which such a mode would see in place of what is called inside of it.
        _engine_run_backward(tensors, gradients, keep, False, (), allow_unreachable=True, accumulate_grad=True)


def _take_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def _sum(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """In the order of the replicas, to `device`; the first may be overwritten."""
    first = gradients[0]
    if len(gradients) > 2 and len({g.device for g in gradients}) > 1 and all(not g.is_sparse for g in gradients):
        reduce_(gradients)
    else:
        for gradient in gradients[1:]:
            first.add_(gradient.to(first.device))
    return first.to(device)


class Join(torch.autograd.Function):
    """(plan, the parameters, the inputs) → the joined outputs; its backward pass is that of every replica."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *anchors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`anchors` are the model's parameters and the inputs: what the gradients are of."""
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        joined = [column.joined() for column in plan.columns]
        # Another tensor object, which may come to this function's graph; no view, so that it can be changed in place.
        joined = [tensor.detach() for tensor in joined]
        without = [tensor for tensor, column in zip(joined, plan.columns, strict=True) if not column.wants_gradient]
        ctx.mark_non_differentiable(*without)
        return tuple(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The sums over the replicas."""
        keep: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
        return None, *ctx.plan.backward(gradients, keep())
