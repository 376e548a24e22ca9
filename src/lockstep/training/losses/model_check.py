"""The comparison by halves of a loss that the model computes: the model is called with a few
samples.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..check_schedule import WITH_GRADIENTS, block_at
from ..modes import evaluating
from ..pass_effects import PassEffects, preserving_buffers
from .halves import (
    Difference,
    Halves,
    LossLike,
    Passes,
    Samples,
    compare_or_skip,
    device_of,
    rounding_of,
)
from .mean_check import NotAMean, without_traces

_log = logging.getLogger(__name__)

# A comparison calls the model twice with these samples, so they are few of many: at most one of 16,
# and at most 8. The first ones have 8 in any case: of two samples that choose the same expert, a
# term that balances experts is a mean.
_ONE_OF = 16
_MAX_SAMPLES = 8
# Elements of a model (256 MiB in float64) that is copied for the comparison.
_MAX_COPIED = 1 << 25
# Tolerated relative differences of values and gradients. A copy in float64 still computes in
# float32 here and there, as models do for normalisation and for the loss. Rounding in float32 was
# 2e-7 and 4e-7 with 24 layers of transformers. Terms that balance experts, with a coefficient of
# 0.001, made values differ by 1e-7 to 1e-5, gradients by 5e-4 to 1%.
_COPY = (2e-6, 2e-5)
_FLOAT32 = (1e-5, 1e-4)
# Kernels of lower precision than the tensors have, such as TF32, differ by that much with the
# number of samples.
_REDUCED = (1e-3, 1e-3)
DRAWING_LAYERS = (_DropoutNd, _NormBase, nn.RNNBase, nn.MultiheadAttention)
"""Layers that draw, or have statistics, in training."""
# Up to so many elements a parameter's gradient is compared: among them those of gates, which choose
# experts.
_SMALL = 1 << 16


def compare_model(
    fn: LossLike,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]],
    model: nn.Module,
    data: Any,
    size: int,
    number: int,
    passes: Passes,
    name: str = "a number of the model",
) -> NotAMean | None:
    """Compare the loss of a few samples with those of their halves; the model is called in
    evaluation mode.

    In the first steps a copy is called in training mode as well, without random draws and batch
    norm's statistics: some models compute terms of the whole batch in training only.

    It leaves no trace in the model: buffers, modes, gradients and random generators are restored.

    Args:
        fn: the loss function.
        forward: (model, data) → (output, target).
        model: the model.
        data: a batch of `size` samples.
        size: number of samples.
        number: the number of the step, or of the batch of an evaluation.
        passes: the context manager that the model was called in, such as autocast.
        name: the name of the function in errors.

    Returns:
        The difference; None if there is none, or if the model cannot be compared.
    """
    few = _MAX_SAMPLES if number in WITH_GRADIENTS else max(2, size // _ONE_OF)
    samples = Samples.few_of(data, None, size, block_at(number), most=min(_MAX_SAMPLES, few))
    if samples.rows is None or size < 2 or not _is_affordable(number, size):
        return None
    loss = without_traces(fn)

    def compare() -> Difference | None:
        if (wide := copy_in_float64(model)) is not None:
            halves = Halves(
                _loss_of(wide, loss, forward),
                samples.in_float64(),
                _small_parameters(wide),
                lambda _: _COPY,
                sums_add_up=True,
            )
            training = [
                layer
                for layer in wide.modules()
                if layer.training and not isinstance(layer, DRAWING_LAYERS)
            ]
            wide.eval()
            try:
                difference = halves.difference(number == 0)
                if (
                    difference is None
                    and not halves.is_unsteady
                    and number in WITH_GRADIENTS
                    and training
                ):
                    difference = _in_training(wide, training, halves, number == 0)
                return difference
            except (RuntimeError, TypeError, ValueError):
                pass  # a layer that does not compute in float64
        tolerance = partial(_tolerance, model)
        with evaluating(model), preserving_buffers(model), passes():
            return Halves(
                _loss_of(model, loss, forward),
                samples,
                _small_parameters(model),
                tolerance,
                sums_add_up=True,
            ).difference(True)

    # a compiled model would be compiled for these few samples
    with torch.compiler.set_stance("force_eager"):
        difference = compare_or_skip(compare, device_of(data))
    if difference is None:
        return None
    return NotAMean("loss_fn", name, samples.size, difference, is_model=True)


def _in_training(
    model: nn.Module, training: list[nn.Module], halves: Halves, gradients: bool
) -> Difference | None:
    """Return the difference in training mode; None if the model draws, or changes buffers as by
    running statistics.

    Draws may be the same by chance where the model is called once more, as masks of few elements
    are.
    """
    for layer in training:
        layer.training = True
    passes = PassEffects({"": model}, device_of(list(model.parameters())))
    difference = halves.difference(gradients)
    return None if passes.drew() or passes.changed_buffers() else difference


def _is_affordable(number: int, size: int) -> bool:
    """Return whether a comparison is made that is due: in small batches, two samples are a large
    part of a step.
    """
    power = max(0, number.bit_length() - 1)
    return size >= 2 * _ONE_OF or power % (2 if size >= _ONE_OF else 4) == 0


def _loss_of(
    model: nn.Module, fn: LossLike, forward: Callable[[nn.Module, Any], tuple[Any, Any]]
) -> LossLike:
    def compute(data: Any, _: Any) -> Any:
        return fn(*forward(model, data))

    return compute


def copy_in_float64(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model in float64, without hooks of the user; None for a large model, or
    one not copied.
    """
    inner: nn.Module = getattr(model, "_orig_mod", model)  # of torch.compile
    tensors = [*inner.parameters(), *inner.buffers()]
    if sum(tensor.numel() for tensor in tensors) > _MAX_COPIED or device_of(tensors).type == "mps":
        return None
    # the tensors are converted at once, not copied before
    memo: dict[int, Any] = {
        id(tensor): _wide(tensor) for tensor in tensors if tensor.is_floating_point()
    }
    for layer in inner.modules():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            memo[id(hooks)] = OrderedDict(
                (key, hook) for key, hook in hooks.items() if _is_of_torch(hook)
            )
    try:
        return copy.deepcopy(inner, memo)
    except Exception as error:
        _log.debug(
            "the model is not copied to compare its loss: %s: %s", type(error).__name__, error
        )
        return None


def is_compiled(model: nn.Module) -> bool:
    """Return whether a hook on `model` would have it compiled once more."""
    if "torch._dynamo" in sys.modules and isinstance(model, torch._dynamo.OptimizedModule):
        return True
    return any(getattr(layer, "_compiled_call_impl", None) is not None for layer in model.modules())


def _is_of_torch(hook: Any) -> bool:
    """Return whether torch has registered a hook, such as that of `torch.nn.utils.weight_norm`."""
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().double()
    value = value.clone() if value.data_ptr() == tensor.data_ptr() else value
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _small_parameters(model: nn.Module) -> list[nn.Parameter]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter for parameter in trained if parameter.numel() <= _SMALL] or trained[-1:]


def _tolerance(model: nn.Module, formats: set[torch.dtype]) -> tuple[float, float]:
    """Return the tolerated differences of a model that is called as it is."""
    device = device_of(list(model.parameters()))
    of_parameters = {
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    }
    rounding = rounding_of(formats | of_parameters, device)
    is_reduced = (
        torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    )
    values, gradients = _REDUCED if is_reduced and device.type != "cpu" else _FLOAT32
    return max(values, rounding), max(gradients, rounding)
