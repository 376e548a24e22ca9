"""The memory layout of a rank's flight recorder, and where the files of a user's flight recorders
are.
"""

from __future__ import annotations

import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"LOCKSTEP"
VERSION = 5

# magic, version, rank, world size, process id, start time, Unix time minus the monotonic clock,
# host, program
HEADER = struct.Struct("<8sIIIIdd64s256s")

PHASES = ("runs", "waits", "left", "ended", "raised")
"""What a rank is doing: it computes, waits in a blocking call, has destroyed its groups, has
exited, or has raised.
"""

RING = 512  # records in the ring buffer
# groups that a rank can be in at once; the slot of the group that was destroyed first is reused
# first
GROUP_SLOTS = 64
# a rank can be this many collectives of a group ahead of another and still be compared with it
DEPTH = 128
TEXT_SLOTS = 1024  # distinct texts kept: as many as the records in the ring can refer to
TEXT_SLOT_BYTES = 320
CHANNEL_SIZES = 8  # sizes of messages that are kept for each channel; see `Layout.channels`
CHANNEL_WORDS = 2 + CHANNEL_SIZES

# number, group key, sequence number, fingerprint, line digest, batch, loop, time entered, time
# left, ids of four texts (what, call site, group, name), peer of a message or -1, earlier calls of
# the group that the backend rejected, tag of a message
RECORD = struct.Struct("<QQQQQqQddIIIIiIq")
# its first fields; all but the first are compared between ranks
COMPARED = struct.Struct("<QQQQQqQ")


@dataclass(frozen=True, slots=True)
class StateWords:
    """Indices of the 64-bit words that hold a rank's current state."""

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
    solo: int = 77
    solo_elsewhere: int = 78
    swap_group: int = (
        79  # group of the collective that may have been swapped with the one before; see `mismatch`
    )
    swap: int = 80  # sequence number of that collective
    waited_in_messages: int = 81
    activity: int = (
        82  # number of the text that says what the program is doing, see `writer.activity`
    )
    activity_is_own: int = 83
    # parts of messages that have moved; those of a large one may move though no receive is posted
    moved: int = 84
    lost_channels: int = 85  # channels for which the table of channels had no room
    steps: int = 86  # training steps that this rank has completed since the record was made
    step: int = 87  # steps of the training so far, those before a resume included
    data_wait: int = 88  # seconds of waiting for batches
    productive: int = 89  # seconds from the beginning of loading a batch to the end of its step
    tokens_per_sample: int = 90  # 0 where it is not known


TRACEBACK = (
    1024  # offset of a length and a text: the traceback of the exception that ended the rank
)
TRACEBACK_BYTES = 15 << 10


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes.

    Attributes:
        world_size: number of ranks of the job.
    """

    world_size: int

    @property
    def group_keys(self) -> int:
        """Offset of the group keys, one word for each slot."""
        return TRACEBACK + TRACEBACK_BYTES

    @property
    def last_sequences(self) -> int:
        """Offset of the sequence numbers of the groups' last collectives, one word for each
        slot.
        """
        return self.group_keys + 8 * GROUP_SLOTS

    @property
    def limits(self) -> int:
        """Offset of the timeouts (seconds) that the user has set for the groups, one word for each
        slot; 0 for none.
        """
        return self.last_sequences + 8 * GROUP_SLOTS

    @property
    def record_numbers(self) -> int:
        """Offset of the record numbers by group slot and sequence number, `DEPTH` words for each
        slot.
        """
        return self.limits + 8 * GROUP_SLOTS

    @property
    def ring(self) -> int:
        """Offset of the ring buffer of records."""
        return self.record_numbers + 8 * GROUP_SLOTS * DEPTH

    @property
    def texts(self) -> int:
        """Offset of the text table."""
        return self.ring + RING * RECORD.size

    @property
    def sent(self) -> int:
        """Offset of the counts of messages sent to each rank."""
        return self.texts + TEXT_SLOTS * TEXT_SLOT_BYTES

    @property
    def received(self) -> int:
        """Offset of the counts of receives posted for each rank."""
        return self.sent + 8 * self.world_size

    @property
    def members(self) -> int:
        """Offset of the members of the groups, one bit for each rank; `member_words` words for each
        slot.
        """
        return self.received + 8 * self.world_size

    @property
    def member_words(self) -> int:
        """Number of words that hold a bit for each rank."""
        return (self.world_size + 63) // 64

    @property
    def channels(self) -> int:
        """Offset of the hash table of channels, `CHANNEL_WORDS` words for each of them.

        A channel is what keeps messages in order: group, source, destination and tag; sends and
        receives are two. The words are the channel's key (0 for none), the number of its messages,
        and the sizes of the last of them in bytes, that of message n in word 2 + n %
        `CHANNEL_SIZES`.
        """
        return self.members + 8 * self.member_words * GROUP_SLOTS

    @property
    def channel_slots(self) -> int:
        """Number of channels in the table, a quarter of which stay free so that searches are
        short.
        """
        return 512 + 4 * self.world_size

    @property
    def total(self) -> int:
        """Size in bytes."""
        return self.channels + 8 * CHANNEL_WORDS * self.channel_slots


# Of a text in a recording: written once, then known by a number; the oldest make room.
_HEAD = struct.Struct("<QI")
_ROOM = TEXT_SLOT_BYTES - _HEAD.size


class TextTable:
    """Interns texts in the flight recorder's memory.

    Args:
        memory: of the flight recorder.
        start: offset of the table.
    """

    def __init__(self, memory: memoryview, start: int) -> None:
        self.memory = memory
        self._start = start
        self.on_wraparound: Callable[[], None] = (
            do_nothing  # called when cached numbers may soon refer to overwritten texts
        )
        self._numbers: dict[str, int] = {}
        self._next = 1  # 0 is the empty text
        # the watchdog's thread writes texts as well, and that of the backward pass
        self._lock = threading.RLock()

    def intern(self, text: str) -> int:
        """Return the number by which readers find `text`; any thread may call this."""
        if not text:
            return 0
        number = self._known(text)
        if number is not None:
            return number
        with self._lock:
            number = self._known(text)
            return self._write(text) if number is None else number

    def _known(self, text: str) -> int | None:
        """Return the number of a text that is in the table and not about to be overwritten."""
        number = self._numbers.get(text)
        is_kept = number is not None and self._next - number < TEXT_SLOTS // 2
        return number if is_kept else None

    def _write(self, text: str) -> int:
        if self._next % (TEXT_SLOTS // 2) == 0:
            self._numbers = {
                known: number
                for known, number in self._numbers.items()
                if self._next - number < TEXT_SLOTS // 2
            }
            self.on_wraparound()
        number = self._next
        self._next += 1
        data = text.encode(errors="replace")[:_ROOM]
        at = self._start + number % TEXT_SLOTS * TEXT_SLOT_BYTES
        _HEAD.pack_into(self.memory, at, 0, 0)
        self.memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self.memory, at, number, len(data))
        self._numbers[text] = number
        return number


def read_text(memory: memoryview, start: int, number: int) -> str:
    """Return the text of that `number`; "?" if it has been overwritten or never existed."""
    if not number:
        return ""
    at = start + number % TEXT_SLOTS * TEXT_SLOT_BYTES
    stored, length = _HEAD.unpack_from(memory, at)
    if stored != number or length > _ROOM:
        return "?"
    return bytes(memory[at + _HEAD.size : at + _HEAD.size + length]).decode(errors="replace")


def do_nothing() -> None:
    """Do nothing, for a table that nobody caches numbers of."""


_SHM = Path("/dev/shm")


def parent() -> Path:
    """Return the parent of this user's folder of jobs: /dev/shm where there is one."""
    return _SHM if _SHM.is_dir() else Path(tempfile.gettempdir())


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the flight recorder of `rank` in a job's folder."""
    return folder / f"rank-{rank}"
