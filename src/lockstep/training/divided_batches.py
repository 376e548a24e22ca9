"""What a model has whose results depend on how a global batch is divided, for one line at the start
of a training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .. import devices
from ..parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["FirstPasses", "describe_division"]

_MOST_NAMES = 3


class FirstPasses:
    """What the first passes over a worker's part of a batch do beside computing a loss: made before
    them, asked after.

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
        found = {}
        for prefix, module in self._modules.items():
            for path, layer in module.named_modules(prefix=prefix):
                if not isinstance(layer, _BatchNorm):
                    for name, buffer in layer.named_buffers(path, recurse=False):
                        if buffer.is_floating_point():
                            found[name] = id(buffer), buffer._version
        return found

    def _generator_states(self) -> list[torch.Tensor]:
        own = devices.generator_of(self._device)
        return [torch.get_rng_state(), *([] if own is None else [own.get_state()])]


def describe_division(
    model: nn.Module,
    workers: int,
    passes: int = 1,
    devices: int = 1,
    own_hooks: bool = False,
    seen: FirstPasses | None = None,
    mixes_samples: bool = False,
) -> str:
    """Return in one line what of the model depends on the division of global batches; "" if nothing
    does.

    Args:
        model: the model, with its layers in the modes in which it is trained.
        workers: number of workers.
        passes: passes of each worker.
        devices: devices of each worker.
        own_hooks: whether the training itself has hooks on accumulated gradients, which are not the
            user's then.
        seen: what the first passes have done; without it, functions that they call, such as
            `torch.nn.functional.dropout`, are not seen.
        mixes_samples: whether an output for a sample depends on other samples of the same pass.
    """
    divided = [
        f"{number} {name}"
        for number, name in (
            (workers, "workers"),
            (passes, "passes of each worker"),
            (devices, "devices of each worker"),
        )
        if number > 1
    ]
    if not divided:
        return ""
    found = [
        *_of_layers("dropout draws other masks", model, _draws),
        *_of_layers(
            "batch norm has the statistics of a part",
            model,
            lambda layer: _is_batch_norm(layer, passes),
        ),
        *_of_hooks(model, own_hooks),
        *([] if seen is None else _of_passes(model, seen)),
    ]
    if mixes_samples:
        found.append(
            "an output for a sample depends on the others of the same pass, as by statistics of "
            "the batch"
        )
    if not found:
        return ""
    return (
        f"{', '.join(divided)}: results may depend on how a global batch is divided, as this "
        "model has what is "
        'listed in docs/training.md, "What is the same at any number of workers": '
        f"{'; '.join(found)}"
    )


def _of_layers(what: str, model: nn.Module, matches: Callable[[nn.Module], bool]) -> list[str]:
    return _listed(what, [name for name, layer in model.named_modules() if matches(layer)])


def _of_hooks(model: nn.Module, own_hooks: bool) -> list[str]:
    hooked = [
        name
        for name, p in model.named_parameters()
        if p._backward_hooks or (p._post_accumulate_grad_hooks and not own_hooks)
    ]
    return _listed("a hook of a parameter sees the gradient of a part", hooked)


def _of_passes(model: nn.Module, seen: FirstPasses) -> list[str]:
    found = _listed("a buffer is changed by a part", seen.changed_buffers())
    if seen.drew() and not any(_draws(layer) for layer in model.modules()):
        found.append("the passes draw random numbers, others in each part")
    return found


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return [
        f"{what} ({', '.join(name or 'the model itself' for name in names[:_MOST_NAMES])}{more})"
    ]


def _draws(layer: nn.Module) -> bool:
    if not layer.training:
        return False
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return layer.dropout > 0
    return isinstance(layer, _DropoutNd) and layer.p > 0


def _is_batch_norm(layer: nn.Module, passes: int) -> bool:
    if not isinstance(layer, _BatchNorm) or not (layer.training or layer.running_mean is None):
        return False
    synchronised = isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))
    return passes > 1 or not synchronised
