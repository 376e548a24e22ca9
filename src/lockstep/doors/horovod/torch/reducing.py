"""All-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.process_sets import ProcessSet, global_process_set
from . import handles
from .compression import Compression
from .differentiable import Differentiable, wants_gradient
from .requests import How, how_to, reduction

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "start_gradients",
]

Tensors = Sequence[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, which stays as it is. Gradients go through it.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: True is op=Average, False is op=Sum; the manner of before.
        name: by which ranks find each other's; by the number of such calls when None.
        compression: a class with `compress` and `decompress`.
        op: Average, Sum, Adasum, Min, Max or Product; Average when None. That of whole numbers is cut off at the point.
        prescale_factor: `tensor` is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for wrong arguments.
        HorovodInternalError: when ranks do not agree on shape, dtype, op or factors.
    """
    handles.checked(tensor)
    packed, ctx = compression.compress(tensor)
    how = how_to(op, average, prescale_factor, postscale_factor)
    reduced = _reduced_group([packed], name, how, process_set)[0]
    out: torch.Tensor = compression.decompress(reduced, ctx)
    return out


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` for several tensors under one name, all carried out together."""
    handles.checked_list(tensors)
    packed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    how = how_to(op, average, prescale_factor, postscale_factor)
    reduced = _reduced_group(packed, name, how, process_set)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` in place; returns `tensor`."""
    how = how_to(op, average, prescale_factor, postscale_factor)
    plain = [handles.checked(tensor)]
    handles.run(process_set, reduction(plain, plain, name, how))
    return tensor


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """`grouped_allreduce` in place; returns `tensors`."""
    how = how_to(op, average, prescale_factor, postscale_factor)
    plain = handles.checked_list(tensors)
    handles.run(process_set, reduction(plain, plain, name, how))
    return tuple(tensors)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an `allreduce`; a handle for `poll` and `synchronize`. `tensor` must be left alone until it has ended."""
    how = how_to(op, average, prescale_factor, postscale_factor)
    plain = [handles.checked(tensor)]
    return handles.start(process_set, reduction(plain, [torch.empty_like(plain[0])], name, how), handles.first)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an `allreduce_`; a handle."""
    how = how_to(op, average, prescale_factor, postscale_factor)
    plain = [handles.checked(tensor)]
    return handles.start(process_set, reduction(plain, plain, name, how), lambda _: tensor)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a `grouped_allreduce`; a handle, whose `synchronize` gives a tuple."""
    how = how_to(op, average, prescale_factor, postscale_factor)
    plain = handles.checked_list(tensors)
    outputs = [torch.empty_like(tensor) for tensor in plain]
    return handles.start(process_set, reduction(plain, outputs, name, how), tuple)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a `grouped_allreduce_`; a handle, whose `synchronize` gives a tuple."""
    how = how_to(op, average, prescale_factor, postscale_factor)
    plain = handles.checked_list(tensors)
    return handles.start(process_set, reduction(plain, plain, name, how), lambda _: tuple(tensors))


def start_gradients(tensors: Tensors, name: str, op: int, predivide: float, process_set: ProcessSet) -> int:
    """Begin a `grouped_allreduce_` of gradients, which need not be seen to before there are more of them; a handle.

    Args:
        tensors: without gradients of their own.
        name: by which ranks find each other's.
        op: the operation.
        predivide: for Average, what they are divided by before they are summed, and multiplied by after.
        process_set: the ranks.
    """
    how = how_to(op, None, 1.0 / predivide, predivide)
    request = reduction(tensors, tensors, name, how)
    request.wakes = False
    return handles.start(process_set, request, tuple)


def _reduced_group(tensors: Tensors, name: str | None, how: How, process_set: ProcessSet) -> list[torch.Tensor]:
    def reduce(values: Tensors) -> list[torch.Tensor]:
        plain = handles.checked_list(values)
        outputs = [torch.empty_like(tensor) for tensor in plain]
        found: list[torch.Tensor] = handles.run(process_set, reduction(plain, outputs, name, how))
        return found

    if not wants_gradient(tensors):
        return reduce(tensors)
    return Differentiable.of(reduce, lambda grads: _reduced_group(grads, None, how, process_set), tensors)
