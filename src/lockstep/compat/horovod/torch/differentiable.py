"""Lets gradients flow through operations of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["differentiable"]

Tensors = Sequence[torch.Tensor]
Operation = Callable[[Tensors], list[torch.Tensor]]


def differentiable(forward: Operation, backward: Operation, tensors: Tensors) -> list[torch.Tensor]:
    """Return ``forward(tensors)``, and let gradients flow through it if autograd records operations
    on `tensors`.

    Args:
        forward: the operation.
        backward: computes the gradients of `tensors` from those of the results; all ranks call it.
        tensors: the inputs.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Function.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]
    return forward(tensors)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Operation, backward: Operation, *tensors: torch.Tensor) -> Any:
        ctx.backward_operation = backward
        ctx.set_materialize_grads(True)
        return tuple(forward(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (
            None,
            None,
            *ctx.backward_operation([gradient.contiguous() for gradient in gradients]),
        )
