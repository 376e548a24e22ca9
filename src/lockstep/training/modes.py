"""Training mode for the layers of a model, except for those that the user keeps frozen in evaluation mode."""

from __future__ import annotations

from torch import nn

__all__ = ["TrainingModes"]


class TrainingModes:
    """Remembers which layers of a model in training mode are in evaluation mode, e.g. batch norm that is frozen.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._frozen: list[nn.Module] = []

    def restore(self) -> None:
        """Bring the model into training mode, as it was when last seen in it: frozen layers stay frozen."""
        if self._model.training:
            self._frozen = [layer for layer in self._model.modules() if not layer.training]
            return
        self._model.train()
        for layer in self._frozen:
            layer.training = False
