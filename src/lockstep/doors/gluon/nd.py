"""Arrays with the names that MXNet's have: torch tensors with some methods more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.errors import ConfigError

from . import autograd
from .context import Context, as_contexts, context_of, cpu, tagged

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
    """MXNet's `size` is a number, torch's a method: this is both."""

    def __new__(cls, tensor: torch.Tensor) -> _Size:
        found = super().__new__(cls, tensor.numel())
        found.shape = tensor.shape
        return found

    shape: torch.Size

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class NDArray(torch.Tensor):
    """A tensor with MXNet's manners, and its names for some of torch's methods.

    Its `backward` sums over its elements, graphs are made within `autograd.record()` only, and what is computed from it
    is in its context.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch.set_grad_enabled(autograd.is_recording()):
            found = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        context = next(_contexts((args, *(kwargs or {}).values())), None)
        if context is not None:
            for made in _arrays(found):
                if "_lockstep_context" not in vars(made):
                    tagged(made, context)
        return found

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Its values, and where they are."""
        return f"{super().__repr__(**options)} @{self.context}"  # type: ignore[no-untyped-call]

    @property
    def context(self) -> Context:
        """Where it is."""
        return context_of(self)

    ctx = context

    @property
    def size(self) -> Any:
        """The number of its elements; `size()` is its shape, as in torch."""
        return _Size(self)

    def astype(self, dtype: Any) -> NDArray:
        """Its values as another type: torch's, numpy's, or the name of one."""
        wanted = dtype if isinstance(dtype, torch.dtype) else torch.as_tensor(np.empty(0, dtype)).dtype
        return self.to(wanted)  # type: ignore[return-value]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; without a gradient of its own each element counts once.

        Raises:
            ConfigError: for what was not recorded.
        """
        if not self.requires_grad:
            raise ConfigError(
                "backward", "an array computed within autograd.record()", found="one that was not recorded"
            )
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

    def attach_grad(self, grad_req: str = "write") -> None:
        """Want a gradient, which is zero at first; each backward pass replaces it, or adds to it with "add"."""
        autograd.want_gradient(self, grad_req)
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


def _arrays(found: Any) -> Iterator[NDArray]:
    """Those in the arguments or the results of a function of torch."""
    if isinstance(found, NDArray):
        yield found
    elif isinstance(found, (tuple, list)):
        for item in found:
            yield from _arrays(item)


def _contexts(found: Any) -> Iterator[Context]:
    return (vars(array)["_lockstep_context"] for array in _arrays(found) if "_lockstep_context" in vars(array))


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


def flatten(data: torch.Tensor) -> torch.Tensor:
    """(n, …) → (n, m)."""
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
    """(n, c, h, w) → (n, filters, h', w'); `kernel` and `num_filter` are those of `weight`."""
    return F.conv2d(data, weight, None if no_bias else bias, stride, pad)


def Pooling(  # noqa: N802 - MXNet's name for it
    data: torch.Tensor, kernel: Any, pool_type: str = "max", stride: Any = 1, pad: Any = 0
) -> torch.Tensor:
    """The largest of each window, or its mean with `pool_type` "avg"."""
    if pool_type not in ("max", "avg"):
        raise ConfigError("pool_type", "max or avg", pool_type)
    return (F.max_pool2d if pool_type == "max" else F.avg_pool2d)(data, kernel, stride, pad)


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
