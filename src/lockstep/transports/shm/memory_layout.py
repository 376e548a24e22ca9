"""The layout of a group's shared memory on one host: control blocks, rings for messages, halves of
slots for collectives (pure).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError

# index of the first of two words of a control block: the signature of each half's last chunk
SIGNATURES = 6
LINE = 128  # bytes; two cache lines, because processors fetch lines in pairs
# bytes of each rank's control block: its counter and state in the first line, its error text in the
# rest
BLOCK = 512
RING = 4  # fragments that a sender may be ahead of its receiver
HEADER = 64  # bytes before the payload of a fragment, and of a slot in an all-to-all
# a chunk that stays in a core's own cache between being written and being read
MAX_CHUNK = 512 << 10
MAX_FRAGMENT = 256 << 10  # of a message; each ring has `RING` of them
PAGE = 4 << 10
MIN_FRAGMENT = 512  # several times its header; less would be mostly headers


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets and sizes in bytes.

    The memory holds, in this order: a control block for each rank; a ring for each ordered pair of
    ranks; two halves, each with a slot for each rank and one for results. A collective's chunks
    take the halves in turn, so that a rank may write the next chunk while others still read the
    last.
    """

    ranks: int
    chunk: int
    fragment: int

    @property
    def rings(self) -> int:
        """Offset of the rings."""
        return _round_up(self.ranks * BLOCK, PAGE)

    @property
    def ring_bytes(self) -> int:
        """Size of one ring: two counters (written; read), each on its own line, then the
        fragments.
        """
        return 2 * LINE + RING * (HEADER + self.fragment)

    @property
    def halves(self) -> int:
        """Offset of the two halves."""
        return _round_up(self.rings + self.ranks * self.ranks * self.ring_bytes, PAGE)

    @property
    def half_bytes(self) -> int:
        """Size of one half."""
        return (self.ranks + 1) * self.chunk

    @property
    def total(self) -> int:
        """Size of the whole memory."""
        return self.halves + 2 * self.half_bytes

    def control(self, rank: int) -> int:
        """Return the offset of the control block of `rank`."""
        return rank * BLOCK

    def ring(self, source: int, target: int) -> int:
        """Return the offset of the ring for messages from `source` to `target`."""
        return self.rings + (source * self.ranks + target) * self.ring_bytes

    def slot(self, half: int, rank: int) -> int:
        """Return the offset of the slot of `rank` in `half`; rank = ranks is the slot for
        results.
        """
        return self.halves + half * self.half_bytes + rank * self.chunk


def default_size(ranks: int) -> int:
    """Return the most bytes that a group of `ranks` takes by default: 64 MiB, or 4 MiB per rank if
    that is more.
    """
    return max(64 << 20, ranks * (4 << 20))


def plan(ranks: int, size: int) -> Layout:
    """Divide at most `size` bytes among `ranks`: three quarters for collectives, the rest for
    messages.

    Raises:
        ConfigError: when `size` is too small for that many ranks.
    """
    # a slot holds at least a line for each rank, and their sizes
    least_chunk = _round_up(2 * (ranks + 1) * HEADER, PAGE)
    least = Layout(ranks, least_chunk, MIN_FRAGMENT).total
    if size < least:
        raise ConfigError(
            "shm size",
            f"at least {least} bytes for {ranks} ranks on one host",
            size,
            "Set LOCKSTEP_SHM_SIZE, or ShmOptions(size=...), to more, or leave it unset.",
        )
    fragment = (size // 4) // (ranks * ranks * RING) - HEADER - LINE
    fragment = min(MAX_FRAGMENT, max(MIN_FRAGMENT, fragment // LINE * LINE))
    rest = size - Layout(ranks, 0, fragment).halves
    if rest < 2 * (ranks + 1) * least_chunk:
        fragment = MIN_FRAGMENT
        rest = size - Layout(ranks, 0, fragment).halves
    chunk = rest // (2 * (ranks + 1))
    return Layout(ranks, min(MAX_CHUNK, chunk // PAGE * PAGE), fragment)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
