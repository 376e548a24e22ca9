"""All-reduces, and the requests for reductions that are made from Horovod's arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from lockstep import arguments
from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, global_process_set
from ..engine.request import OP_NAMES, Adasum, Average, Request, Signature, Sum
from . import handles
from .compression import Compression
from .differentiable import differentiable

__all__ = [
    "ReductionOptions",
    "UnsupportedOpError",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "op_text",
    "reducescatter_request",
    "reduction_options",
    "start_gradient_allreduce",
]


Tensors = Sequence[torch.Tensor]

ReductionOptions = dict[str, Any]
"""The options of a request for a reduction: op, prescale_factor and postscale_factor, in this
order.
"""


class UnsupportedOpError(ConfigError, NotImplementedError):
    """An operation does not support an `op`; a ValueError, and a RuntimeError, which Horovod's
    programs catch.
    """


def reduction_options(
    op: int | None, average: bool | None, prescale: float, postscale: float
) -> ReductionOptions:
    """Return the options of a request for a reduction, from Horovod's arguments.

    Raises:
        ConfigError: a ValueError, for an unknown `op`, or for `op` together with `average`.
    """
    if average is not None:
        if op is not None:
            raise ConfigError(
                "average",
                "one of op and average",
                found=f"both, op={op_text(op)} and average={average}",
            )
        op = Average if average else Sum
    op = Average if op is None else op
    if op not in range(len(OP_NAMES)):
        raise ConfigError("op", f"one of hvd.{', hvd.'.join(OP_NAMES)}", op)
    return _options(op, prescale, postscale)


def _options(op: int, prescale: float, postscale: float) -> ReductionOptions:
    for name, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if not isinstance(factor, (float, torch.Tensor)):
            arguments.number(name, factor)
    return {"op": int(op), "prescale_factor": float(prescale), "postscale_factor": float(postscale)}


def op_text(op: Any) -> str:
    """Return `op` as programs spell it, such as "hvd.Sum"."""
    return f"hvd.{OP_NAMES[op]}" if op in range(len(OP_NAMES)) else repr(op)


def _allreduce_request(
    tensors: Tensors, outputs: Tensors, name: str | None, options: ReductionOptions
) -> Request:
    """Return the request for an all-reduce of `tensors` into `outputs`.

    Raises:
        ConfigError: a ValueError, for a dtype for which `op` is not defined.
    """
    for tensor in tensors:
        _check_dtype(tensor.dtype, options["op"])
    signature = (*_options_signature(*options.values()), *handles.tensor_signature(tensors))
    return Request("allreduce", name or "", tensors, outputs, options, signature)


@functools.lru_cache(maxsize=1 << 8)  # saves time in every small all-reduce
def _options_signature(op: int, prescale: float, postscale: float) -> Signature:
    return ("op", OP_NAMES[op]), ("prescale_factor", prescale), ("postscale_factor", postscale)


@functools.lru_cache(maxsize=1 << 8)
def _check_dtype(dtype: torch.dtype, op: int) -> None:
    if dtype.is_complex:
        is_defined = op in (Average, Sum)
    elif dtype.is_floating_point:
        is_defined = dtype.itemsize > 1
    else:
        is_defined = dtype is not torch.bool and op != Adasum
    if not is_defined:
        hint = "Convert it first."
        raise ConfigError("tensor", f"a dtype for which hvd.{OP_NAMES[op]} is defined", dtype, hint)


def reducescatter_request(
    tensors: Tensors, name: str | None, op: int, prescale: float, postscale: float
) -> Request:
    """Return the request for a reduce-scatter.

    Raises:
        UnsupportedOpError: for an `op` other than Average and Sum.
        ConfigError: a ValueError, for a tensor without dimensions.
    """
    if op not in (Average, Sum):
        raise UnsupportedOpError("op", "hvd.Average or hvd.Sum", found=op_text(op))
    for tensor in tensors:
        _check_dtype(tensor.dtype, op)
        handles.check_dimensions(tensor)
    options = _options(op, prescale, postscale)
    signature = (*_options_signature(*options.values()), *handles.tensor_signature(tensors))
    return Request("reducescatter", name or "", tensors, (), options, signature)


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
    """Return the reduction of `tensor` over all ranks. Gradients flow through it; `tensor` is not
    modified.

    Args:
        tensor: a tensor of the same shape and dtype on all ranks.
        average: deprecated: True for op=Average, False for op=Sum.
        name: the name of the operation, the same on all ranks; None for one from the number of such
            calls.
        compression: a class with `compress` and `decompress`.
        op: Average, Sum, Adasum, Min, Max or Product; None for Average. Averages of integers are
            truncated.
        prescale_factor: multiplies `tensor` before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for invalid arguments.
        HorovodInternalError: the ranks do not agree on shape, dtype, op or factors.
    """
    handles.checked_tensor(tensor)
    compressed, ctx = compression.compress(tensor)
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    reduced = _allreduce_group([compressed], name, options, process_set)[0]
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
    """Return the reductions of several tensors, in one operation under one name; see
    `allreduce`.
    """
    handles.checked_group(tensors)
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    reduced = _allreduce_group(compressed, name, options, process_set)
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
    """Reduce `tensor` in place, and return it; see `allreduce`."""
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    detached = handles.checked_tensor(tensor)
    handles.run(process_set, _allreduce_request([detached], [detached], name, options))
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
    """Reduce several tensors in place, and return them; see `grouped_allreduce`."""
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    detached = handles.checked_group(tensors)
    handles.run(process_set, _allreduce_request(detached, detached, name, options))
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
    """Start an `allreduce`, and return its handle; `tensor` must not be modified until it has
    completed.
    """
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    detached = handles.checked_tensor(tensor)
    request = _allreduce_request([detached], [torch.empty_like(detached)], name, options)
    return handles.submit(process_set, request, handles.single_result)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_`, and return its handle."""
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    detached = handles.checked_tensor(tensor)
    request = _allreduce_request([detached], [detached], name, options)
    return handles.submit(process_set, request, lambda _: tensor)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce`, and return its handle, for which `synchronize` returns a
    tuple.
    """
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    detached = handles.checked_group(tensors)
    outputs = [torch.empty_like(tensor) for tensor in detached]
    return handles.submit(process_set, _allreduce_request(detached, outputs, name, options), tuple)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_`, and return its handle, for which `synchronize` returns a
    tuple.
    """
    options = reduction_options(op, average, prescale_factor, postscale_factor)
    detached = handles.checked_group(tensors)
    request = _allreduce_request(detached, detached, name, options)
    return handles.submit(process_set, request, lambda _: tuple(tensors))


def start_gradient_allreduce(
    tensors: Tensors, name: str, op: int, predivide: float, process_set: ProcessSet
) -> int:
    """Start a `grouped_allreduce_` of gradients, and return its handle; the request is not urgent.

    Args:
        tensors: tensors that do not require gradients.
        name: the name of the operation.
        op: the reduction.
        predivide: for Average, the gradients are divided by it before the sum, and multiplied by it
            after.
        process_set: the ranks.
    """
    options = reduction_options(op, None, 1.0 / predivide, predivide)
    request = _allreduce_request(tensors, tensors, name, options)
    request.urgent = False
    return handles.submit(process_set, request, tuple)


def _allreduce_group(
    tensors: Tensors, name: str | None, options: ReductionOptions, process_set: ProcessSet
) -> list[torch.Tensor]:
    def forward(inputs: Tensors) -> list[torch.Tensor]:
        detached = handles.checked_group(inputs)
        outputs = [torch.empty_like(tensor) for tensor in detached]
        results: list[torch.Tensor] = handles.run(
            process_set, _allreduce_request(detached, outputs, name, options)
        )
        return results

    def backward(gradients: Tensors) -> list[torch.Tensor]:
        return _allreduce_group(gradients, None, options, process_set)

    return differentiable(forward, backward, tensors)
