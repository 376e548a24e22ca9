"""Messages between two ranks of one host: a ring of fragments for each direction, and matching by
source and tag.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import TransportError
from ..runtime.backoff import Steps
from ..runtime.tensor_arguments import copy_back, flatten, is_plain
from .memory_layout import HEADER, LINE, RING, Layout
from .rank_states import ExchangeState, RankStates, memory_fence
from .segment import Segment
from .signatures import dtype_name, dtype_number


class Ring:
    """One direction of messages between two ranks.

    A counter of fragments written, one of fragments read, and the fragments; one side only writes,
    one only reads.

    Args:
        segment: the group's memory.
        layout: its division.
        state: the exchange state; the native one copies the data.
        source: the rank that writes.
        target: the rank that reads.
    """

    def __init__(
        self, segment: Segment, layout: Layout, state: Any, source: int, target: int
    ) -> None:
        self._native = None if isinstance(state, ExchangeState) else state
        self._offset = offset = layout.ring(source, target)
        self._words = segment.words
        self._written = offset >> 3
        self._read = (offset + LINE) >> 3
        starts = [offset + 2 * LINE + i * (HEADER + layout.fragment) for i in range(RING)]
        self._headers = [start >> 3 for start in starts]
        self._payloads = [
            segment.bytes[start + HEADER : start + HEADER + layout.fragment] for start in starts
        ]
        self._done = 0  # fragments that this side has written, or read

    @property
    def moved(self) -> int:
        """How many fragments this side has written, or read."""
        return self._done

    @property
    def full(self) -> bool:
        """Whether the writer has to wait."""
        return self._done - self._words[self._read] >= RING

    @property
    def empty(self) -> bool:
        """Whether the reader has to wait."""
        return self._words[self._written] <= self._done

    def put(self, tag: int, dtype: int, total: int, offset: int, data: torch.Tensor) -> bool:
        """Write a fragment of a message from a contiguous tensor; False if there is no room for it.

        Args:
            tag: of the message.
            dtype: the number of its dtype, see signatures.py.
            total: its bytes.
            offset: offset of the fragment in the message, in bytes.
            data: the fragment.
        """
        if self._native is not None:
            position = (self._offset, self._done)
            nbytes = data.nbytes
            if not self._native.put(*position, tag, dtype, total, offset, data.data_ptr(), nbytes):
                return False
            self._done += 1
            return True
        if self.full:
            return False
        memory_fence()  # the reader's counter is read before its fragment is overwritten
        index = self._done % RING
        flat = flatten(data).view(torch.uint8)
        for word, value in enumerate(
            (tag, dtype, total, offset, flat.numel()), self._headers[index]
        ):
            self._words[word] = value
        self._payloads[index][: flat.numel()].copy_(flat)
        memory_fence()  # the fragment is written before the counter that announces it
        self._done += 1
        self._words[self._written] = self._done
        return True

    def peek(self) -> tuple[int, int, int, int, torch.Tensor]:
        """Return tag, dtype number and size of the whole message, then the next fragment's offset
        in it and data.
        """
        memory_fence()  # the counter was read before; the fragment is read after it
        index = self._done % RING
        header = self._headers[index]
        tag, dtype, total, offset, length = self._words[header : header + 5]
        return tag, dtype, total, offset, self._payloads[index][:length]

    def pop(self) -> None:
        """Release the fragment to the writer."""
        memory_fence()  # the fragment is read before the writer may overwrite it
        self._done += 1
        self._words[self._read] = self._done

    def take_whole(self, tag: int, into: torch.Tensor) -> bool:
        """Read the next fragment if it is a whole message for the plain tensor `into`; native
        only.
        """
        if self._native is None:
            return False
        wanted = tag, dtype_number(into.dtype), into.data_ptr(), into.nbytes
        if not self._native.take(self._offset, self._done, *wanted):
            return False
        self._done += 1
        return True

    def spin(self, spins: int) -> None:
        """Spin for a fragment: so many polls, then some that yield the core. Only with the native
        extension.
        """
        if self._native is not None:
            self._native.spin(self._offset, self._done, spins)

    def copy(self, to: torch.Tensor, fragment: torch.Tensor) -> None:
        """Copy `fragment`, or a part of it, to other memory of the same size."""
        if self._native is not None:
            self._native.copy(to.data_ptr(), fragment.data_ptr(), fragment.nbytes)
        else:
            to.copy_(fragment)


class PostedReceive:
    """A receive that waits for its message.

    Attributes:
        source: the rank to receive from; None for any rank, and then the rank of the message once
            it is complete.
        tag: of the messages that it matches.
        tensor: to be filled.
        message: the message that it matches, as soon as its first fragment is there.
        received_directly: whether it got its message straight from the ring instead.
    """

    def __init__(self, tensor: torch.Tensor, source: int | None, tag: int) -> None:
        self.tensor = tensor
        self.source = source
        self.tag = tag
        self.message: _Message | None = None
        self.received_directly = False

    def get_source(self) -> int | None:
        """Return the rank that the message is from, or is expected from."""
        return self.source

    def matches(self, source: int, tag: int) -> bool:
        """Return whether a message from `source` with `tag` is for this receive."""
        return self.tag == tag and self.source in (None, source)


class _Message:
    """A message that is arriving, or has arrived before a receive was posted for it."""

    def __init__(self, source: int, tag: int, dtype: int, total: int, data: torch.Tensor) -> None:
        self.source = source
        self.tag = tag
        self.dtype = dtype
        self.total = total
        self.data = data
        self.received = 0
        self.abandoned = False

    @property
    def is_complete(self) -> bool:
        return self.abandoned or self.received == self.total


class MessageQueues:
    """Sends and receives of one rank in one group.

    Messages from one rank with one tag are received in the order in which they were sent. An
    unexpected message, for which no receive is posted, is read into memory of its own, so that it
    does not block those behind it.
    """

    def __init__(self, segment: Segment, layout: Layout, rank_states: RankStates) -> None:
        self._rank_states = rank_states
        self._fragment = layout.fragment
        self._others = [rank for rank in range(layout.ranks) if rank != rank_states.rank]
        self._send_rings = {
            rank: Ring(segment, layout, rank_states.state, rank_states.rank, rank)
            for rank in self._others
        }
        self._receive_rings = {
            rank: Ring(segment, layout, rank_states.state, rank, rank_states.rank)
            for rank in self._others
        }
        self._arriving: dict[int, _Message] = {}
        self._unexpected: list[_Message] = []
        self._posted: list[PostedReceive] = []
        # the collector may end a generator of `receive` while this thread holds it
        self._lock = threading.RLock()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Steps:
        """Write `tensor` into the ring to `target`; a message that the ring holds is sent before it
        is received.
        """
        ring = self._send_rings[target]
        data = flatten(tensor).view(torch.uint8)
        dtype = dtype_number(tensor.dtype)
        for start in range(0, max(data.numel(), 1), self._fragment):
            if ring.full:
                yield None
            while ring.full:
                yield lambda: (rank for rank in (target,) if ring.full)
            ring.put(tag, dtype, data.numel(), start, data[start : start + self._fragment])

    def try_send(self, tensor: torch.Tensor, target: int, tag: int) -> bool:
        """Send a contiguous `tensor` if the ring has room for all of it; whether it had."""
        nbytes = tensor.nbytes
        return nbytes <= self._fragment and self._send_rings[target].put(
            tag, dtype_number(tensor.dtype), nbytes, 0, tensor
        )

    def post(self, receive: PostedReceive) -> PostedReceive:
        """Queue `receive`, unless its message is there; of several that match a message, the first
        posted gets it.
        """
        with self._lock:
            for message in self._unexpected:
                if receive.matches(message.source, message.tag):
                    receive.message = message
                    self._unexpected.remove(message)
                    return receive
            if not self._receive_directly(receive):
                self._posted.append(receive)
        return receive

    def receive(self, receive: PostedReceive) -> Steps:
        """Wait until the message for the posted `receive` is in its tensor.

        Raises:
            TransportError: when the message has another dtype or size than the tensor.
        """
        try:
            while receive.message is None or not receive.message.is_complete:
                with self._lock:
                    if receive.received_directly or self._receive_directly(receive):
                        return
                    progressed = [self._read_fragment(source) for source in self._sources(receive)]
                if any(progressed):
                    yield None
                else:
                    yield lambda: self._awaited_ranks(receive)
        finally:
            self.cancel(receive)
        message = receive.message
        receive.source = message.source
        self._check(message, receive.tensor)
        if message.data.data_ptr() != receive.tensor.data_ptr():
            copy_back(message.data.view(receive.tensor.dtype), receive.tensor)

    def _check(self, message: _Message, into: torch.Tensor) -> None:
        sent = f"shm: rank {message.source} sent"
        wanted = into.numel() * into.element_size()
        if message.abandoned:
            raise TransportError(
                f"shm: rank {message.source} gave up its message (tag {message.tag}) halfway"
            )
        if message.dtype != dtype_number(into.dtype):
            raise TransportError(
                f"{sent} {dtype_name(message.dtype)} (tag {message.tag}), but rank "
                f"{self._rank_states.rank} receives into {dtype_name(dtype_number(into.dtype))}"
            )
        if message.total != wanted:
            raise TransportError(
                f"{sent} {message.total} bytes (tag {message.tag}), "
                f"but rank {self._rank_states.rank} receives into {wanted} bytes"
            )

    def count_moved(self) -> int:
        """Return how many fragments of messages this rank has written and read."""
        return sum(
            ring.moved
            for rings in (self._send_rings, self._receive_rings)
            for ring in rings.values()
        )

    def spin(self, receive: PostedReceive, spins: int) -> None:
        """Spin for a fragment from the source of `receive`, if it names one; see `Ring.spin`."""
        if receive.source is not None:
            self._receive_rings[receive.source].spin(spins)

    def _receive_directly(self, receive: PostedReceive) -> bool:
        """Read the message for `receive` straight from its ring, if it is there in one fragment;
        whether it was.
        """
        source = receive.source
        tag = receive.tag
        if (
            source is None
            or receive.message is not None
            or source in self._arriving
            or not is_plain(receive.tensor)
        ):
            return False
        for posted in self._posted:
            if posted is receive:
                break
            if posted.matches(source, tag):
                return False
        receive.received_directly = self._receive_rings[source].take_whole(tag, receive.tensor)
        if receive.received_directly and receive in self._posted:
            self._posted.remove(receive)
        return receive.received_directly

    def cancel(self, receive: PostedReceive) -> None:
        """Withdraw `receive`; a message that it has not received in full is matched to the next
        receive.
        """
        with self._lock:
            message = receive.message
            if receive in self._posted:
                self._posted.remove(receive)
            elif message is not None and not message.is_complete:
                message.data = message.data.clone()  # the tensor is its caller's again
                self._match(message)
                receive.message = None

    def _sources(self, receive: PostedReceive) -> Sequence[int]:
        """Return the ranks that the rest of the message may come from."""
        if receive.message is not None:
            return (receive.message.source,)
        return self._others if receive.source is None else (receive.source,)

    def _awaited_ranks(self, receive: PostedReceive) -> Iterator[int]:
        """Return the ranks that `receive` waits for; none when a fragment is there.

        A receive from any rank waits for ranks that have left in good order only when no other is
        left.
        """
        sources = self._sources(receive)
        if all(self._receive_rings[source].empty for source in sources):
            yield from [
                source for source in sources if not self._rank_states.has_left(source)
            ] or sources

    def _read_fragment(self, source: int) -> bool:
        """Read the next fragment from `source`; whether there was one."""
        ring = self._receive_rings[source]
        if ring.empty:
            return False
        tag, dtype, total, offset, data = ring.peek()
        message = self._arriving.get(source)
        if message is not None and message.received != offset:
            message.abandoned = True  # by its sender, halfway
        if message is None or message.abandoned:
            message = self._arriving[source] = self._begin_message(source, tag, dtype, total)
        ring.copy(message.data[message.received : message.received + data.numel()], data)
        ring.pop()
        message.received += data.numel()
        if message.is_complete:
            del self._arriving[source]
        return True

    def _begin_message(self, source: int, tag: int, dtype: int, total: int) -> _Message:
        receive = next((posted for posted in self._posted if posted.matches(source, tag)), None)
        into = None if receive is None else receive.tensor
        if (
            into is None
            or not is_plain(into)
            or (dtype_number(into.dtype), into.nbytes) != (dtype, total)
        ):
            data = torch.empty(total, dtype=torch.uint8)
        else:
            data = flatten(into).view(torch.uint8)
        message = _Message(source, tag, dtype, total, data)
        self._match(message)
        return message

    def _match(self, message: _Message) -> None:
        """Match `message` to the first posted receive that fits, or keep it as unexpected."""
        receive = next(
            (posted for posted in self._posted if posted.matches(message.source, message.tag)), None
        )
        if receive is None:
            self._unexpected.append(message)
        else:
            receive.message = message
            self._posted.remove(receive)
