"""The models that the examples and the command line know by name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..registry import Registry

if TYPE_CHECKING:
    import torch

    from .conv_net import convnet
    from .le_net import lenet
    from .perceptron import mlp
    from .resnet import resnet18

__all__ = ["MODELS", "build", "convnet", "lenet", "mlp", "resnet18"]

# A module must not have the name of the function in it: importing it would put it in the function's place.
MODELS = Registry(
    "model",
    {
        "mlp": "lockstep.models.perceptron:mlp",
        "lenet": "lockstep.models.le_net:lenet",
        "convnet": "lockstep.models.conv_net:convnet",
        "resnet18": "lockstep.models.resnet:resnet18",
    },
    open_ended=True,
)


def build(name: str, classes: int | None, shape: tuple[int, ...]) -> torch.nn.Module:
    """The model that `name` stands for, freshly initialised, on the CPU.

    Args:
        name: a short name, or ``package.module:factory`` of a callable that returns an ``nn.Module``. A factory
            that has parameters named ``classes`` or ``shape`` gets them; it must do without any others.
        classes: number of outputs; None where it is not known, and then not handed on.
        shape: one sample's shape, e.g. (1, 28, 28).

    Raises:
        ConfigError: for an unknown name, a factory that wants other arguments, or one that returns no module.
    """
    from torch import nn

    factory = MODELS.load(name)
    offered: dict[str, Any] = {"shape": shape} if classes is None else {"classes": classes, "shape": shape}
    try:
        accepted = inspect.signature(factory).parameters
        arguments = {key: value for key, value in offered.items() if key in accepted}
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError("model", "a factory callable with at most classes= and shape=", name, f"{error}.") from None
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model", "a factory that returns a torch.nn.Module", found=f"{name} -> {type(model).__name__}"
        )
    return model


def __getattr__(name: str) -> Any:
    if name in MODELS.targets:
        return MODELS.load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
