"""Arrays with the names that MXNet's have: torch tensors with some methods more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .context import Context, as_contexts, context_of, cpu, tagged

__all__ = ["NDArray", "arange", "array", "dot", "ones", "random", "relu", "waitall", "zeros"]


class NDArray(torch.Tensor):
    """A tensor whose `backward` sums over its elements, with MXNet's names for some of torch's methods."""

    @property
    def context(self) -> Context:
        """Where it is."""
        return context_of(self)

    ctx = context

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; without a gradient of its own each element counts once."""
        if not args and not kwargs and self.dim():
            args = (torch.ones_like(self),)
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def as_in_context(self, context: Context) -> NDArray:
        """Itself if it is there, or a copy that is."""
        return self if context == self.context else self.copyto(context)

    def copyto(self, other: Context | torch.Tensor) -> NDArray:
        """A copy in another context, or in the memory of another array."""
        if isinstance(other, Context):
            copied = self.detach().to(other.device, copy=True).as_subclass(NDArray)
            return tagged(copied, other)  # type: ignore[return-value]
        with torch.no_grad():
            return other.copy_(self)  # type: ignore[return-value]

    def attach_grad(self) -> None:
        """Want a gradient, which is zero at first."""
        self.requires_grad_()
        self.grad = torch.zeros_like(self)

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Its values; waits for them."""
        found: np.ndarray[Any, Any] = self.detach().cpu().as_subclass(torch.Tensor).numpy()
        return found

    def asscalar(self) -> Any:
        """The value of its only element; waits for it."""
        return self.detach().item()

    def wait_to_read(self) -> None:
        """Return when it has been computed."""
        waitall()


def _made(tensor: torch.Tensor, ctx: Any) -> NDArray:
    context = cpu() if ctx is None else as_contexts(ctx)[0]
    return tagged(tensor.to(context.device).as_subclass(NDArray), context)  # type: ignore[return-value]


def array(source: Any, ctx: Any = None) -> NDArray:
    """An array of the given values, float32 unless they have a type."""
    typed = isinstance(source, (torch.Tensor, np.ndarray))
    return _made(torch.as_tensor(source) if typed else torch.tensor(source, dtype=torch.float32), ctx)


def zeros(shape: Any, ctx: Any = None) -> NDArray:
    """Zeros of a shape."""
    return _made(torch.zeros(_size(shape)), ctx)


def ones(shape: Any, ctx: Any = None) -> NDArray:
    """Ones of a shape."""
    return _made(torch.ones(_size(shape)), ctx)


def arange(*args: float, ctx: Any = None) -> NDArray:
    """Numbers one after the other, float32."""
    return _made(torch.arange(*args, dtype=torch.float32), ctx)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices."""
    return a @ b


def relu(x: torch.Tensor) -> torch.Tensor:
    """The larger of each element and zero."""
    return torch.relu(x)


def _size(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _normal(loc: float = 0.0, scale: float = 1.0, shape: Any = (1,), ctx: Any = None) -> NDArray:
    return _made(torch.randn(_size(shape)) * scale + loc, ctx)


def _uniform(low: float = 0.0, high: float = 1.0, shape: Any = (1,), ctx: Any = None) -> NDArray:
    return _made(torch.rand(_size(shape)) * (high - low) + low, ctx)


random = SimpleNamespace(normal=_normal, uniform=_uniform, seed=torch.manual_seed)


def waitall() -> None:
    """Return when everything that was asked of every device has been computed."""
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
