"""One direction of messages between two ranks: fragments in shared memory, and how many are written and read."""

from __future__ import annotations

from typing import Any

import torch

from .fence import fence
from .layout import HEADER, LINE, RING, Layout
from .moving import flat_of
from .segment import Segment
from .signs import dtype_number
from .state import State

__all__ = ["Ring"]


class Ring:
    """A counter of fragments written, one of fragments read, and the fragments; one side only writes, one only reads.

    Args:
        segment: the group's memory.
        layout: its division.
        state: what does the copying if it is compiled.
        source: the rank that writes.
        target: the rank that reads.
    """

    def __init__(self, segment: Segment, layout: Layout, state: Any, source: int, target: int) -> None:
        self._native = None if isinstance(state, State) else state
        self._begin = begin = layout.ring(source, target)
        self.words, self.written, self.read = segment.words, begin >> 3, (begin + LINE) >> 3
        starts = [begin + 2 * LINE + i * (HEADER + layout.fragment) for i in range(RING)]
        self._headers = [start >> 3 for start in starts]
        self._payloads = [segment.bytes[start + HEADER : start + HEADER + layout.fragment] for start in starts]
        self._done = 0  # fragments this side has written, or read

    @property
    def full(self) -> bool:
        """Whether the writer has to wait."""
        return self._done - self.words[self.read] >= RING

    @property
    def empty(self) -> bool:
        """Whether the reader has to wait."""
        return self.words[self.written] <= self._done

    def put(self, tag: int, dtype: int, total: int, offset: int, data: torch.Tensor) -> bool:
        """Write a fragment of a message from a contiguous tensor; False if there is no room for it.

        Args:
            tag: of the message.
            dtype: the number of its dtype, see signs.py.
            total: its bytes.
            offset: where the fragment begins in it, in bytes.
            data: the fragment.
        """
        if self._native is not None:
            place, nbytes = (self._begin, self._done), data.nbytes
            if not self._native.put(*place, tag, dtype, total, offset, data.data_ptr(), nbytes):
                return False
            self._done += 1
            return True
        if self.full:
            return False
        fence()  # the reader's counter was seen before its fragment is written over
        index, flat = self._done % RING, flat_of(data).view(torch.uint8)
        for word, value in enumerate((tag, dtype, total, offset, flat.numel()), self._headers[index]):
            self.words[word] = value
        self._payloads[index][: flat.numel()].copy_(flat)
        fence()
        self._done += 1
        self.words[self.written] = self._done
        return True

    def head(self) -> tuple[int, int, int, int, torch.Tensor]:
        """Tag, number of the dtype and size of the whole message, and the next fragment with its place in it."""
        fence()
        index = self._done % RING
        header = self._headers[index]
        tag, dtype, total, offset, length = self.words[header : header + 5]
        return tag, dtype, total, offset, self._payloads[index][:length]

    def pop(self) -> None:
        """Let the writer have the fragment's place."""
        fence()
        self._done += 1
        self.words[self.read] = self._done

    def take(self, tag: int, into: torch.Tensor) -> bool:
        """Read the next fragment if it is a whole message for the plain tensor `into`; only with the compiled part."""
        if self._native is None:
            return False
        wanted = tag, dtype_number(into.dtype), into.data_ptr(), into.nbytes
        if not self._native.take(self._begin, self._done, *wanted):
            return False
        self._done += 1
        return True

    def wait(self, looks: int) -> None:
        """Wait a moment for a fragment: so many looks, then some that offer the core. Only with the compiled part."""
        if self._native is not None:
            self._native.wait(self._begin, self._done, looks)

    def copy(self, to: torch.Tensor, fragment: torch.Tensor) -> None:
        """Copy `fragment`, or a part of it, to other bytes of the same number."""
        if self._native is not None:
            self._native.copy(to.data_ptr(), fragment.data_ptr(), fragment.nbytes)
        else:
            to.copy_(fragment)
