"""Models by name, for the examples and the command line."""

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

# A module must not have the name of its function: importing the module would replace the function in this package.
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
    """Build the model `name`, freshly initialised, on the CPU.

    Args:
        name: a short name, or ``package.module:factory`` of a callable that returns an ``nn.Module``. A factory
            with parameters named ``classes`` or ``shape`` gets them; other parameters must have defaults.
        classes: number of outputs; not passed on if None.
        shape: the shape of one sample, e.g. (1, 28, 28).

    Raises:
        ConfigError: for an unknown name, a factory that requires other arguments, or one that returns no module.
    """
    from torch import nn

    factory = MODELS.load(name)
    available: dict[str, Any] = {"shape": shape} if classes is None else {"classes": classes, "shape": shape}
    try:
        accepted = inspect.signature(factory).parameters
        arguments = {key: value for key, value in available.items() if key in accepted}
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
