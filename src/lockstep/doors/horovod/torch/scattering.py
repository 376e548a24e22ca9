"""Reduce-scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.process_sets import ProcessSet, global_process_set
from ..engine.request import Average, Sum
from . import handles
from .compression import Compression
from .differentiable import Differentiable, wants_gradient
from .moving import grouped_allgather
from .requests import scattering

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]

Tensors = Sequence[torch.Tensor]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of `tensor`; where they cannot be dealt out evenly, the first ranks get more.

    Gradients go through it. Arguments and errors are those of `allreduce`; `op` is Average or Sum.
    """
    handles.checked(tensor)
    packed, ctx = compression.compress(tensor)
    out: torch.Tensor = compression.decompress(
        _scattered_group([packed], name, op, process_set, prescale_factor, postscale_factor)[0], ctx
    )
    return out


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` for several tensors under one name."""
    handles.checked_list(tensors)
    packed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    parts = _scattered_group(packed, name, op, process_set, prescale_factor, postscale_factor)
    return [compression.decompress(part, ctx) for part, ctx in zip(parts, ctxs, strict=True)]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a `reducescatter`; a handle."""
    request = scattering([handles.checked(tensor)], name, op, prescale_factor, postscale_factor)
    return handles.start(process_set, request, handles.first)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a `grouped_reducescatter`; a handle, whose `synchronize` gives a tuple."""
    request = scattering(handles.checked_list(tensors), name, op, prescale_factor, postscale_factor)
    return handles.start(process_set, request, tuple)


def _scattered_group(
    tensors: Tensors, name: str | None, op: int, process_set: ProcessSet, before: float, after: float
) -> list[torch.Tensor]:
    def scatter(values: Tensors) -> list[torch.Tensor]:
        request = scattering(handles.checked_list(values), name, op, before, after)
        found: list[torch.Tensor] = handles.run(process_set, request)
        return found

    def back(grads: Tensors) -> list[torch.Tensor]:
        # Horovod's convention, whose factors scripts have in their learning rates: no division for averages
        factor = before * after * (process_set.size() if op == Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], process_set=process_set)

    return scatter(tensors) if not wants_gradient(tensors) else Differentiable.of(scatter, back, tensors)
