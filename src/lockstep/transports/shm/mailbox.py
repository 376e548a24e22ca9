"""Messages between two ranks: rings in shared memory, matched to receives by source and tag."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from ...errors import TransportError
from .arguments import is_plain
from .board import Board
from .layout import Layout
from .moving import flat_of, put_back
from .ring import Ring
from .segment import Segment
from .signs import dtype_name, dtype_number
from .waiting import Steps

__all__ = ["Mailbox", "Receive"]


class Receive:
    """A posted receive.

    Attributes:
        source: whom it is from; None for any rank, and then who it came from once it is complete.
        tag: which messages it takes.
        tensor: where the message goes.
        message: what it gets, as soon as some of it is there.
        caught: whether it got a message in one go instead.
    """

    def __init__(self, tensor: torch.Tensor, source: int | None, tag: int) -> None:
        self.tensor, self.source, self.tag = tensor, source, tag
        self.message: _Message | None = None
        self.caught = False

    def sender(self) -> int | None:
        """Whom the message is from, or is awaited from."""
        return self.source

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message from `source` with `tag` is for this receive."""
        return self.tag == tag and self.source in (None, source)


class _Message:
    """One that is arriving, or has arrived before anyone asked for it."""

    def __init__(self, source: int, tag: int, dtype: int, total: int, data: torch.Tensor) -> None:
        self.source, self.tag, self.dtype, self.total, self.data = source, tag, dtype, total, data
        self.received = 0
        self.broken_off = False

    @property
    def ended(self) -> bool:
        return self.broken_off or self.received == self.total


