"""Reduction operations by name: what they mean for a dtype, and how a backend is asked for them."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.distributed import ReduceOp

from .flat import dense, flat

__all__ = ["BITWISE", "OPS", "Op", "Reduction", "operations_on", "reduction"]

Op = Literal["sum", "mean", "product", "min", "max", "and", "or", "xor"]
OPS: tuple[str, ...] = get_args(Op)
BITWISE = ("and", "or", "xor")

_HALF = (torch.float16, torch.bfloat16)
_REAL = (*_HALF, torch.float32, torch.float64)
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_CODES: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "and": ReduceOp.BAND,
    "or": ReduceOp.BOR,
    "xor": ReduceOp.BXOR,
}
# on bytes that are 0 or 1, every backend has these; a sum's lowest bit is the exclusive or, also when it overflows
_LOGICAL: dict[str, Any] = {"and": ReduceOp.MIN, "or": ReduceOp.MAX, "xor": ReduceOp.SUM}
_AVERAGING = ("shm", "nccl")


def operations_on(dtype: torch.dtype) -> tuple[str, ...]:
    """The operations that are defined for `dtype`."""
    if dtype in _REAL:
        return "sum", "mean", "product", "min", "max"
    if dtype in _COMPLEX:
        return "sum", "mean"
    if dtype in _WHOLE or dtype in _WIDENED:
        return "sum", "product", "min", "max", *BITWISE
    return BITWISE if dtype is torch.bool else ()


@dataclass(frozen=True)
class Reduction:
    """How values of one dtype travel and are reduced.

    Attributes:
        code: c10d's operation.
        travels_as: the dtype of what is sent; some backends lack others.
        divides: whether a mean is still to be divided by the number of ranks.
        keeps_lowest_bit: whether only that bit of the outcome counts.
    """

    code: Any
    travels_as: torch.dtype
    divides: bool = False
    keeps_lowest_bit: bool = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values as they travel, in one dimension, sharing the memory of `tensor` where they can."""
        values = flat(dense(tensor))
        if tensor.is_complex():
            return flat(torch.view_as_real(values))
        if tensor.dtype is torch.bool:
            return values.view(torch.uint8)
        return values if tensor.dtype == self.travels_as else values.to(self.travels_as)

    def put_into(self, tensor: torch.Tensor, packed: torch.Tensor, size: int) -> torch.Tensor:
        """Fill `tensor` with the reduction over `size` ranks that is in what has travelled, and return it."""
        if self.divides:
            packed.div_(size)
        if self.keeps_lowest_bit:
            packed.bitwise_and_(1)
        if packed.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(self._values(packed, tensor.dtype).view(tensor.shape))
        return tensor

    def _values(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_complex:
            return torch.view_as_complex(packed.view(-1, 2))
        return packed.view(torch.bool) if dtype is torch.bool else packed


@functools.cache
def reduction(op: str, dtype: torch.dtype, carrier: str) -> Reduction:
    """How the backend `carrier` does `op`, which is among `operations_on(dtype)`."""
    if dtype is torch.bool:
        return Reduction(_LOGICAL[op], torch.uint8, keeps_lowest_bit=op == "xor")
    travels_as = _COMPLEX.get(dtype) or _WIDENED.get(dtype) or dtype
    if op != "mean":
        return Reduction(_CODES[op], travels_as)
    if carrier in _AVERAGING:
        return Reduction(ReduceOp.AVG, travels_as)
    # a sum of half-precision numbers may overflow where their mean does not
    return Reduction(ReduceOp.SUM, torch.float32 if dtype in _HALF else travels_as, divides=True)
