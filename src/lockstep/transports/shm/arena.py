"""The halves of slots through which collectives exchange their chunks, as tensors."""

from __future__ import annotations

import torch

from .board import Board
from .layout import Layout
from .segment import Segment
from .waiting import Steps

__all__ = ["Arena"]

_CACHE = 512  # views kept; making one costs about as much as copying 16 KiB


class Arena:
    """Slots as tensors, and when each half may be written again.

    Attributes:
        board: the ranks' counters.
        chunk: bytes in a slot.
    """

    def __init__(self, segment: Segment, layout: Layout, board: Board) -> None:
        self.board, self.rank, self.size = board, board.rank, layout.ranks
        self.chunk = layout.chunk
        self._segment, self._layout = segment, layout
        self.state = board.state
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def claim(self, ticks: int, ends_reading: bool) -> Steps:
        """Take the next half for a chunk that will post `ticks` ticks, once all have read what was in it.

        Args:
            ticks: how many ticks each rank posts for this chunk.
            ends_reading: whether a rank's last post says that it has read the chunk. If not, it has read it by the
                next tick that it posts, whatever for.
        """
        state = self.state
        state.half ^= 1
        free_again = state.tick + ticks + (not ends_reading)
        if state.half:
            free_at, state.free_1 = state.free_1, free_again
        else:
            free_at, state.free_0 = state.free_0, free_again
        if not self.board.all_reached(free_at):
            yield from self.board.until_all(free_at)

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
