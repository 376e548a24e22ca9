"""Collective verbs that move tensors without calculating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist

from .exchange import Exchange
from .flat import Form, dense, put_back, room_for
from .requests import Request

__all__ = ["Moving"]

Tensors = Sequence[torch.Tensor]


class Moving(Exchange):
    """`broadcast`, `scatter`, `gather`, `allgather`, `alltoall` and `barrier`.

    Parts may have any shapes, so these are MPI's forms with a "v" as well: the ranks tell each other the shapes
    first. Where every rank gives `out`, the tensors to be filled, the shapes are known and nothing is told: that is
    quicker. With `async_op` a Request comes back, whose `wait` gives the result; the shapes have been told by then.
    """

    @overload
    def barrier(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Request[None]: ...
    def barrier(self, *, async_op: bool = False) -> Request[None] | None:
        """Return when every worker has come here."""
        if self.size == 1:
            return Request.ended(None) if async_op else None
        devices = [self.device.index] if self._side().type == "cuda" else None
        work = dist.barrier(group=self._connected(), async_op=async_op, device_ids=devices)
        return Request([work], lambda: None) if async_op else None

    @overload
    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: Literal[True]) -> Request[torch.Tensor]: ...
    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Copy `tensor` of rank `root` into every worker's `tensor`, in place, and return it.

        Shape and dtype are the same on all ranks.
        """
        self._check_tensor("tensor", tensor)
        root = self._check_rank("root", root)
        if self.size == 1:
            return Request.ended(tensor) if async_op else tensor
        plain = dense(tensor) if self.rank == root else room_for(tensor)
        work = dist.broadcast(self._moved(plain), group=self._connected(), async_op=async_op, group_src=root)
        request = Request([work], lambda: put_back(plain, tensor) if self.rank != root else tensor)
        return request if async_op else request.wait()

    @overload
    def scatter(
        self,
        parts: torch.Tensor | Tensors | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...
    @overload
    def scatter(
        self,
        parts: torch.Tensor | Tensors | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        async_op: Literal[True],
    ) -> Request[torch.Tensor]: ...
    def scatter(
        self,
        parts: torch.Tensor | Tensors | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | Request[torch.Tensor]:
        """This rank's part of what rank `root` has.

        Args:
            parts: on rank `root`, a tensor for each rank, or one tensor to be dealt out along its first dimension, as
                evenly as it can be, the first ranks getting the longer parts; ignored on the others.
            root: who has it.
            counts: the number of rows for each rank, where one tensor is not to be dealt out evenly.
            out: filled and returned; on every rank or on none.
            async_op: return a Request for the result.
        """
        root = self._check_rank("root", root)
        held = self._parts("parts", parts, counts) if self.rank == root else []
        if out is not None:
            self._check_tensor("out", out)
        if held and out is not None:
            self._check_like("out", out, held[root])
            self._check_shape("out", out, held[root].shape)
        mine = self._form_from(root, held) if out is None else Form.of(out)
        result = mine.blank(self.device) if out is None else out
        received = [result if rank == root else None for rank in range(self.size)]
        request = self._exchange(held or [None] * self.size, received, result.device, lambda: result, async_op)
        return request if async_op else request.wait()

    @overload
    def gather(
        self, tensor: torch.Tensor, root: int = 0, *, out: Tensors | None = None, async_op: Literal[False] = False
    ) -> list[torch.Tensor] | None: ...
    @overload
    def gather(
        self, tensor: torch.Tensor, root: int = 0, *, out: Tensors | None = None, async_op: Literal[True]
    ) -> Request[list[torch.Tensor] | None]: ...
    def gather(
        self, tensor: torch.Tensor, root: int = 0, *, out: Tensors | None = None, async_op: bool = False
    ) -> list[torch.Tensor] | Request[list[torch.Tensor] | None] | None:
        """On rank `root`, the tensors of all ranks, in rank order; None on the others.

        Args:
            tensor: this rank's; of one dtype everywhere.
            root: who gets them.
            out: on rank `root`, a tensor for each rank to be filled, and an empty list on the others; or None on all.
            async_op: return a Request for the result.
        """
        self._check_tensor("tensor", tensor)
        root = self._check_rank("root", root)
        received: list[torch.Tensor | None] = [None] * self.size
        given = [form for (form,) in self._forms_of_all([tensor])] if out is None else out
        result = self._room(tensor, given) if self.rank == root else None
        received = received if result is None else list(result)
        sent = [tensor if rank == root else None for rank in range(self.size)]
        request = self._exchange(sent, received, tensor.device, lambda: result, async_op)
        return request if async_op else request.wait()

    @overload
    def allgather(
        self, tensor: torch.Tensor, *, out: Tensors | None = None, async_op: Literal[False] = False
    ) -> list[torch.Tensor]: ...
    @overload
    def allgather(
        self, tensor: torch.Tensor, *, out: Tensors | None = None, async_op: Literal[True]
    ) -> Request[list[torch.Tensor]]: ...
    def allgather(
        self, tensor: torch.Tensor, *, out: Tensors | None = None, async_op: bool = False
    ) -> list[torch.Tensor] | Request[list[torch.Tensor]]:
        """The tensors of all ranks, in rank order, on every rank.

        Args:
            tensor: this rank's; of one dtype everywhere.
            out: a tensor for each rank, filled and returned; on every rank or on none.
            async_op: return a Request for the result.
        """
        self._check_tensor("tensor", tensor)
        result = self._room(tensor, [form for (form,) in self._forms_of_all([tensor])] if out is None else out)
        request = self._share(tensor, result, async_op)
        return request if async_op else request.wait()

    @overload
    def alltoall(
        self,
        parts: torch.Tensor | Tensors,
        *,
        counts: Sequence[int] | None = None,
        out: Tensors | None = None,
        async_op: Literal[False] = False,
    ) -> list[torch.Tensor]: ...
    @overload
    def alltoall(
        self,
        parts: torch.Tensor | Tensors,
        *,
        counts: Sequence[int] | None = None,
        out: Tensors | None = None,
        async_op: Literal[True],
    ) -> Request[list[torch.Tensor]]: ...
    def alltoall(
        self,
        parts: torch.Tensor | Tensors,
        *,
        counts: Sequence[int] | None = None,
        out: Tensors | None = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | Request[list[torch.Tensor]]:
        """What every rank has for this one, in rank order.

        Args:
            parts: a tensor for each rank, or one tensor dealt out as by `scatter`; of one dtype everywhere.
            counts: as for `scatter`.
            out: a tensor for each rank, filled and returned; on every rank or on none.
            async_op: return a Request for the result.
        """
        sent = self._parts("parts", parts, counts)
        own = sent[self.rank]
        result = self._room(own, [forms[self.rank] for forms in self._forms_of_all(sent)] if out is None else out)
        request = self._exchange(sent, result, own.device, lambda: result, async_op)
        return request if async_op else request.wait()