class Mailbox:
    """Sends and receives of one rank in one group.

    Messages from one rank with one tag are received in the order in which they were sent. A message for which no
    receive is posted is read into memory of its own, so that it does not stand in the way of those behind it.
    """

    def __init__(self, segment: Segment, layout: Layout, board: Board) -> None:
        self._board, self._fragment = board, layout.fragment
        self._others = [rank for rank in range(layout.ranks) if rank != board.rank]
        self._out = {rank: Ring(segment, layout, board.state, board.rank, rank) for rank in self._others}
        self._in = {rank: Ring(segment, layout, board.state, rank, board.rank) for rank in self._others}
        self._arriving: dict[int, _Message] = {}
        self._early: list[_Message] = []
        self._posted: list[Receive] = []
        self._lock = threading.RLock()  # the collector may end a generator of `receive` while this thread holds it

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Steps:
        """Write `tensor` into the ring to `target`; a message that the ring holds is sent before it is received."""
        ring, data, dtype = self._out[target], flat_of(tensor).view(torch.uint8), dtype_number(tensor.dtype)
        for start in range(0, max(data.numel(), 1), self._fragment):
            if ring.full:
                yield None
            while ring.full:
                yield lambda: (rank for rank in (target,) if ring.full)
            ring.put(tag, dtype, data.numel(), start, data[start : start + self._fragment])

    def send_now(self, tensor: torch.Tensor, target: int, tag: int) -> bool:
        """Send a contiguous `tensor` if the ring has room for all of it; whether it had."""
        nbytes = tensor.nbytes
        return nbytes <= self._fragment and self._out[target].put(tag, dtype_number(tensor.dtype), nbytes, 0, tensor)

    def post(self, receive: Receive) -> Receive:
        """Queue `receive`, unless its message is there; of several that fit a message, the one posted first gets it."""
        with self._lock:
            for message in self._early:
                if receive.takes(message.source, message.tag):
                    receive.message = message
                    self._early.remove(message)
                    return receive
            if not self._catch(receive):
                self._posted.append(receive)
        return receive

    def receive(self, receive: Receive) -> Steps:
        """Wait until the message for the posted `receive` is in its tensor.

        Raises:
            TransportError: when the message has another dtype or size than the tensor.
        """
        try:
            while receive.message is None or not receive.message.ended:
                with self._lock:
                    if receive.caught or self._catch(receive):
                        return
                    moved = [self._drain(source) for source in self._sources(receive)]
                if any(moved):
                    yield None
                else:
                    yield lambda: self._silent(receive)
        finally:
            self.withdraw(receive)
        message = receive.message
        receive.source = message.source
        self._check(message, receive.tensor)
        if message.data.data_ptr() != receive.tensor.data_ptr():
            put_back(message.data.view(receive.tensor.dtype), receive.tensor)

    def _check(self, message: _Message, into: torch.Tensor) -> None:
        said, wanted = f"shm: rank {message.source} sent", into.numel() * into.element_size()
        if message.broken_off:
            raise TransportError(f"shm: rank {message.source} gave up its message (tag {message.tag}) halfway")
        if message.dtype != dtype_number(into.dtype):
            raise TransportError(
                f"{said} {dtype_name(message.dtype)} (tag {message.tag}), "
                f"but rank {self._board.rank} receives into {dtype_name(dtype_number(into.dtype))}"
            )
        if message.total != wanted:
            raise TransportError(
                f"{said} {message.total} bytes (tag {message.tag}), "
                f"but rank {self._board.rank} receives into {wanted} bytes"
            )

    def linger(self, receive: Receive, looks: int) -> None:
        """Wait a moment for what comes from the source of `receive`, if it names one; see `Ring.wait`."""
        if receive.source is not None:
            self._in[receive.source].wait(looks)

    def _catch(self, receive: Receive) -> bool:
        """Take the message for `receive` out of its ring in one go, if it lies there whole; whether it did."""
        source, tag = receive.source, receive.tag
        if source is None or receive.message is not None or source in self._arriving or not is_plain(receive.tensor):
            return False
        for posted in self._posted:
            if posted is receive:
                break
            if posted.takes(source, tag):
                return False
        receive.caught = self._in[source].take(tag, receive.tensor)
        if receive.caught and receive in self._posted:
            self._posted.remove(receive)
        return receive.caught

    def withdraw(self, receive: Receive) -> None:
        """Let the message, where `receive` has not got all of it, be for the next that fits."""
        with self._lock:
            message = receive.message
            if receive in self._posted:
                self._posted.remove(receive)
            elif message is not None and not message.ended:
                message.data = message.data.clone()  # the tensor is its caller's again
                self._offer(message)
                receive.message = None

    def _sources(self, receive: Receive) -> Sequence[int]:
        """Whom what is still to come may come from."""
        if receive.message is not None:
            return (receive.message.source,)
        return self._others if receive.source is None else (receive.source,)

    def _silent(self, receive: Receive) -> Iterator[int]:
        """The awaited ranks; none when a fragment is there.

        A receive from any rank awaits one that has left in good order only when nobody else is left.
        """
        sources = self._sources(receive)
        if all(self._in[source].empty for source in sources):
            yield from [source for source in sources if not self._board.has_left(source)] or sources

    def _drain(self, source: int) -> bool:
        """Read the next fragment from `source`; whether there was one."""
        ring = self._in[source]
        if ring.empty:
            return False
        tag, dtype, total, offset, data = ring.head()
        message = self._arriving.get(source)
        if message is not None and message.received != offset:
            message.broken_off = True  # its sender has given it up halfway
        if message is None or message.broken_off:
            message = self._arriving[source] = self._begin(source, tag, dtype, total)
        ring.copy(message.data[message.received : message.received + data.numel()], data)
        ring.pop()
        message.received += data.numel()
        if message.ended:
            del self._arriving[source]
        return True

    def _begin(self, source: int, tag: int, dtype: int, total: int) -> _Message:
        receive = next((posted for posted in self._posted if posted.takes(source, tag)), None)
        into = None if receive is None else receive.tensor
        if into is None or not is_plain(into) or (dtype_number(into.dtype), into.nbytes) != (dtype, total):
            data = torch.empty(total, dtype=torch.uint8)
        else:
            data = flat_of(into).view(torch.uint8)
        message = _Message(source, tag, dtype, total, data)
        self._offer(message)
        return message

    def _offer(self, message: _Message) -> None:
        """Give `message` to the first posted receive that fits, or keep it for one to come."""
        receive = next((posted for posted in self._posted if posted.takes(message.source, message.tag)), None)
        if receive is None:
            self._early.append(message)
        else:
            receive.message = message
            self._posted.remove(receive)
