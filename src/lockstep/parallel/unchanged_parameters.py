"""Parameters that a forward pass changes, of which each worker would make something else."""

from __future__ import annotations

from torch import nn

from ..errors import ConfigError


class UnchangedParameters:
    """Notices whether passes change parameters in place, by their versions; not those of layers
    with ``same_bits``.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        layers = [layer for layer in model.modules() if not getattr(layer, "same_bits", False)]
        self._parameters = [p for layer in layers for p in layer.parameters(recurse=False)]
        self.note()

    def note(self) -> None:
        """Note the parameters before the passes."""
        self._versions = [p._version for p in self._parameters]

    def check(self) -> None:
        """Check after the passes that they are the same.

        Raises:
            ConfigError: naming a parameter that is not, and its layer.
        """
        if [p._version for p in self._parameters] == self._versions:
            return
        versions = {
            id(p): version for p, version in zip(self._parameters, self._versions, strict=True)
        }
        named = self._model.named_parameters()
        name = next(
            (name for name, p in named if p._version != versions.get(id(p), p._version)),
            "a parameter",
        )
        raise _changed(self._model, name)


def _changed(model: nn.Module, name: str) -> ConfigError:
    path = name.rpartition(".")[0]
    layer = dict(model.named_modules()).get(path, model)
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        hint = "Leave max_norm out, and normalise the weights after each step."
    else:
        hint = (
            "If it is initialised from its first batch, call the model once before the training, "
            "without gradients and with the same data on every worker. What it changes in each "
            "pass belongs in a buffer."
        )
    return ConfigError(
        "model",
        "forward passes that change no parameter",
        found=f"one that changes {name}, of {type(layer).__name__}: each worker by its own part of "
        "the batch",
        hint=f"{hint} If you know better, set same_bits = True on the layer.",
    )
