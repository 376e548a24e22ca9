"""Results of trainings as tensors and values by name, and how two of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.names import plain_names
from ..errors import ConfigError
from ..parallel.fingerprints import INTEGERS

Entries = dict[str, Any]
"""Name → a tensor on the CPU or a plain value, in the order of the result."""

_SHOWN = 5  # entries that differ, of which a message says more than their number


def as_entries(result: object) -> Entries:
    """Return the tensors and plain values of a result by name.

    Args:
        result: a module, a tensor or array, a number, text, None, an object with a `state_dict`, or
            mappings and sequences of these. Names are the keys, joined by dots; a result that is a
            single value is named "result".

    Raises:
        ConfigError: for any other object; the error names where it is in the result.
    """
    entries: Entries = {}
    _collect("", result, entries)
    return entries


def _collect(path: str, value: Any, entries: Entries) -> None:
    if isinstance(value, nn.Module):
        state = {**dict(value.named_parameters(remove_duplicate=False)), **value.state_dict()}
        value = plain_names(state)
    elif hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    if isinstance(value, Tensor):
        entries[path or "result"] = _on_cpu(value)
    elif isinstance(value, np.ndarray):
        entries[path or "result"] = torch.from_numpy(np.ascontiguousarray(value)).clone()
    elif isinstance(value, np.generic):
        entries[path or "result"] = value.item()
    elif value is None or isinstance(value, (bool, int, float, str)):
        entries[path or "result"] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{path}.{key}" if path else str(key), item, entries)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(f"{path}.{index}" if path else str(index), item, entries)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigError(
            f"result.{path}" if path else "result",
            "a module, tensors, numbers or texts, or dicts and lists of them",
            found=f"an object of type {kind}",
            hint="Return what is to be compared, such as its state_dict().",
        )


def _on_cpu(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    if isinstance(whole, DTensor):  # each rank has a part: all of them call this
        whole = whole.full_tensor()
    if whole.layout is not torch.strided:
        whole = whole.to_dense()
    return whole.cpu().resolve_conj().resolve_neg().contiguous().clone()


def describe_differences(
    expected: Entries, actual: Entries, names: tuple[str, str], rtol: float, atol: float
) -> str | None:
    """Return a text that tells how two results differ, the first entry first; None if they are
    equal.

    Args:
        expected: one result.
        actual: the other one.
        names: of both, such as "on 1 worker" and "on 2 workers".
        rtol: relative tolerance, of the expected value.
        atol: absolute tolerance. If both are 0, all bits must be equal.
    """
    different: dict[str, str] = {}
    for name, value in expected.items():
        if name not in actual:
            different[name] = f"only {names[0]}"
            continue
        text = _describe_difference(value, actual[name], names, rtol, atol)
        if text is not None:
            different[name] = text
    for name in actual:
        if name not in expected:
            different[name] = f"only {names[1]}"
    if not different:
        return None
    total = len({*expected, *actual})
    allowed = "equal bits" if rtol == atol == 0 else f"rtol={rtol:g}, atol={atol:g}"
    lines = [f"{len(different)} of {total} entries differ ({allowed} expected); the first:"]
    lines += [f"  {name}: {text}" for name, text in list(different.items())[:_SHOWN]]
    if len(different) > _SHOWN:
        lines.append(f"  and {len(different) - _SHOWN} more")
    return "\n".join(lines)


def _describe_difference(
    one: Any, other: Any, names: tuple[str, str], rtol: float, atol: float
) -> str | None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _describe_tensors(one, other, names, rtol, atol)
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    if numbers and (rtol or atol):
        # as torch.testing: the tolerance is that of the expected value
        same = (
            one == other
            or abs(one - other) <= atol + rtol * abs(one)
            or (math.isnan(one) and math.isnan(other))
        )
    else:
        same = type(one) is type(other) and repr(one) == repr(other)
    if same:
        return None
    return f"{_short(one)} {names[0]}, {_short(other)} {names[1]}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _describe_tensors(
    one: Tensor, other: Tensor, names: tuple[str, str], rtol: float, atol: float
) -> str | None:
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [
            f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            for tensor in (one, other)
        ]
        return f"{kinds[0]} {names[0]}, {kinds[1]} {names[1]}"
    if rtol or atol:
        differs = ~torch.isclose(other, one, rtol=rtol, atol=atol, equal_nan=True)
    elif one.is_complex():
        real = (torch.view_as_real(tensor) for tensor in (one, other))
        left, right = (tensor.view(INTEGERS[tensor.element_size()]) for tensor in real)
        differs = (left != right).any(-1)
    else:
        left, right = (tensor.view(INTEGERS[tensor.element_size()]) for tensor in (one, other))
        differs = left != right
    count = int(differs.sum())
    if count == 0:
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    gaps = (one.to(wide) - other.to(wide)).abs()
    gaps = torch.where(differs, gaps.nan_to_num(nan=math.inf), -1.0)
    place = tuple(int(index) for index in np.unravel_index(int(gaps.argmax()), tuple(one.shape)))
    values = [tensor[place].item() for tensor in (one, other)]
    gap = float(gaps.max())
    largest = float(one.to(wide).abs().max())
    relative = (
        f", {gap / largest:.2g} of the largest value"
        if math.isfinite(gap) and 0 < largest < math.inf
        else ""
    )
    where = f" at {list(place)}" if place else ""
    return (
        f"{count} of {one.numel()} elements differ, most{where}: {values[0]!r} {names[0]}, "
        f"{values[1]!r} {names[1]} "
        f"(by {gap:.3g}{relative})"
    )
