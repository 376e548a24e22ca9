"""Training and evaluation modes of a model's layers, frozen ones included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class TrainingModes:
    """Remembers which layers of a model in training mode are in evaluation mode, e.g. frozen batch
    norm.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._frozen: list[nn.Module] = []

    def restore(self) -> None:
        """Put the model into training mode; layers that were frozen when it was last in this mode
        stay frozen.
        """
        if self._model.training:
            self._frozen = [layer for layer in self._model.modules() if not layer.training]
            return
        self._model.train()
        for layer in self._frozen:
            layer.training = False


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put every layer into evaluation mode within a `with` block, and restore the modes after
    it.
    """
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
