"""Requests for reductions, made of Horovod's arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.errors import ConfigError

from ..engine.request import OP_NAMES, Adasum, Average, Request, Sum
from . import handles

__all__ = ["How", "UnsupportedOpError", "how_to", "reduction", "scattering", "shown"]

Tensors = Sequence[torch.Tensor]
How = dict[str, Any]


class UnsupportedOpError(ConfigError, NotImplementedError):
    """An operation has no form with this `op`; a ValueError, and what scripts for Horovod catch, a RuntimeError."""


def how_to(op: int | None, average: bool | None, before: float, after: float) -> How:
    """What is done to numbers, of Horovod's arguments.

    Raises:
        ConfigError: a ValueError, for an unknown `op`, or `average` beside it.
    """
    if average is not None:
        if op is not None:
            raise ConfigError("average", "one of op and average", found=f"both, op={shown(op)} and average={average}")
        op = Average if average else Sum
    op = Average if op is None else op
    if op not in range(len(OP_NAMES)):
        raise ConfigError("op", f"one of hvd.{', hvd.'.join(OP_NAMES)}", op)
    return {"op": int(op), "prescale_factor": float(before), "postscale_factor": float(after)}


def shown(op: Any) -> str:
    """`op` as users write it."""
    return f"hvd.{OP_NAMES[op]}" if op in range(len(OP_NAMES)) else repr(op)


def reduction(plain: Tensors, outputs: Tensors, name: str | None, how: How) -> Request:
    """An all-reduce of `plain` into `outputs`.

    Raises:
        ConfigError: a ValueError, for a dtype for which the operation is not defined.
    """
    for tensor in plain:
        _check_dtype(tensor.dtype, how["op"])
    form = (*_said(*how.values()), *handles.form_of(plain))
    return Request("allreduce", name or "", plain, outputs, how, form)


@functools.lru_cache(maxsize=1 << 8)  # every small all-reduce would pay for it
def _said(op: int, before: float, after: float) -> tuple[tuple[str, Any], ...]:
    return ("op", OP_NAMES[op]), ("prescale_factor", before), ("postscale_factor", after)


@functools.lru_cache(maxsize=1 << 8)
def _check_dtype(dtype: torch.dtype, op: int) -> None:
    real = dtype.is_floating_point and dtype.itemsize > 1
    fits = op in (Average, Sum) if dtype.is_complex else real
    whole = not dtype.is_complex and not dtype.is_floating_point and dtype is not torch.bool
    if not fits and (op == Adasum or not whole):
        hint = "Convert it first."
        raise ConfigError("tensor", f"a dtype for which hvd.{OP_NAMES[op]} is defined", dtype, hint)


def scattering(plain: Tensors, name: str | None, op: int, before: float, after: float) -> Request:
    """A reduce-scatter.

    Raises:
        UnsupportedOpError: for another `op` than Average and Sum.
        ConfigError: a ValueError, for a tensor without dimensions.
    """
    if op not in (Average, Sum):
        raise UnsupportedOpError("op", "hvd.Average or hvd.Sum", found=shown(op))
    for tensor in plain:
        _check_dtype(tensor.dtype, op)
        if not tensor.dim():
            raise ConfigError("tensor", "at least one dimension", found="none")
    how = {"op": int(op), "prescale_factor": float(before), "postscale_factor": float(after)}
    return Request("reducescatter", name or "", plain, (), how, (*_said(*how.values()), *handles.form_of(plain)))
