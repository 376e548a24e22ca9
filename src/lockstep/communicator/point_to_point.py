"""Messages between two workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .flat import dense, put_back, room_for
from .member import Member
from .requests import Request, Watched

__all__ = ["PointToPoint"]

_LARGEST_TAG = 2**31 - 1


class PointToPoint(Member):
    """`send`, `recv` and their kin.

    Messages from one rank to another with one tag arrive in the order in which they were sent. A tensor to be received
    has as many elements as the one that is sent, and its dtype. Messages to oneself are kept until they are received.
    """

    def send(self, tensor: torch.Tensor, dest: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dest`; when this returns, it may be changed again.

        A message may wait for its receiver: two ranks that send to each other first may wait for ever. See `sendrecv`.
        """
        self.isend(tensor, dest, tag).wait()

    def recv(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `source`, or from any other rank; return the rank it came from."""
        return self.irecv(tensor, source, tag).wait()

    def isend(self, tensor: torch.Tensor, dest: int, tag: int = 0) -> Request[None]:
        """Start `send`; `tensor` must not be changed before the request has ended."""
        dest = self._check_message(tensor, "dest", dest, tag)
        if dest == self.rank:
            self._loopback.send(dense(tensor), tag)
            return Request.ended(None)
        data = self._message(dense(tensor))
        work = dist.isend(data, group=self._connected(), tag=tag, group_dst=dest)
        return Request([_work(work, data)], _keeping(data))

    def irecv(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> Request[int]:
        """Start `recv`; the request gives the rank that the message came from."""
        peer = self._check_message(tensor, "source", source, tag) if source is not None else self._any(tensor, tag)
        room = room_for(tensor)
        if peer == self.rank:
            work: Any = self._loopback.receive(room, tag)
        else:
            work = dist.irecv(self._message(room), group=self._connected(), tag=tag, group_src=peer)

        def finish() -> int:
            put_back(room, tensor)
            return work._source_rank() if peer is None else peer

        return Request([_work(work, room)], finish)

    def sendrecv(
        self, tensor: torch.Tensor, dest: int, out: torch.Tensor, source: int | None = None, tag: int = 0
    ) -> int:
        """Send `tensor` to `dest` while receiving into `out` from `source`; return the rank that `out` came from.

        Either rank may be this one.
        """
        dest = self._check_message(tensor, "dest", dest, tag)
        if source is None or self.rank in (source, dest):
            receiving = self.irecv(out, source, tag)
            self.send(tensor, dest, tag)
            return receiving.wait()
        source = self._check_message(out, "source", source, tag)
        data, room = self._message(dense(tensor)), room_for(out)
        receive = dist.P2POp(dist.irecv, self._message(room), group=self._connected(), tag=tag, group_peer=source)
        send = dist.P2POp(dist.isend, data, group=self._connected(), tag=tag, group_peer=dest)
        for work in dist.batch_isend_irecv([receive, send]):  # together, as NCCL would carry one after the other
            work.wait()
        put_back(room, out)
        return source

    def _message(self, plain: torch.Tensor) -> torch.Tensor:
        """What travels; of an empty tensor one element without a meaning, as Gloo receives no empty messages."""
        data = self._moved(plain)
        return data if len(data) else data.new_zeros(1)

    def _check_message(self, tensor: Any, argument: str, rank: Any, tag: Any) -> int:
        self._check_tensor("tensor", tensor)
        if not 0 <= self._whole("tag", tag) <= _LARGEST_TAG:
            raise self._error("tag", f"0 to {_LARGEST_TAG}", tag)
        if tag and self._carriers.get(tensor.device.type) == "nccl":
            raise self._error("tag", "0, as NCCL does not tell messages apart", tag)
        return self._check_rank(argument, rank)

    def _any(self, tensor: torch.Tensor, tag: int) -> int | None:
        self._check_message(tensor, "source", self.rank, tag)
        if self._carriers.get(tensor.device.type) == "nccl" and self.size > 1:
            raise self._error("source", "a rank, as NCCL does not receive from any", None)
        return self.rank if self.size == 1 else None


def _work(work: Any, tensor: torch.Tensor) -> Any:
    # Gloo's messages are the works of c10d's own class that end only for one who waits
    return Watched(work) if type(work) is dist.Work and tensor.is_cpu else work


def _keeping(data: torch.Tensor) -> Callable[[], None]:
    return lambda kept=data: None  # type: ignore[misc]
