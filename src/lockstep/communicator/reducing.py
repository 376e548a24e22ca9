"""Collective verbs that reduce the tensors of all workers by an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist

from .member import Member
from .operations import BITWISE, OPS, Op, Reduction, operations_on, reduction
from .requests import Request

__all__ = ["Reducing"]


class Reducing(Member):
    """`reduce`, `allreduce` and `reduce_scatter`.

    An operation is "sum", "mean", "product", "min" or "max" of numbers, of which complex ones have "sum" and "mean" and
    whole ones have no "mean"; "and", "or" and "xor" work bit by bit on whole numbers and logically on bools. Shape and
    dtype are the same on all ranks. Sums of whole numbers wrap around as torch's own do.
    """

    @overload
    def allreduce(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def allreduce(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[True]) -> Request[torch.Tensor]: ...
    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Reduce `tensor` over all workers, in place on each, and return it."""
        how = self._reduction(op, self._check_tensor("tensor", tensor))
        if self.size == 1:
            return Request.ended(tensor) if async_op else tensor
        packed = how.pack(tensor)
        work = dist.all_reduce(packed, how.code, group=self._connected(), async_op=async_op)
        request = Request([work], lambda: how.put_into(tensor, packed, self.size))
        return request if async_op else request.wait()

    def allreduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start summing `tensor` over all workers, in place; calling what is returned waits and gives the sum."""
        return self.allreduce(tensor, async_op=True).wait

    @overload
    def reduce(
        self, tensor: torch.Tensor, op: Op = "sum", root: int = 0, *, async_op: Literal[False] = False
    ) -> torch.Tensor | None: ...
    @overload
    def reduce(
        self, tensor: torch.Tensor, op: Op = "sum", root: int = 0, *, async_op: Literal[True]
    ) -> Request[torch.Tensor | None]: ...
    def reduce(
        self, tensor: torch.Tensor, op: Op = "sum", root: int = 0, *, async_op: bool = False
    ) -> torch.Tensor | Request[torch.Tensor | None] | None:
        """Reduce `tensor` over all workers, in place on rank `root`, and return it there; None on the others.

        The tensors of the others stay as they are.
        """
        how = self._reduction(op, self._check_tensor("tensor", tensor))
        root = self._check_rank("root", root)
        if self.size == 1:
            return Request.ended(tensor) if async_op else tensor
        packed = how.pack(tensor)
        if self.rank != root and packed.data_ptr() == tensor.data_ptr():
            packed = packed.clone()  # backends use it to calculate in
        work = dist.reduce(packed, op=how.code, group=self._connected(), async_op=async_op, group_dst=root)

        def finish() -> torch.Tensor | None:
            if self.rank != root:
                return None
            return how.put_into(tensor, packed, self.size)

        request = Request([work], finish)
        return request if async_op else request.wait()

    @overload
    def reduce_scatter(
        self,
        parts: torch.Tensor | Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self,
        parts: torch.Tensor | Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        async_op: Literal[True],
    ) -> Request[torch.Tensor]: ...
    def reduce_scatter(
        self,
        parts: torch.Tensor | Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | Request[torch.Tensor]:
        """This rank's part, reduced over all workers.

        Args:
            parts: a tensor for each rank, of the same shapes on all ranks, or one tensor to be dealt out along its
                first dimension as by `scatter`; they stay as they are.
            op: the operation.
            counts: the number of rows for each rank, where one tensor is not to be dealt out evenly.
            out: filled and returned, instead of a new tensor.
            async_op: return a Request for the result.
        """
        held = self._parts("parts", parts, counts)
        own = held[self.rank]
        how = self._reduction(op, own)
        if out is None:
            result = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        else:
            result = self._check_tensor("out", out)
            self._check_like("out", out, own)
            self._check_shape("out", out, own.shape)
        request = self._reduce_scatter(held, how, result, async_op)
        return request if async_op else request.wait()

    def _reduce_scatter(
        self, held: Sequence[torch.Tensor], how: Reduction, result: torch.Tensor, async_op: bool
    ) -> Request[torch.Tensor]:
        if self.size == 1:
            result.detach().copy_(held[0].detach())
            return Request.ended(result)
        packed = [how.pack(part) for part in held]
        longest = max(len(part) for part in packed)  # backends want equal parts
        padded = [torch.cat([part, part.new_zeros(longest - len(part))]) for part in packed]
        room = torch.empty_like(padded[self.rank])
        work = dist.reduce_scatter(room, padded, how.code, group=self._connected(), async_op=async_op)
        length = len(packed[self.rank])

        def finish() -> torch.Tensor:
            return how.put_into(result, room[:length], self.size)

        return Request([work], finish)

    def _reduction(self, op: str, tensor: torch.Tensor) -> Reduction:
        defined = operations_on(tensor.dtype)
        if op not in OPS:
            raise self._error("op", f"one of {', '.join(OPS)}", repr(op))
        if op not in defined:
            hint = "Convert the tensor first." if op == "mean" else ""
            expected = f"what is defined for {tensor.dtype} ({', '.join(defined) or 'nothing'})"
            raise self._error("op", expected, repr(op), hint)
        carrier = self._carriers.get(tensor.device.type, "")
        if carrier == "nccl" and op in BITWISE and tensor.dtype is not torch.bool:
            raise self._error("op", "one that NCCL has", repr(op), "Reduce it on the CPU.")
        return reduction(op, tensor.dtype, carrier)
