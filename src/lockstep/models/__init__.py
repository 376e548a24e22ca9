"""Models by name, for the examples and the command line."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..registry import Registry, import_object

if TYPE_CHECKING:
    import torch

    from .conv_net import convnet
    from .le_net import lenet
    from .perceptron import mlp
    from .resnet import resnet18
    from .transformer import GPT, continue_text, gpt, next_token_loss

__all__ = [
    "GPT",
    "MODELS",
    "build",
    "continue_text",
    "convnet",
    "gpt",
    "lenet",
    "mlp",
    "next_token_loss",
    "resnet18",
]

# A module must not have the name of its function: importing the module would replace the function
# in this package.
MODELS = Registry(
    "model",
    {
        "mlp": "lockstep.models.perceptron:mlp",
        "lenet": "lockstep.models.le_net:lenet",
        "convnet": "lockstep.models.conv_net:convnet",
        "resnet18": "lockstep.models.resnet:resnet18",
        "gpt": "lockstep.models.transformer:gpt",
    },
    open_ended=True,
)


_LAZY = {
    **MODELS.targets,
    **{
        name: f"lockstep.models.transformer:{name}"
        for name in ("GPT", "continue_text", "next_token_loss")
    },
}


def build(
    name: str,
    classes: int | None,
    shape: tuple[int, ...],
    vocabulary: int | None = None,
    **chosen: Any,
) -> torch.nn.Module:
    """Build the model `name`, freshly initialised, on the CPU.

    Args:
        name: a short name, or ``package.module:factory`` of a callable that returns an
            ``nn.Module``. A factory with parameters named ``classes`` or ``shape``, or for text
            ``vocabulary`` or ``context``, gets them; other parameters must have defaults.
        classes: number of outputs; not passed on if None.
        shape: the shape of one sample, e.g. (1, 28, 28), or of text (context,).
        vocabulary: the number of different tokens of text; None for other data.
        chosen: what the user has chosen, such as ``layers``; the factory must have such parameters.

    Raises:
        ConfigError: for an unknown name, a factory that requires other arguments or does not have
            one that was chosen, or one that returns no module.
    """
    from torch import nn

    factory = MODELS.load(name)
    available: dict[str, Any] = (
        {"shape": shape} if classes is None else {"classes": classes, "shape": shape}
    )
    if vocabulary is not None:
        available |= {"vocabulary": vocabulary, "context": shape[0]}
    try:
        accepted = inspect.signature(factory).parameters
        unknown = next((argument for argument in chosen if argument not in accepted), None)
        arguments = {key: value for key, value in available.items() if key in accepted} | chosen
        if unknown is None:
            inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        keywords = " and ".join(f"{key}=" for key in available)
        expected = f"a factory callable with at most {keywords}"
        raise ConfigError("model", expected, name, f"{error}.") from None
    if unknown is not None:
        raise ConfigError(
            unknown, f"nothing, as the model {name} has no such argument", chosen[unknown]
        )
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model",
            "a factory that returns a torch.nn.Module",
            found=f"{name} -> {type(model).__name__}",
        )
    return model


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_object("model", _LAZY[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
