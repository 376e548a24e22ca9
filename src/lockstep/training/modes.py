"""Training and evaluation modes of a model's layers, frozen ones included, and passes that leave no
trace in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["TrainingModes", "evaluating", "preserving_buffers"]


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


@contextmanager
def preserving_buffers(model: nn.Module) -> Iterator[None]:
    """Let the passes of a `with` block change copies of the model's buffers.

    Restoring their values would not do. Batch norm's kernel changes running statistics without a
    new version of the tensor, so that a change cannot be told; and a graph that is kept may need
    the tensors unchanged.
    """
    owners = [
        (layer, name, buffer)
        for layer in model.modules()
        for name, buffer in layer._buffers.items()
    ]
    copies = {id(buffer): buffer.clone() for _, _, buffer in owners if buffer is not None}
    for layer, name, buffer in owners:
        if buffer is not None:
            layer._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for layer, name, buffer in owners:
            layer._buffers[name] = buffer
