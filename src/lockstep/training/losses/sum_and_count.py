"""What a loss or a metric may return, as (sum, count)."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from ...errors import ConfigError

# A sum of many samples in these formats would overflow (float16: above 65,504) or be rounded to 3
# digits (bfloat16).
_HALF = (torch.float16, torch.bfloat16)


def as_sum(value: Any, size: int, argument: str = "loss_fn") -> tuple[Any, Any]:
    """Convert the return value of a loss or a metric for `size` samples to (sum, count).

    Args:
        value: the mean over the samples (a 0-dim floating tensor or a float), one value for each
            sample (a tensor of `size` elements), or (sum, count): two 0-dim tensors or numbers.
        size: the number of samples.
        argument: the argument that errors name.

    Returns:
        (sum, count). The count is `size` itself, an int, where the value is a mean over samples or
        one value for each; else a tensor or a float.

    Raises:
        ConfigError: if it has none of these forms, or is a whole number, which is not a mean, or if
            its count requires a gradient.
    """
    if is_pair(value):
        _refuse_count_with_gradient(value[1], argument)
        total, count = map(_as_scalar, value)
        return total, count if isinstance(count, torch.Tensor) else float(count)
    tensor = (
        value
        if isinstance(value, torch.Tensor) or not isinstance(value, Real)
        else torch.tensor(value)
    )
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
        if not tensor.is_floating_point():
            hint = "Return (sum, count), where the mean is sum / count."
            kind = "complex" if tensor.is_complex() else "whole"
            name = tensor.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                argument,
                _expected(size),
                found=f"a {kind} number ({name}), which is no mean",
                hint=hint,
            )
        return (tensor.float() if tensor.dtype in _HALF else value) * size, size
    if isinstance(tensor, torch.Tensor) and tensor.numel() == size:
        return (tensor.float() if tensor.dtype in _HALF else tensor).sum(), size
    got = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    hint = "For a mean over tokens or pixels, return the sum over them and their number."
    raise ConfigError(argument, _expected(size), found=got, hint=hint)


def is_pair(value: Any) -> bool:
    """Return whether a return value has the form (sum, count)."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_scalar, value))


def is_known_nan(value: Any) -> bool:
    """Return whether a return value is a mean that is no number, without waiting for a device."""
    if isinstance(value, torch.Tensor):
        return (
            value.is_cpu
            and value.numel() == 1
            and value.is_floating_point()
            and math.isnan(value.item())
        )
    return isinstance(value, float) and math.isnan(value)


def _refuse_count_with_gradient(count: Any, argument: str) -> None:
    """Check that a count is a number, and no part of the loss.

    Raises:
        ConfigError: if it requires a gradient.
    """
    if isinstance(count, torch.Tensor) and count.requires_grad:
        raise ConfigError(
            argument,
            "(sum, count) from a function that returns two values, where the count is a number of "
            "samples, tokens or weights",
            found="a second value that requires a gradient",
            hint="If the second value is a part of the loss, return the first one alone, and the "
            "part as a metric.",
        )


def _expected(size: int) -> str:
    return f"a scalar mean, {size} values (one for each sample), or (sum, count)"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _as_scalar(value: Any) -> Any:
    return value.reshape(()) if isinstance(value, torch.Tensor) and value.dim() else value
