"""What passes leave behind in a model and in random generators; and passes that leave no trace in a
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import devices


class PassEffects:
    """What passes do beside computing their outputs: made before them, asked after.

    Args:
        modules: the model, and the modules of the loss, by the beginning of their buffers' names.
        device: the worker's device.
    """

    def __init__(self, modules: dict[str, nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self._versions = self._buffer_versions()
        self._generators = self._generator_states()

    def changed_buffers(self) -> list[str]:
        """Return the names of the buffers that they have changed, except batch norm's statistics
        and counters.
        """
        before = self._versions
        now = self._buffer_versions()
        return [name for name in now if now[name] != before.get(name)]

    def drew(self) -> bool:
        """Return whether they have drawn random numbers from torch's global generators."""
        states = zip(self._generators, self._generator_states(), strict=True)
        return not all(torch.equal(before, now) for before, now in states)

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        versions = {}
        for prefix, module in self._modules.items():
            for path, layer in module.named_modules(prefix=prefix):
                if not isinstance(layer, _BatchNorm):
                    for name, buffer in layer.named_buffers(path, recurse=False):
                        if buffer.is_floating_point():
                            versions[name] = id(buffer), buffer._version
        return versions

    def _generator_states(self) -> list[torch.Tensor]:
        generator = devices.generator_of(self._device)
        return [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]


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
