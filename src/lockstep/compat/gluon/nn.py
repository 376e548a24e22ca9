"""Layers with Gluon's names and arguments; input sizes that are not given are inferred from the
first batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn as torch_nn

from lockstep import arguments
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


def _lazy(layer_class: Callable[..., Layer], *args: Any, **kwargs: Any) -> Layer:
    """Create a lazy layer of torch without its warning that lazy modules are experimental."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Lazy modules")
        return layer_class(*args, **kwargs)


class _TorchLayer(HybridBlock):
    """A layer that wraps one of torch, followed by an activation."""

    def __init__(
        self, layer: torch_nn.Module, activation: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.layer = layer
        if activation is None:
            self.act: torch_nn.Module = torch_nn.Identity()
        else:
            self.act = _ACTIVATIONS[arguments.choice("activation", activation, _ACTIVATIONS)]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer, then the activation."""
        output: torch.Tensor = self.act(self.layer(x))
        return output


class _WeightedLayer(_TorchLayer):
    """A layer with a weight and, usually, a bias."""

    @property
    def weight(self) -> Parameter:
        """The weight, on every device."""
        return self._parameter("weight")

    @property
    def bias(self) -> Parameter:
        """The bias, on every device."""
        return self._parameter("bias")

    def _parameter(self, name: str) -> Parameter:
        if getattr(self.layer, name) is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return Parameter(self.layer, name, name)


class Dense(_WeightedLayer):
    """A fully connected layer: (N, …) to (N, units); the input is flattened, unless `flatten` is
    False.
    """

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
            layer = _lazy(torch_nn.LazyLinear, units, bias=use_bias)
        super().__init__(layer, activation, **kwargs)
        self.flatten = flatten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer, then the activation."""
        return super().forward(x.flatten(1) if self.flatten else x)


class Conv2D(_WeightedLayer):
    """A convolution: (N, C, H, W) to (N, channels, H', W')."""

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
        options: dict[str, Any] = {
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
            "bias": use_bias,
        }
        if in_channels:
            layer: torch_nn.Module = torch_nn.Conv2d(
                in_channels, channels, kernel_size, strides, **options
            )
        else:
            layer = _lazy(torch_nn.LazyConv2d, channels, kernel_size, strides, **options)
        super().__init__(layer, activation, **kwargs)


class BatchNorm(_TorchLayer):
    """Batch normalisation over all dimensions but the second."""

    def __init__(
        self, axis: int = 1, momentum: float = 0.9, epsilon: float = 1e-5, **kwargs: Any
    ) -> None:
        if axis != 1:
            raise ConfigError("axis", "1", axis, "Channels are in the second dimension.")
        # Gluon's momentum is the weight of the old running statistics, torch's is that of the new
        # ones.
        super().__init__(
            _lazy(torch_nn.LazyBatchNorm2d, eps=epsilon, momentum=1 - momentum), **kwargs
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`; the shape stays the same."""
        return super().forward(x.reshape(*x.shape[:2], -1, 1)).reshape(x.shape)


class Activation(_TorchLayer):
    """An activation: relu, sigmoid, softrelu, softsign or tanh."""

    def __init__(self, activation: str, **kwargs: Any) -> None:
        super().__init__(torch_nn.Identity(), activation, **kwargs)


class Dropout(_TorchLayer):
    """Zeroes a fraction `rate` of the elements, in training mode."""

    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__(torch_nn.Dropout(rate), **kwargs)


class Flatten(_TorchLayer):
    """Flattens (N, …) to (N, M)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(torch_nn.Flatten(), **kwargs)


class MaxPool2D(_TorchLayer):
    """The maximum of each window."""

    def __init__(
        self, pool_size: Any = (2, 2), strides: Any = None, padding: Any = 0, **kwargs: Any
    ) -> None:
        super().__init__(torch_nn.MaxPool2d(pool_size, strides, padding), **kwargs)


class AvgPool2D(_TorchLayer):
    """The mean of each window."""

    def __init__(
        self, pool_size: Any = (2, 2), strides: Any = None, padding: Any = 0, **kwargs: Any
    ) -> None:
        super().__init__(torch_nn.AvgPool2d(pool_size, strides, padding), **kwargs)


class GlobalAvgPool2D(_TorchLayer):
    """The mean of each channel: (N, C, H, W) to (N, C, 1, 1)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(torch_nn.AdaptiveAvgPool2d(1), **kwargs)


class GlobalMaxPool2D(_TorchLayer):
    """The maximum of each channel: (N, C, H, W) to (N, C, 1, 1)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(torch_nn.AdaptiveMaxPool2d(1), **kwargs)


class HybridSequential(HybridBlock):
    """A sequence of layers."""

    def add(self, *layers: torch_nn.Module) -> None:
        """Append layers."""
        for layer in layers:
            self.add_module(str(len(self)), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> torch_nn.Module:
        """Return the layer at `index`; a negative index counts from the end."""
        return [layer for layer in self._modules.values() if layer is not None][index]

    def forward(self, x: Any) -> Any:
        """Compute the layers in order, and return the output of the last one."""
        for layer in self._modules.values():
            if layer is not None:
                x = layer(x)
        return x


class Sequential(HybridSequential):
    """A sequence of layers; in contrast to Gluon's, it can be hybridized too."""
