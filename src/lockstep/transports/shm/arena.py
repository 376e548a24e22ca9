"""The halves of slots through which collectives exchange their chunks, as tensors."""

from __future__ import annotations

import torch

from ...errors import TransportError
from .board import Board
from .layout import Layout
from .segment import Segment
from .signs import dtype_number, sign_of
from .state import State
from .waiting import Steps

__all__ = ["Arena"]

_CACHE = 512  # views kept; making one costs about as much as copying 16 KiB


class Arena:
    """Slots as tensors, and when each half may be written again.

    Attributes:
        board: the ranks' counters.
        chunk: bytes in a slot.
        compiled: whether the compiled part is there.
        looks: how often it looks at the counters before it offers the core to others.
    """

    def __init__(self, segment: Segment, layout: Layout, board: Board, looks: int) -> None:
        self.board, self.rank, self.size = board, board.rank, layout.ranks
        self.chunk = layout.chunk
        self._segment, self._layout = segment, layout
        self.state, self.compiled, self.looks = board.state, type(board.state) is not State, looks
        self._kind = self._dtype = self._first = 0
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def claim(
        self, kind: int, dtype: torch.dtype, nbytes: int, ticks: int, ends_reading: bool, writes: bool = True
    ) -> Steps:
        """Take the next half for a chunk that will post `ticks` ticks, once all have read what was in it.

        Args:
            kind: the collective, of those in signs.py.
            dtype: of its tensors.
            nbytes: its size as the others are told; see `agree`.
            ticks: how many ticks each rank posts for this chunk.
            ends_reading: whether a rank's last post says that it has read the chunk. If not, it has read it by the
                next tick that it posts, whatever for.
            writes: whether this rank writes to the half; otherwise it need not wait for those who still read there.
        """
        state = self.state
        state.half ^= 1
        self._kind, self._dtype, self._first = kind, dtype_number(dtype), state.tick
        free_again = state.tick + ticks + (not ends_reading)
        if state.half:
            free_at, state.free_1 = state.free_1, free_again
        else:
            free_at, state.free_0 = state.free_0, free_again
        if writes:
            if not self.board.all_reached(free_at):
                yield from self.board.until_all(free_at)
            self.board.sign(self._sign(nbytes))

    def agree(self, rank: int, nbytes: int) -> None:
        """Raise TransportError unless `rank`, which has posted, is in the same collective with so many bytes."""
        self.board.agree(rank, self._sign(nbytes))

    def agree_all(self, nbytes: int) -> None:
        """The same of all ranks, each of which has posted."""
        for rank in range(self.size):
            self.agree(rank, nbytes)

    def difference(self, rank: int, told: int, expected: int) -> TransportError:
        """The error when `rank` has `told` another size than `expected`."""
        return self.board.difference(rank, self._sign(told), self._sign(expected))

    def _sign(self, nbytes: int) -> int:
        return sign_of(self._kind, self._dtype, self._first, nbytes)

    def write_sizes(self, sizes: list[int]) -> None:
        """Begin this rank's slot with these numbers."""
        for word, size in enumerate(sizes, self._layout.slot(self.state.half, self.rank) >> 3):
            self._segment.words[word] = size

    def read_sizes(self, rank: int, count: int) -> list[int]:
        """The first numbers in the slot of `rank`."""
        word = self._layout.slot(self.state.half, rank) >> 3
        return self._segment.words[word : word + count].tolist()

    def slots(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> list[torch.Tensor]:
        """The claimed half as tensors of `shape`: one for each rank, then the one for results.

        Args:
            shape: of each tensor.
            dtype: of each tensor.
            offset: where they begin in their slots, in bytes, a multiple of the size of an element.
        """
        key = (self.state.half, shape, dtype, offset)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _CACHE:
                self._views.clear()
            views = self._views[key] = self._make(shape, dtype, offset)
        return views

    def _make(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        starts = [self._layout.slot(self.state.half, rank) + offset for rank in range(self.size + 1)]
        return [self._segment.bytes[start : start + nbytes].view(dtype).view(shape) for start in starts]
