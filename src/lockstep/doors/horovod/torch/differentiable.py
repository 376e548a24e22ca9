"""Operations on several ranks as steps of a calculation whose gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Differentiable", "wants_gradient"]

Tensors = Sequence[torch.Tensor]
Step = Callable[[Tensors], Sequence[Any]]


def wants_gradient(tensors: Tensors) -> bool:
    """Whether autograd takes note of what is done with `tensors`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class Differentiable(torch.autograd.Function):
    """A function of tensors with a function of the gradients of its results, which all ranks call."""

    @staticmethod
    def of(forward: Step, back: Step, tensors: Tensors) -> list[Any]:
        """The results of ``forward(tensors)``, whose gradients ``back`` turns into those of `tensors`."""
        return list(Differentiable.apply(forward, back, *tensors))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, forward: Step, back: Step, *tensors: torch.Tensor) -> Any:
        """Run it."""
        ctx.back = back
        ctx.set_materialize_grads(True)
        return tuple(forward(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradients of `tensors`."""
        return None, None, *ctx.back([gradient.contiguous() for gradient in gradients])
