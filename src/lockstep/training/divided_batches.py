"""Results that depend on how a global batch is divided: what of a model makes them so, as its
layers and its first batch show, for one line at the start of a training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..communicator import Communicator
from ..parallel.nested import map_tensors, tensors_of
from ..parallel.randomness import preserve_generators
from ..parallel.sync_batchnorm import SyncBatchNorm
from .losses.model_check import DRAWING_LAYERS, copy_in_float64, is_compiled
from .pass_effects import PassEffects

_log = logging.getLogger(__name__)

_MOST_NAMES = 3


def describe_division(
    model: nn.Module,
    workers: int,
    passes: int = 1,
    devices: int = 1,
    own_hooks: bool = False,
    trains: bool = True,
    seen: PassEffects | None = None,
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
        trains: whether there are backward passes, whose gradients hooks of parameters see.
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
    descriptions = [
        *_of_layers("dropout draws other masks", model, _draws),
        *_of_layers(
            "batch norm has the statistics of a part",
            model,
            lambda layer: _is_batch_norm(layer, passes),
        ),
        *(_of_hooks(model, own_hooks) if trains else []),
        *([] if seen is None else _of_passes(model, seen)),
    ]
    if mixes_samples:
        descriptions.append(
            "an output for a sample depends on the others of the same pass, as by statistics of "
            "the batch"
        )
    if not descriptions:
        return ""
    return (
        f"{', '.join(divided)}: results may depend on how a global batch is divided, as this "
        "model has what is listed in the documentation, on the page Training under "
        '"What is the same at any number of workers": '
        f"{'; '.join(descriptions)}"
    )


def _of_layers(
    description: str, model: nn.Module, matches: Callable[[nn.Module], bool]
) -> list[str]:
    return _listed(description, [name for name, layer in model.named_modules() if matches(layer)])


def _of_hooks(model: nn.Module, own_hooks: bool) -> list[str]:
    hooked = [
        name
        for name, p in model.named_parameters()
        if p._backward_hooks or (p._post_accumulate_grad_hooks and not own_hooks)
    ]
    return _listed("a hook of a parameter sees the gradient of a part", hooked)


def _of_passes(model: nn.Module, seen: PassEffects) -> list[str]:
    descriptions = _listed("a buffer is changed by a part", seen.changed_buffers())
    if seen.drew() and not any(_draws(layer) for layer in model.modules()):
        descriptions.append("the passes draw random numbers, others in each part")
    return descriptions


def _listed(description: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = ", ".join(name or "the model itself" for name in names[:_MOST_NAMES])
    return [f"{description} ({listed}{more})"]


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


# The model is called with 4 to 8 samples, and with half of them. A first dimension of less than 4
# is as often another one: channels, views.
_FEWEST_SAMPLES = 4
_MOST_SAMPLES = 8
# Relative difference of outputs in float64. Batch norm of 8 and of 4 samples differs by a tenth.
_TOLERANCE = 1e-6


class FirstBatch:
    """What the passes of the first batch that is divided show of a model: made before them, told
    after them.

    Args:
        model: the model.
        comm: of the workers among which batches are divided.
        samples: number of samples in the global batch.
        called: the models that the passes call; `model` itself when None.
        loss: the modules of the loss.
        passes: passes of each worker.
        devices: devices of each worker.
        own_hooks: see `describe_division`.
        trains: see `describe_division`.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        samples: int,
        *,
        called: Sequence[nn.Module] | None = None,
        loss: nn.Module | None = None,
        passes: int = 1,
        devices: int = 1,
        own_hooks: bool = False,
        trains: bool = True,
    ) -> None:
        self._model = model
        self._comm = comm
        self._passes = passes
        self._devices = devices
        self._own_hooks = own_hooks
        self._trains = trains
        self._seen = PassEffects(
            {"": model} if loss is None else {"": model, "loss": loss}, comm.device
        )
        parts = comm.size * passes * devices
        self._calls = [FirstCall(module, samples, parts) for module in (called or [model])]

    def tell(self) -> None:
        """Say in one line on rank 0 what of the model depends on how a global batch is divided;
        called by all ranks.
        """
        mixes = [call.mixes_samples() for call in self._calls]  # of all models, on all workers
        said = describe_division(
            self._model,
            self._comm.size,
            self._passes,
            self._devices,
            own_hooks=self._own_hooks,
            trains=self._trains,
            seen=self._seen,
            mixes_samples=any(mixes),
        )
        if said and self._comm.rank == 0:
            _log.warning("%s", said)


class FirstCall:
    """The first call of a model after this was made, of which a copy of the model computes a part
    anew.

    Batch norm that a model computes by itself, and everything else over the samples of a pass,
    depends on how a global batch is divided. No type of layer tells so.

    A model that draws random numbers, or that is compiled or sharded, is not looked at; nor is what
    hooks compute.

    Args:
        model: the model.
        samples: number of samples in the global batch.
        parts: how many parts it is divided into, each of which is a call.
    """

    def __init__(self, model: nn.Module, samples: int, parts: int) -> None:
        self._model = model
        self._samples = {samples // parts, -(-samples // parts)}
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if min(self._samples) >= _FEWEST_SAMPLES and not is_compiled(model) and not is_sharded:
            self._hook = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._hook.remove()  # now: the passes may end with an error, or the loop be left
        self._arguments = inputs, named

    def mixes_samples(self) -> bool:
        """Return whether the outputs for some samples are others without the remaining ones.

        The model and the random generators stay as they are. If the model communicates, all workers
        must ask.
        """
        arguments = self._arguments
        self._arguments = None
        if arguments is None:
            return False
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                return self._compare(arguments)
        # a model that does not compute in float64, or not for so few samples
        except Exception as error:
            _log.debug(
                "the model is not called with a part of a batch: %s: %s",
                type(error).__name__,
                error,
            )
            return False

    def _compare(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        tensors = tensors_of(arguments)
        sizes = [
            tensor.shape[0]
            for tensor in tensors
            if tensor.dim() and tensor.shape[0] in self._samples
        ]
        if not sizes:
            return False
        half = min(sizes[0], _MOST_SAMPLES) // 2
        copied = copy_in_float64(self._model)
        if copied is None:
            return False
        for layer in copied.modules():
            # which are named by themselves, see `describe_division`
            if isinstance(layer, DRAWING_LAYERS):
                layer.eval()
        outputs = []
        device = tensors[0].device
        with preserve_generators(device):
            for count in (2 * half, half):
                inputs, named = map_tensors(
                    partial(_first, count=count, samples=sizes[0]), arguments
                )
                passes = PassEffects({"": copied}, device)
                outputs.append(tensors_of(copied(*inputs, **named)))
                if passes.drew():
                    return False
        return any(_differ(whole, part) for whole, part in zip(*outputs, strict=True))


def _first(tensor: torch.Tensor, count: int, samples: int) -> torch.Tensor:
    """Return the first `count` of a tensor's samples, if it has so many, in float64."""
    kept = tensor[:count] if tensor.dim() and tensor.shape[0] == samples else tensor
    return kept.double() if kept.is_floating_point() else kept


def _differ(whole: torch.Tensor, part: torch.Tensor) -> bool:
    if not whole.dim() or not whole.is_floating_point() or whole.shape[0] != 2 * part.shape[0]:
        return False
    return not torch.allclose(
        whole[: part.shape[0]], part, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )
