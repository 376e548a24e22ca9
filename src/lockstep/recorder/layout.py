"""How a rank's recording is laid out in memory: who it is, what it does now, its last collectives (pure)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "DEPTH",
    "HEADER",
    "LANES",
    "MAGIC",
    "PHASES",
    "RECORD",
    "RING",
    "SLOTS",
    "SLOT_BYTES",
    "TOLD",
    "VERSION",
    "WORDS",
    "WORDS_BYTES",
    "Layout",
    "State",
]

MAGIC, VERSION = b"LOCKSTEP", 3

# magic, version, rank, world size, process, moment of the start, unix time minus the monotonic clock, host, program
HEADER = struct.Struct("<8sIIIIdd64s256s")

PHASES = ("runs", "waits", "left", "ended", "raised")
"""What a rank can be doing: computing, inside a blocking call; without its groups, at its end, or with an exception."""

RING = 512  # records kept
LANES = 64  # groups that a rank can be in at once; of those it has left, the oldest makes room
DEPTH = 128  # by so many collectives of one group one rank may be ahead of another and still be compared with it
SLOTS = 1024  # different texts kept: as many as the ring can need
SLOT_BYTES = 320

# number, group, sequence, fingerprint, line, batch, loop, entered, left, ids of four texts (what, line, group, name),
# peer of a message or -1, calls of the group before it that were refused
RECORD = struct.Struct("<QQQQQqQddIIIIiI")
TOLD = struct.Struct("<QQQQQqQ")  # the beginning of it, on most of which ranks agree


@dataclass(frozen=True, slots=True)
class State:
    """Indices of the 64-bit words that say what a rank does now."""

    phase: int = 64
    since: int = 65
    heartbeat: int = 66
    records: int = 67
    batch: int = 68
    loop: int = 69
    waited: int = 70
    samples: int = 71
    stack_signal: int = 72
    main_thread: int = 73
    threads: int = 74
    since_record: int = 75
    suspended: int = 76
    alone: int = 77
    alone_elsewhere: int = 78
    swap_group: int = 79  # the rank has gone on, in a loop, to what another has called just before; see `watch.swaps`
    swap: int = 80  # its sequence number


WORDS = 1024  # offset of a length and a text: a rank's last words
WORDS_BYTES = 15 << 10


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes. Attributes: world_size, number of ranks of the job."""

    world_size: int

    @property
    def lanes(self) -> int:
        """Of the keys of groups, one word each."""
        return WORDS + WORDS_BYTES

    @property
    def heads(self) -> int:
        """Of the sequence numbers to which the groups have come, one word each."""
        return self.lanes + 8 * LANES

    @property
    def limits(self) -> int:
        """Of the seconds that the user lets a collective of the groups take, one word each; 0 where he has not said."""
        return self.heads + 8 * LANES

    @property
    def rows(self) -> int:
        """Of the numbers of records by group and sequence number, `DEPTH` words for each group."""
        return self.limits + 8 * LANES

    @property
    def ring(self) -> int:
        """Of the records."""
        return self.rows + 8 * LANES * DEPTH

    @property
    def texts(self) -> int:
        """Of the texts."""
        return self.ring + RING * RECORD.size

    @property
    def sent(self) -> int:
        """Of the numbers of messages sent to each rank."""
        return self.texts + SLOTS * SLOT_BYTES

    @property
    def received(self) -> int:
        """Of the numbers of messages that were received, or are waited for, from each rank."""
        return self.sent + 8 * self.world_size

    @property
    def total(self) -> int:
        """Size of all."""
        return self.received + 8 * self.world_size
