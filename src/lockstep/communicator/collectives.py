"""Collectives over a process group: reduce operations by name, and exchanges of parts of any
shapes.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ..errors import MismatchError
from .call_arguments import (
    SPEC_LENGTH,
    Arguments,
    TensorSpec,
    dense,
    fill_from_wire,
    flatten,
    wire_view,
)
from .requests import Request

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


Op = Literal["sum", "mean", "product", "min", "max", "and", "or", "xor"]
_OPS: tuple[str, ...] = get_args(Op)
_BITWISE = ("and", "or", "xor")

_HALF = (torch.float16, torch.bfloat16)
_REAL = (*_HALF, torch.float32, torch.float64)
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_INTEGER = (torch.uint8, torch.int8, torch.int32, torch.int64)
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_C10D_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "and": ReduceOp.BAND,
    "or": ReduceOp.BOR,
    "xor": ReduceOp.BXOR,
}
# on bytes that are 0 or 1, every backend has these; a sum's lowest bit is the exclusive or, also
# when it overflows
_LOGICAL: dict[str, Any] = {"and": ReduceOp.MIN, "or": ReduceOp.MAX, "xor": ReduceOp.SUM}
_AVERAGING_BACKENDS = ("shm", "nccl")


def reduction_for(arguments: Arguments, op: str, tensor: torch.Tensor) -> Reduction:
    """Return how the backend for `tensor` does `op`; raise ConfigError where that is not
    defined.
    """
    defined = _ops_for(tensor.dtype)
    if op not in _OPS:
        raise arguments.error("op", f"one of {', '.join(_OPS)}", repr(op))
    if op not in defined:
        hint = "Convert the tensor first." if op == "mean" else ""
        expected = f"what is defined for {tensor.dtype} ({', '.join(defined) or 'nothing'})"
        raise arguments.error("op", expected, repr(op), hint)
    backend = arguments.backends.get(tensor.device.type, "")
    if backend == "nccl" and op in _BITWISE and tensor.dtype is not torch.bool:
        raise arguments.error("op", "one that NCCL has", repr(op), "Reduce it on the CPU.")
    return _reduction(op, tensor.dtype, backend)


def _ops_for(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the operations that are defined for `dtype`."""
    if dtype in _REAL:
        return "sum", "mean", "product", "min", "max"
    if dtype in _COMPLEX:
        return "sum", "mean"
    if dtype in _INTEGER or dtype in _WIDENED:
        return "sum", "product", "min", "max", *_BITWISE
    return _BITWISE if dtype is torch.bool else ()


