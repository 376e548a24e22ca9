"""MXNet's arrays: `NDArray`, a torch tensor with MXNet's methods, and functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep import arguments
from lockstep.errors import ConfigError

from . import autograd
from .context import Context, as_contexts, context_of, cpu, set_context

__all__ = [
    "Convolution",
    "NDArray",
    "Pooling",
    "arange",
    "array",
    "dot",
    "flatten",
    "ones",
    "random",
    "relu",
    "waitall",
    "zeros",
]


class _Size(int):
    """The number of elements, as in MXNet, which can also be called like torch's method `size`."""

    def __new__(cls, tensor: torch.Tensor) -> _Size:
        size = super().__new__(cls, tensor.numel())
        size.shape = tensor.shape
        return size

    shape: torch.Size

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class NDArray(torch.Tensor):
    """A tensor that behaves like MXNet's, with MXNet's names for some of torch's methods.

    `backward` computes the gradients of the sum of its elements, operations are recorded only
    within `autograd.record()`, and the results of operations have its context.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch.set_grad_enabled(autograd.is_recording()):
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        context = next(_contexts((args, *(kwargs or {}).values())), None)
        if context is not None:
            for array in _arrays(result):
                if "_lockstep_context" not in vars(array):
                    set_context(array, context)
        return result

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Return the values and the context as text."""
        return f"{super().__repr__(**options)} @{self.context}"  # type: ignore[no-untyped-call]

    @property
    def context(self) -> Context:
        """The context of the array."""
        return context_of(self)

    ctx = context

    @property
    def size(self) -> Any:
        """The number of elements; `size()` is the shape, as in torch."""
        return _Size(self)

    def astype(self, dtype: Any) -> NDArray:
        """Return the array in another dtype: one of torch or NumPy, or its name."""
        torch_dtype = (
            dtype if isinstance(dtype, torch.dtype) else torch.as_tensor(np.empty(0, dtype)).dtype
        )
        return self.to(torch_dtype)  # type: ignore[return-value]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute gradients as `torch.Tensor.backward` does; the default gradient is one for every
        element.

        Raises:
            ConfigError: the array was not computed within `autograd.record()`.
        """
        if not self.requires_grad:
            found = "one that was not recorded"
            raise ConfigError("backward", "an array computed within autograd.record()", found=found)
        if not args and not kwargs and self.dim():
            args = (torch.ones_like(self),)
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def as_in_context(self, context: Context) -> NDArray:
        """Return the array itself if it is in `context`, otherwise a copy in `context`."""
        return self if context == self.context else self.copyto(context)

    def copyto(self, other: Context | torch.Tensor) -> NDArray:
        """Copy the array to a context or into another array, and return the copy."""
        if isinstance(other, Context):
            copied = self.detach().to(other.device, copy=True).as_subclass(NDArray)
            return set_context(copied, other)  # type: ignore[return-value]
        with torch.no_grad():
            return other.copy_(self)  # type: ignore[return-value]

    def attach_grad(self, grad_req: str = "write") -> None:
        """Compute gradients of the array from now on; see `autograd.set_grad_req`. The gradient is
        initially zero.
        """
        autograd.set_grad_req(self, grad_req)
        self.grad = torch.zeros_like(self)

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a NumPy array; waits until they are computed."""
        values: np.ndarray[Any, Any] = self.detach().cpu().as_subclass(torch.Tensor).numpy()
        return values

    def asscalar(self) -> Any:
        """Return the value of the only element; waits until it is computed."""
        return self.detach().item()

    def wait_to_read(self) -> None:
        """Wait until the array is computed."""
        waitall()


def _arrays(value: Any) -> Iterator[NDArray]:
    """Yield the arrays in the arguments or the result of a function of torch."""
    if isinstance(value, NDArray):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)


def _contexts(value: Any) -> Iterator[Context]:
    """Yield the contexts that are recorded for the arrays in `value`."""
    return (
        vars(array)["_lockstep_context"]
        for array in _arrays(value)
        if "_lockstep_context" in vars(array)
    )


def _to_context(tensor: torch.Tensor, ctx: Any) -> NDArray:
    context = cpu() if ctx is None else as_contexts(ctx)[0]
    return set_context(tensor.to(context.device).as_subclass(NDArray), context)  # type: ignore[return-value]


def array(source: Any, ctx: Any = None) -> NDArray:
    """Return an array of the given values; float32, unless `source` is a tensor or a NumPy
    array.
    """
    has_dtype = isinstance(source, (torch.Tensor, np.ndarray))
    return _to_context(
        torch.as_tensor(source) if has_dtype else torch.tensor(source, dtype=torch.float32), ctx
    )


def zeros(shape: Any, ctx: Any = None) -> NDArray:
    """Return an array of zeros."""
    return _to_context(torch.zeros(_as_tuple(shape)), ctx)


def ones(shape: Any, ctx: Any = None) -> NDArray:
    """Return an array of ones."""
    return _to_context(torch.ones(_as_tuple(shape)), ctx)


def arange(*args: float, ctx: Any = None) -> NDArray:
    """Return a range of numbers; the arguments are those of `torch.arange`, the dtype is
    float32.
    """
    return _to_context(torch.arange(*args, dtype=torch.float32), ctx)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices."""
    return a @ b


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return the larger of each element and zero."""
    return torch.relu(x)


def flatten(data: torch.Tensor) -> torch.Tensor:
    """Flatten (N, …) to (N, M)."""
    return data.flatten(1)


def Convolution(  # noqa: N802 - MXNet's name for it
    data: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kernel: Any = None,
    num_filter: int | None = None,
    stride: Any = 1,
    pad: Any = 0,
    no_bias: bool = False,
) -> torch.Tensor:
    """Convolve (N, C, H, W) to (N, F, H', W'); `kernel` and `num_filter` are ignored: `weight` has
    them.
    """
    return F.conv2d(data, weight, None if no_bias else bias, stride, pad)


def Pooling(  # noqa: N802 - MXNet's name for it
    data: torch.Tensor, kernel: Any, pool_type: str = "max", stride: Any = 1, pad: Any = 0
) -> torch.Tensor:
    """Return the maximum of each window, or the mean for `pool_type` "avg"."""
    arguments.choice("pool_type", pool_type, ("max", "avg"))
    return (F.max_pool2d if pool_type == "max" else F.avg_pool2d)(data, kernel, stride, pad)


def _as_tuple(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _normal(loc: float = 0.0, scale: float = 1.0, shape: Any = (1,), ctx: Any = None) -> NDArray:
    return _to_context(torch.randn(_as_tuple(shape)) * scale + loc, ctx)


def _uniform(low: float = 0.0, high: float = 1.0, shape: Any = (1,), ctx: Any = None) -> NDArray:
    return _to_context(torch.rand(_as_tuple(shape)) * (high - low) + low, ctx)


random = SimpleNamespace(normal=_normal, uniform=_uniform, seed=torch.manual_seed)


def waitall() -> None:
    """Wait until all operations on all devices have completed."""
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
