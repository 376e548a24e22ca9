"""Tensors as runs of bytes that any backend carries, and their shapes as rows of whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["DTYPES", "MAX_DIMS", "ROW", "Form", "as_bytes", "dense", "fill", "flat", "put_back", "room_for"]

MAX_DIMS = 16
ROW = MAX_DIMS + 3  # numbers that tell a tensor's dtype, device and shape

# what can travel; the position stands for the dtype when shapes are told
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` in order, in its own memory where they lie so, without autograd."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous()


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Memory to be filled with the values of `tensor` in order: its own, or else new."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def put_back(plain: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy what came from `dense` or `room_for` into `tensor`, unless it is its memory; return `tensor`."""
    if plain.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(plain)
    return tensor


def flat(plain: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension, sharing its memory."""
    if plain.dim() == 1 and plain.stride(0) == 1:
        return plain
    # a dimension of length 1 may have any stride, which `view` would keep
    return plain.as_strided((plain.numel(),), (1,))


def as_bytes(plain: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, sharing its memory."""
    return flat(plain).view(torch.uint8)


def fill(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy bytes into `tensor`."""
    if tensor.numel():  # nothing may lie where no element could begin
        tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


class Form(NamedTuple):
    """What others must know of a tensor to make room for it."""

    dtype: torch.dtype
    on_cpu: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """The form of `tensor`."""
        return cls(tensor.dtype, tensor.is_cpu, tuple(tensor.shape))

    @classmethod
    def read(cls, row: Sequence[int]) -> Form:
        """The form that `row` tells."""
        return cls(DTYPES[row[0]], bool(row[1]), tuple(row[3 : 3 + row[2]]))

    def row(self) -> list[int]:
        """Whole numbers that tell it, `ROW` of them."""
        told = [DTYPES.index(self.dtype), int(self.on_cpu), len(self.shape), *self.shape]
        return told + [0] * (ROW - len(told))

    def blank(self, device: torch.device) -> torch.Tensor:
        """A tensor of this form, on the CPU or on `device`."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)

    def __str__(self) -> str:
        return f"{self.dtype} on {'the CPU' if self.on_cpu else 'a device'}"
