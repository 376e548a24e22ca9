"""Layers with Gluon's names and arguments; sizes of input that are not given are learnt from the first batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn as torch_nn

from lockstep.errors import ConfigError

from .block import Block, HybridBlock
from .parameter import Parameter

__all__ = [
    "Activation",
    "AvgPool2D",
    "BatchNorm",
    "Block",
    "Conv2D",
    "Dense",
    "Dropout",
    "Flatten",
    "GlobalAvgPool2D",
    "GlobalMaxPool2D",
    "HybridBlock",
    "HybridSequential",
    "MaxPool2D",
    "Sequential",
]

_ACTIVATIONS: dict[str, type[torch_nn.Module]] = {
    "relu": torch_nn.ReLU,
    "sigmoid": torch_nn.Sigmoid,
    "softrelu": torch_nn.Softplus,
    "softsign": torch_nn.Softsign,
    "tanh": torch_nn.Tanh,
}

Layer = TypeVar("Layer", bound=torch_nn.Module)


def _lazily(make: Callable[..., Layer], *args: Any, **kwargs: Any) -> Layer:
    """A layer that learns its size of input; torch warns that these are new."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Lazy modules")
        return make(*args, **kwargs)


def _activation(name: str | None) -> torch_nn.Module:
    if name is None:
        return torch_nn.Identity()
    if name not in _ACTIVATIONS:
        raise ConfigError("activation", f"one of {', '.join(sorted(_ACTIVATIONS))}", name)
    return _ACTIVATIONS[name]()


class _Of(HybridBlock):
    """A layer that one of torch's computes."""

    def __init__(self, layer: torch_nn.Module, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layer, self.act = layer, _activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, then its activation."""
        found: torch.Tensor = self.act(self.layer(x))
        return found


class _Weighted(_Of):
    """A layer with a weight, and mostly a bias."""

    @property
    def weight(self) -> Parameter:
        """Its weight on every device."""
        return self._parameter("weight")

    @property
    def bias(self) -> Parameter:
        """Its bias on every device."""
        return self._parameter("bias")

    def _parameter(self, name: str) -> Parameter:
        if getattr(self.layer, name) is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return Parameter(self.layer, name, name)


class Dense(_Weighted):
    """Fully connected: (n, …) → (n, units); all dimensions but the first are one, unless `flatten` is False."""

    def __init__(
        self,
        units: int,
        activation: str | None = None,
        use_bias: bool = True,
        flatten: bool = True,
        in_units: int = 0,
        **kwargs: Any,
    ) -> None:
        if in_units:
            layer: torch_nn.Module = torch_nn.Linear(in_units, units, bias=use_bias)
        else:
            layer = _lazily(torch_nn.LazyLinear, units, bias=use_bias)
        super().__init__(layer, activation, **kwargs)
        self.flatten = flatten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, then its activation."""
        return super().forward(x.flatten(1) if self.flatten else x)


class Conv2D(_Weighted):
    """Convolution: (n, c, h, w) → (n, channels, h', w')."""

    def __init__(
        self,
        channels: int,
        kernel_size: int | tuple[int, int],
        strides: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        activation: str | None = None,
        use_bias: bool = True,
        in_channels: int = 0,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {"padding": padding, "dilation": dilation, "groups": groups, "bias": use_bias}
        if in_channels:
            layer: torch_nn.Module = torch_nn.Conv2d(in_channels, channels, kernel_size, strides, **options)
        else:
            layer = _lazily(torch_nn.LazyConv2d, channels, kernel_size, strides, **options)
        super().__init__(layer, activation, **kwargs)


class BatchNorm(_Of):
    """Normalisation over all dimensions but the second."""

    def __init__(self, axis: int = 1, momentum: float = 0.9, epsilon: float = 1e-5, **kwargs: Any) -> None:
        if axis != 1:
            raise ConfigError("axis", "1", axis, "Channels are in the second dimension.")
        # Gluon's momentum is the share that is kept, torch's that which is replaced.
        super().__init__(_lazily(torch_nn.LazyBatchNorm2d, eps=epsilon, momentum=1 - momentum), **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return super().forward(x.reshape(*x.shape[:2], -1, 1)).reshape(x.shape)


class Activation(_Of):
    """One of relu, sigmoid, softrelu, softsign and tanh."""

    def __init__(self, activation: str, **kwargs: Any) -> None:
        super().__init__(torch_nn.Identity(), activation, **kwargs)


class Dropout(_Of):
    """Drops out a share `rate` of the elements, in training."""

    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__(torch_nn.Dropout(rate), **kwargs)


class Flatten(_Of):
    """(n, …) → (n, m)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(torch_nn.Flatten(), **kwargs)


class MaxPool2D(_Of):
    """The largest of each window."""

    def __init__(self, pool_size: Any = (2, 2), strides: Any = None, padding: Any = 0, **kwargs: Any) -> None:
        super().__init__(torch_nn.MaxPool2d(pool_size, strides, padding), **kwargs)


class AvgPool2D(_Of):
    """The mean of each window."""

    def __init__(self, pool_size: Any = (2, 2), strides: Any = None, padding: Any = 0, **kwargs: Any) -> None:
        super().__init__(torch_nn.AvgPool2d(pool_size, strides, padding), **kwargs)


class GlobalAvgPool2D(_Of):
    """The mean of each channel: (n, c, h, w) → (n, c, 1, 1)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(torch_nn.AdaptiveAvgPool2d(1), **kwargs)


class GlobalMaxPool2D(_Of):
    """The largest of each channel: (n, c, h, w) → (n, c, 1, 1)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(torch_nn.AdaptiveMaxPool2d(1), **kwargs)


class HybridSequential(HybridBlock):
    """Layers one after the other."""

    def add(self, *layers: torch_nn.Module) -> None:
        """Append layers."""
        for layer in layers:
            self.add_module(str(len(self)), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, number: int) -> torch_nn.Module:
        """Layer `number`, from 0, or from the end if negative."""
        return [layer for layer in self._modules.values() if layer is not None][number]

    def forward(self, x: Any) -> Any:
        """What comes out of the last layer."""
        for layer in self._modules.values():
            if layer is not None:
                x = layer(x)
        return x


class Sequential(HybridSequential):
    """Layers one after the other; can be compiled as well."""
