"""The double-buffered slots through which collectives exchange their chunks, as tensors."""

from __future__ import annotations

import torch

from ...errors import TransportError
from ..runtime.backoff import Steps
from .memory_layout import Layout
from .rank_states import ExchangeState, RankStates
from .segment import Segment
from .signatures import KINDS, dtype_number, signature_of

_CACHE = 512  # views kept; making one costs about as much as copying 16 KiB


class ChunkBuffers:
    """Two halves of slots as tensors, and when each half may be written again.

    Attributes:
        rank_states: the ranks' counters.
        chunk: bytes in a slot.
        is_native: whether the native extension is used.
        spins: how often it polls the counters before it yields the core.
    """

    def __init__(
        self, segment: Segment, layout: Layout, rank_states: RankStates, spins: int
    ) -> None:
        self.rank_states = rank_states
        self.rank = rank_states.rank
        self.size = layout.ranks
        self.chunk = layout.chunk
        self._segment = segment
        self._layout = layout
        self.state = rank_states.state
        self.spins = spins
        self.is_native = type(self.state) is not ExchangeState
        self._kind = self._dtype = self._first_tick = 0
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def claim_half(
        self,
        kind: str,
        dtype: torch.dtype,
        nbytes: int,
        ticks: int,
        ends_reading: bool,
        writes: bool = True,
    ) -> Steps:
        """Take the next half for a chunk that will post `ticks` ticks, once all ranks have read its
        last chunk.

        Args:
            kind: the collective, a key of KINDS.
            dtype: of its tensors.
            nbytes: its size in the signature; see `check_signature`.
            ticks: how many ticks each rank posts for this chunk.
            ends_reading: whether a rank's last post means that it has read the chunk. If not, it
                has read it by the next tick that it posts, in whatever collective.
            writes: whether this rank writes to the half; otherwise it need not wait for those that
                still read there.
        """
        state = self.state
        state.half ^= 1
        self._kind = KINDS[kind]
        self._dtype = dtype_number(dtype)
        self._first_tick = state.tick
        free_again = state.tick + ticks + (not ends_reading)
        if state.half:
            free_at = state.free_1
            state.free_1 = free_again
        else:
            free_at = state.free_0
            state.free_0 = free_again
        if writes:
            if not self.rank_states.all_reached(free_at):
                yield from self.rank_states.wait_for_all(free_at)
            self.rank_states.write_signature(self._signature(nbytes))

    def check_signature(self, rank: int, nbytes: int) -> None:
        """Raise TransportError unless `rank`, which has posted, is in the same collective with so
        many bytes.
        """
        self.rank_states.check_signature(rank, self._signature(nbytes))

    def check_all_signatures(self, nbytes: int) -> None:
        """Check the signatures of all ranks, each of which has posted."""
        for rank in range(self.size):
            self.check_signature(rank, nbytes)

    def size_mismatch(self, rank: int, nbytes: int, expected: int) -> TransportError:
        """Return the error when `rank` has `nbytes` where this one expects another number of
        bytes.
        """
        return self.rank_states.mismatch_error(
            rank, self._signature(nbytes), self._signature(expected)
        )

    def _signature(self, nbytes: int) -> int:
        return signature_of(self._kind, self._dtype, self._first_tick, nbytes)

    def write_sizes(self, sizes: list[int]) -> None:
        """Write these numbers to the beginning of this rank's slot."""
        for word, size in enumerate(sizes, self._layout.slot(self.state.half, self.rank) >> 3):
            self._segment.words[word] = size

    def read_sizes(self, rank: int, count: int) -> list[int]:
        """Return the first numbers in the slot of `rank`."""
        word = self._layout.slot(self.state.half, rank) >> 3
        return self._segment.words[word : word + count].tolist()

    def slots(
        self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> list[torch.Tensor]:
        """Return the claimed half as tensors of `shape`: one for each rank, then the one for
        results.

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
            views = self._views[key] = self._make_views(shape, dtype, offset)
        return views

    def _make_views(
        self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, offset: int
    ) -> list[torch.Tensor]:
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        starts = [
            self._layout.slot(self.state.half, rank) + offset for rank in range(self.size + 1)
        ]
        return [
            self._segment.bytes[start : start + nbytes].view(dtype).view(shape) for start in starts
        ]