@dataclass(frozen=True)
class Reduction:
    """How values of one dtype are transferred and reduced.

    Attributes:
        c10d_op: c10d's operation.
        wire_dtype: the dtype of what is sent; some backends lack others.
        divides: whether a mean is still to be divided by the number of ranks.
        keeps_lowest_bit: whether only that bit of the result counts.
    """

    c10d_op: Any
    wire_dtype: torch.dtype
    divides: bool = False
    keeps_lowest_bit: bool = False

    def sends_as_is(self, dtype: torch.dtype) -> bool:
        """Return whether values of `dtype` are sent, and their reduction is the result, as they
        are.
        """
        return dtype == self.wire_dtype and not (self.divides or self.keeps_lowest_bit)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values as they are sent, in one dimension, sharing the memory of `tensor`
        where possible.
        """
        values = flatten(dense(tensor))
        if tensor.is_complex():
            return flatten(torch.view_as_real(values))
        if tensor.dtype is torch.bool:
            return values.view(torch.uint8)
        return values if tensor.dtype == self.wire_dtype else values.to(self.wire_dtype)

    def unpack_into(self, tensor: torch.Tensor, packed: torch.Tensor, size: int) -> torch.Tensor:
        """Fill `tensor` with the reduction over `size` ranks in `packed`, and return it."""
        if self.divides:
            packed.div_(size)
        if self.keeps_lowest_bit:
            packed.bitwise_and_(1)
        if packed.data_ptr() != tensor.data_ptr():
            values = packed
            if tensor.is_complex():
                values = torch.view_as_complex(packed.view(-1, 2))
            elif tensor.dtype is torch.bool:
                values = packed.view(torch.bool)
            tensor.detach().copy_(values.view(tensor.shape))
        return tensor


@functools.cache
def _reduction(op: str, dtype: torch.dtype, backend: str) -> Reduction:
    """Return how `backend` does `op`, which is among `_ops_for(dtype)`."""
    if dtype is torch.bool:
        return Reduction(_LOGICAL[op], torch.uint8, keeps_lowest_bit=op == "xor")
    wire_dtype = _COMPLEX.get(dtype) or _WIDENED.get(dtype) or dtype
    if op != "mean":
        return Reduction(_C10D_OPS[op], wire_dtype)
    if backend in _AVERAGING_BACKENDS:
        return Reduction(ReduceOp.AVG, wire_dtype)
    # a sum of half-precision numbers may overflow where their mean does not
    return Reduction(ReduceOp.SUM, torch.float32 if dtype in _HALF else wire_dtype, divides=True)


@functools.cache
def blocking_all_reduce(op: Any) -> Any:
    """Return c10d's options of a blocking all-reduce with `op`, one of `_C10D_OPS`; not to be
    changed.

    Making them takes torch as long as shared memory needs for the whole operation. Whoever reads
    them in Python gets constants of the class, at a twentieth of the time of c10d's properties.
    """
    kind = type("AllreduceOptions", (dist.AllreduceOptions,), {"reduceOp": op, "asyncOp": False})
    options = kind()
    dist.AllreduceOptions.reduceOp.__set__(options, op)
    dist.AllreduceOptions.asyncOp.__set__(options, False)
    return options


def reduce_scatter(
    group: dist.ProcessGroup,
    rank: int,
    parts: Tensors,
    how: Reduction,
    result: torch.Tensor,
    async_op: bool,
) -> Request[torch.Tensor]:
    """Fill `result` with the reduction over all ranks of `parts[rank]`."""
    packed = [how.pack(part) for part in parts]
    longest = max(len(part) for part in packed)  # backends require equal parts
    padded = [torch.cat([part, part.new_zeros(longest - len(part))]) for part in packed]
    buffer = torch.empty_like(padded[rank])
    work = dist.reduce_scatter(buffer, padded, how.c10d_op, group=group, async_op=async_op)
    length = len(packed[rank])
    return Request([work], lambda: how.unpack_into(result, buffer[:length], len(parts)))


def exchange(
    group: dist.ProcessGroup,
    sent: Sequence[torch.Tensor | None],
    received: Sequence[torch.Tensor | None],
    device: torch.device,
    get_result: Callable[[], T],
    async_op: bool,
) -> Request[T]:
    """Send `sent[i]` to rank i while `received[i]` is filled from there; None stands for no part.

    One all-to-all, in which most parts may be empty, is the operation that every backend has for
    parts of any sizes.
    """
    message = wire_view(
        next(part.new_empty(1) for part in (*sent, *received) if part is not None), group
    )
    empty = torch.empty(0, dtype=message.dtype, device=device)
    parts = [empty if part is None else wire_view(dense(part), group) for part in sent]
    input_sizes = [part.numel() for part in parts]
    output_sizes = [0 if part is None else part.numel() * len(message) for part in received]
    data = torch.cat(parts)
    buffer = empty.new_empty(sum(output_sizes))
    work = dist.all_to_all_single(
        buffer, data, output_sizes, input_sizes, group=group, async_op=async_op
    )

    def finish() -> T:
        for part, piece in zip(received, torch.split(buffer, output_sizes), strict=True):
            if part is not None:
                fill_from_wire(part, piece)
        return get_result()

    return Request([work, _KeepAlive(data)], finish)


def share_with_all(
    group: dist.ProcessGroup, tensor: torch.Tensor, outs: Tensors, async_op: bool
) -> Request[list[torch.Tensor]]:
    """Fill `outs[i]` with rank i's `tensor`."""
    sent = wire_view(dense(tensor), group)
    elements = len(wire_view(tensor.new_empty(1), group))
    lengths = [out.numel() * elements for out in outs]
    longest = max(lengths)  # backends require equal parts
    if len(sent) < longest:
        sent = torch.cat([sent, sent.new_empty(longest - len(sent))])
    buffers = list(sent.new_empty(len(outs), longest).unbind())
    work = dist.all_gather(buffers, sent, group=group, async_op=async_op)

    def finish() -> list[torch.Tensor]:
        for out, buffer, length in zip(outs, buffers, lengths, strict=True):
            fill_from_wire(out, buffer[:length])
        return list(outs)

    return Request([work, _KeepAlive(sent)], finish)


class _KeepAlive:
    """Keeps what is sent from being freed before the request has completed."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return


def broadcast_spec(
    group: dist.ProcessGroup, arguments: Arguments, root: int, parts: Tensors
) -> TensorSpec:
    """Return the spec of this rank's part of rank `root`'s `parts`."""
    table = torch.zeros(
        arguments.size, SPEC_LENGTH, dtype=torch.int64, device=arguments.control_device
    )
    if parts:
        table.copy_(torch.tensor([TensorSpec.of(part).encode() for part in parts]))
    dist.broadcast(table, group=group, group_src=root)
    return TensorSpec.decode(table[arguments.rank].tolist())


def gather_specs(
    group: dist.ProcessGroup, arguments: Arguments, parts: Tensors
) -> list[list[TensorSpec]]:
    """Return the specs of all ranks' `parts`, of which each has as many.

    Raises:
        MismatchError: on every rank, when they are not of one dtype and kind of device.
    """
    rows = [TensorSpec.of(part).encode() for part in parts]
    encoded = torch.tensor(rows, dtype=torch.int64, device=arguments.control_device)
    tables = [torch.empty_like(encoded) for _ in range(arguments.size)]
    dist.all_gather(tables, encoded, group=group)
    specs = [[TensorSpec.decode(row) for row in table.tolist()] for table in tables]
    kinds = [str(spec[0]) for spec in specs]
    if len(set(kinds)) > 1:
        kinds_of_ranks = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise MismatchError(
            f"ranks pass tensors of different kinds to one collective ({kinds_of_ranks})"
        )
    return specs


def output_tensors(
    arguments: Arguments, like: torch.Tensor, outputs: Tensors | Sequence[TensorSpec]
) -> list[torch.Tensor]:
    """Return the tensors to be filled: new ones of the specs given, or the tensors given, if they
    fit.
    """
    if len(outputs) > 0 and all(isinstance(output, TensorSpec) for output in outputs):
        return [spec.empty(like.device) for spec in cast("Sequence[TensorSpec]", outputs)]
    outs = arguments.check_list("out", outputs, like)
    arguments.check_shape(f"out[{arguments.rank}]", outs[arguments.rank], like.shape)
    return outs
