"""How parts of any shapes travel between all ranks, and how these tell each other the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import MismatchError
from .flat import ROW, Form, dense, fill
from .member import Member
from .requests import Request

__all__ = ["Exchange"]

T = TypeVar("T")


class Exchange(Member):
    """What the moving verbs are made of."""

    def _exchange(
        self,
        sent: Sequence[torch.Tensor | None],
        received: Sequence[torch.Tensor | None],
        device: torch.device,
        result: Callable[[], T],
        async_op: bool,
    ) -> Request[T]:
        """Send `sent[i]` to rank i while `received[i]` is filled from there; None stands for nothing.

        One all-to-all, in which most parts may be empty, is what every backend has for parts of any sizes.
        """
        if self.size == 1:
            if sent[0] is not None and received[0] is not None:
                received[0].detach().copy_(sent[0].detach())
            return Request.ended(result())
        one = self._moved(next(part.new_empty(1) for part in (*sent, *received) if part is not None))
        none = torch.empty(0, dtype=one.dtype, device=device)
        parts = [none if part is None else self._moved(dense(part)) for part in sent]
        coming = [0 if part is None else part.numel() * len(one) for part in received]
        data, room = torch.cat(parts), none.new_empty(sum(coming))
        going = [part.numel() for part in parts]
        work = dist.all_to_all_single(room, data, coming, going, group=self._connected(), async_op=async_op)

        def finish() -> T:
            for part, came in zip(received, torch.split(room, coming), strict=True):
                if part is not None:
                    fill(part, came)
            return result()

        return Request([work, _Held(data)], finish)

    def _share(self, tensor: torch.Tensor, outs: Sequence[torch.Tensor], async_op: bool) -> Request[list[torch.Tensor]]:
        """Fill `outs[i]` with rank i's `tensor`."""
        if self.size == 1:
            outs[0].detach().copy_(tensor.detach())
            return Request.ended(list(outs))
        mine, each = self._moved(dense(tensor)), len(self._moved(tensor.new_empty(1)))
        lengths = [out.numel() * each for out in outs]
        longest = max(lengths)  # backends want equal parts
        if len(mine) < longest:
            mine = torch.cat([mine, mine.new_empty(longest - len(mine))])
        rooms = list(mine.new_empty(self.size, longest).unbind())
        work = dist.all_gather(rooms, mine, group=self._connected(), async_op=async_op)

        def finish() -> list[torch.Tensor]:
            for out, room, length in zip(outs, rooms, lengths, strict=True):
                fill(out, room[:length])
            return list(outs)

        return Request([work, _Held(mine)], finish)

    def _form_from(self, root: int, held: Sequence[torch.Tensor]) -> Form:
        """The form of this rank's part of what rank `root` holds."""
        if self.size == 1:
            return Form.of(held[0])
        table = torch.zeros(self.size, ROW, dtype=torch.int64, device=self._side())
        if held:
            table.copy_(torch.tensor([Form.of(part).row() for part in held]))
        dist.broadcast(table, group=self._connected(), group_src=root)
        return Form.read(table[self.rank].tolist())

    def _forms_of_all(self, parts: Sequence[torch.Tensor]) -> list[list[Form]]:
        """The forms of all ranks' `parts`, of which each has as many.

        Raises:
            MismatchError: on every rank, when they are not of one dtype and kind of device.
        """
        own = [Form.of(part) for part in parts]
        if self.size == 1:
            return [own]
        mine = torch.tensor([form.row() for form in own], dtype=torch.int64, device=self._side())
        tables = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(tables, mine, group=self._connected())
        forms = [[Form.read(row) for row in table.tolist()] for table in tables]
        kinds = [str(each[0]) for each in forms]
        if len(set(kinds)) > 1:
            told = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise MismatchError(f"ranks pass tensors of different kinds to one collective ({told})")
        return forms

    def _room(self, like: torch.Tensor, given: Sequence[torch.Tensor] | Sequence[Form]) -> list[torch.Tensor]:
        """The tensors to be filled: those of the forms given, or those given, if they fit."""
        if len(given) > 0 and all(isinstance(each, Form) for each in given):
            return [form.blank(like.device) for form in cast("Sequence[Form]", given)]
        outs = self._check_alike("out", given, like)
        self._check_shape(f"out[{self.rank}]", outs[self.rank], like.shape)
        return outs


class _Held:
    """Keeps what is sent from being freed before it has been."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return
