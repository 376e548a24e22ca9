"""Reading a rank's flight recorder from any process of its host, without disturbing the rank."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from .layout import (
    CHANNEL_SIZES,
    CHANNEL_WORDS,
    COMPARED,
    DEPTH,
    GROUP_SLOTS,
    HEADER,
    MAGIC,
    PHASES,
    RECORD,
    RING,
    TRACEBACK,
    TRACEBACK_BYTES,
    VERSION,
    Layout,
    StateWords,
    read_text,
)

_AT = StateWords()
_RECORD_BYTES = RECORD.size
_COMPARED_BYTES = COMPARED.size


def describe(name: str, batch: int | None, what: str) -> str:
    """Return ``gradient all-reduce, batch 263: all_reduce(float32[10], sum)``; without a name,
    `what`.
    """
    of_batch = "" if batch is None else f", batch {batch}"
    return f"{name}{of_batch}: {what}" if name else what


@dataclass(frozen=True, slots=True)
class Record:
    """One collective or point-to-point message, as a rank called it.

    Attributes:
        number: index among all of the rank's calls, from 1.
        what: e.g. ``all_reduce(float32[10, 4], sum)``.
        call_site: e.g. ``train.py:31 in main``.
        source: the source text of that line.
        group: the group's name; "" for the default group.
        sequence: sequence number of the collective in its group, from 1; 0 for a message.
        batch: the batch that the rank was on; None outside loops over batches.
        finished: whether the rank's loop over batches had ended, after `batch` batches.
        entered: time of the call, in seconds of the monotonic clock of the rank's host.
        left: time of completion; None while the operation is pending or its completion was not
            observed.
        name: the name that the user gave it with `named`; "" for none.
        loop: the loop over batches that `batch` belongs to; 0 for none.
    """

    number: int
    what: str
    call_site: str
    source: str
    group: str
    sequence: int
    batch: int | None
    finished: bool
    entered: float
    left: float | None
    name: str = ""
    loop: int = 0

    @property
    def description(self) -> str:
        """What was called, with its name and its batch if it has a name."""
        return describe(self.name, None if self.finished else self.batch, self.what)


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it is stored, with numbers in place of texts; see `FlightRecorder.enter` and
    `layout.RECORD`.
    """

    number: int
    key: int
    sequence: int
    fingerprint: int
    line: int
    batch: int
    loop: int
    entered: float
    left: float
    what: int
    call_site: int
    group: int
    name: int
    peer: int
    rejected: int = 0
    tag: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """The current state of a rank.

    Attributes:
        rank, world_size, pid, host, program: identity of the rank.
        phase: one of `layout.PHASES`: "runs", "waits" (inside a blocking call), "left" (has
            destroyed its groups), "ended", "raised".
        since: when that phase began, in seconds of the monotonic clock of its host, as all times
            here.
        call: its last collective or message; in phase "waits", the one in which it waits. None
            before the first.
        batch: the batch that it is on; None outside loops over batches.
        finished: whether its loop has ended, after `batch` batches.
        records: number of collectives and messages so far.
        waited_s: total seconds in blocking calls.
        waited_in_messages_s: those of them in point-to-point messages.
        started: when the flight recorder was created.
        samples: number of samples processed; None if they are not counted.
        heartbeat: time of its last heartbeat.
        unix_offset: seconds to add to its times to get Unix time.
        traceback: of the exception that ended it; "" for none.
        activity: what its program is doing, such as "the callback Curve.on_train_end"; "" if that
            is not known.
        steps: number of training steps that it has completed.
        step: number of steps of its training so far, those before a resume included.
        data_wait_s: total seconds of waiting for batches.
        productive_s: total seconds in completed steps, waits for their batches included.
        tokens_per_sample: 0 if it is not known.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    program: str
    phase: str
    since: float
    call: Record | None
    batch: int | None
    finished: bool
    records: int
    waited_s: float
    waited_in_messages_s: float
    started: float
    samples: int | None
    heartbeat: float
    unix_offset: float
    traceback: str
    activity: str = ""
    steps: int = 0
    step: int = 0
    data_wait_s: float = 0.0
    productive_s: float = 0.0
    tokens_per_sample: float = 0.0

    def waited_until(self, now: float) -> float:
        """Return for how long it has been blocked in collectives and messages, until `now`."""
        return self.waited_s + (max(0.0, now - self.since) if self.phase == "waits" else 0.0)


class RecorderReader:
    """Reads the flight recorder in the file `path`, which is mapped into memory; its rank may have
    ended.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is not a flight recorder, is damaged, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # ValueError if the file is empty
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.memory = memoryview(self._map)
        try:
            self._open(path)
        except ValueError:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        if len(self.memory) < HEADER.size or bytes(self.memory[:8]) != MAGIC:
            raise ValueError(f"{path} is not a flight recorder of Lockstep")
        (
            _,
            version,
            self.rank,
            self.world_size,
            self.pid,
            self.started,
            self.unix_offset,
            host,
            program,
        ) = HEADER.unpack_from(self.memory)
        if version != VERSION:
            raise ValueError(f"{path} was written by another version of Lockstep")
        self.layout = Layout(self.world_size)
        if len(self.memory) != self.layout.total:
            raise ValueError(
                f"{path} is damaged: {len(self.memory)} bytes instead of {self.layout.total}"
            )
        self.host = host.rstrip(b"\0").decode(errors="replace")
        self.program = program.rstrip(b"\0").decode(errors="replace")
        self.uints = self.memory.cast("Q")
        self.floats = self.memory.cast("d")
        self._signed = self.memory.cast("q")
        self._slots = self.layout.group_keys >> 3
        self._record_numbers = self.layout.record_numbers >> 3
        self._last_sequences = self.layout.last_sequences >> 3
        self._ring = self.layout.ring

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        for name in ("uints", "floats", "_signed", "memory"):
            view = self.__dict__.pop(name, None)
            if view is not None:
                view.release()
        with suppress(BufferError):
            self._map.close()

    def state(self) -> RankState:
        """Return the rank's current state."""
        uints = self.uints
        floats = self.floats
        count = uints[_AT.records]
        phase = uints[_AT.phase]
        waits_in = uints[_AT.since_record] if PHASES[phase % len(PHASES)] == "waits" else count
        raw = self.raw(waits_in)
        batch, finished = decode_batch(self._signed[_AT.batch])
        samples = self._signed[_AT.samples]
        return RankState(
            self.rank,
            self.world_size,
            self.pid,
            self.host,
            self.program,
            self.phase,
            floats[_AT.since],
            None if raw is None else self.record(raw),
            batch,
            finished,
            count,
            floats[_AT.waited],
            floats[_AT.waited_in_messages],
            self.started,
            None if samples < 0 else samples,
            floats[_AT.heartbeat],
            self.unix_offset,
            self.traceback_text(),
            self.activity,
            uints[_AT.steps],
            uints[_AT.step],
            floats[_AT.data_wait],
            floats[_AT.productive],
            floats[_AT.tokens_per_sample],
        )

    def records(self, last: int | None = None) -> list[Record]:
        """Return the last records, the oldest first, without those that are overwritten
        meanwhile.
        """
        return [self.record(raw) for raw in self.raws(last)]

    # raw access

    @property
    def phase(self) -> str:
        """One of `layout.PHASES`."""
        return PHASES[self.uints[_AT.phase] % len(PHASES)]

    def state_word(self, index: int) -> int:
        """Return one of the state words; see `layout.StateWords`."""
        return int(self.uints[index])

    def traceback_text(self) -> str:
        """Return the traceback of the exception that ended the rank; "" for none."""
        length = min(self.uints[TRACEBACK >> 3], TRACEBACK_BYTES - 8)
        return bytes(self.memory[TRACEBACK + 8 : TRACEBACK + 8 + length]).decode(errors="replace")

    def raws(self, last: int | None = None) -> Iterator[RawRecord]:
        """Yield the last records, the oldest first."""
        count = self.uints[_AT.records]
        for number in range(
            max(1, count + 1 - (RING if last is None else min(last, RING))), count + 1
        ):
            raw = self.raw(number)
            if raw is not None:
                yield raw

    def raw(self, number: int) -> RawRecord | None:
        """Return the record of that number; None if it does not exist or has been overwritten."""
        if not number:
            return None
        raw = RawRecord(*RECORD.unpack_from(self.memory, self._ring + number % RING * RECORD.size))
        return raw if raw.number == number else None

    def compared_bytes(self, slot: int, key: int, sequence: int) -> bytes | None:
        """Return the fields that ranks compare, see `layout.COMPARED`, of the record in the
        position of the collective `sequence` of the group `key`; b"" if there is none, None if
        `slot` does not belong to that group.
        """
        uints = self.uints
        if slot < 0 or uints[self._slots + slot] != key:
            return None
        number = uints[self._record_numbers + slot * DEPTH + sequence % DEPTH]
        if not number:
            return b""
        at = self._ring + number % RING * _RECORD_BYTES
        return self._map[at + 8 : at + _COMPARED_BYTES]

    def group_slot(self, key: int) -> int:
        """Return the slot of the group `key`; -1 if the rank is not in that group."""
        for slot in range(GROUP_SLOTS):
            if self.uints[self._slots + slot] == key:
                return slot
        return -1

    def has_group(self, slot: int, key: int) -> bool:
        """Whether `slot` still belongs to the group `key`."""
        return bool(self.uints[self._slots + slot] == key)

    def last_sequence(self, slot: int) -> int:
        """Return the sequence number of the rank's last collective in that group."""
        return int(self.uints[self._last_sequences + slot])

    def members(self, slot: int) -> Iterator[int]:
        """Yield the ranks of that group."""
        start = (self.layout.members >> 3) + slot * self.layout.member_words
        for index in range(self.layout.member_words):
            word = self.uints[start + index]
            while word:
                lowest = word & -word
                yield 64 * index + lowest.bit_length() - 1
                word ^= lowest

    def limit_s(self, slot: int) -> float:
        """Return the timeout in seconds that the user has set for that group; 0 for none."""
        return float(self.floats[(self.layout.limits >> 3) + slot])

    @property
    def activity(self) -> str:
        """What the rank's program is doing, such as "the callback Curve.on_train_end"; "" if that
        is not known.
        """
        return self.text(self.uints[_AT.activity])

    @property
    def activity_is_own(self) -> bool:
        """Whether that is work of Lockstep's own that may take seconds."""
        return bool(self.uints[_AT.activity_is_own])

    @property
    def in_solo_section(self) -> bool:
        """Whether the rank is in a `solo_section`, for which the others are meant to wait."""
        return bool(self.uints[_AT.solo])

    @property
    def knows_of_solo_section(self) -> bool:
        """Whether the rank, or one on another host as far as this rank knows, is in a
        `solo_section`.
        """
        return bool(self.uints[_AT.solo] or self.uints[_AT.solo_elsewhere])

    def record_number(self, slot: int, sequence: int) -> int:
        """Return the record number of the group's collective `sequence`, or of one `DEPTH` before
        or after; or 0.
        """
        return int(self.uints[self._record_numbers + slot * DEPTH + sequence % DEPTH])

    def messages(self, peer: int, sent: bool) -> int:
        """Return how many messages the rank has sent to `peer`, or how many receives it has posted
        for it.
        """
        start = self.layout.sent if sent else self.layout.received
        return int(self.uints[(start >> 3) + peer])

    def channel(self, key: int) -> int:
        """Return the word in which the channel `key` begins, see `Layout.channels`; 0 if it has had
        no message.
        """
        slots = self.layout.channel_slots
        start = self.layout.channels >> 3
        at = key % slots
        for _ in range(slots):
            stored = self.uints[start + at * CHANNEL_WORDS]
            if stored == key:
                return start + at * CHANNEL_WORDS
            if not stored:
                return 0
            at = (at + 1) % slots
        return 0

    def channels(self, most: int) -> dict[int, int] | None:
        """Return the number of messages of each channel by its key; None if they are more than
        `most`, or not known.
        """
        if not self.knows_channels:
            return None
        words = self.uints[self.layout.channels >> 3 :]
        keys = words[::CHANNEL_WORDS].tolist()
        counts = {key: int(words[at * CHANNEL_WORDS + 1]) for at, key in enumerate(keys) if key}
        return counts if len(counts) <= most else None

    def channel_messages(self, key: int) -> int:
        """Return how many messages of the channel `key` the rank has sent, or posted receives
        for.
        """
        at = self.channel(key)
        return int(self.uints[at + 1]) if at else 0

    def channel_size(self, at: int, number: int) -> int | None:
        """Return the size in bytes of message `number` of the channel that begins in word `at`.

        Returns:
            None if the message has not been sent, or no receive posted, or that was too long ago.
        """
        last = self.uints[at + 1]
        if not last - CHANNEL_SIZES < number <= last:
            return None
        size = int(self.uints[at + 2 + number % CHANNEL_SIZES])
        return size if number > self.uints[at + 1] - CHANNEL_SIZES else None

    @property
    def knows_channels(self) -> bool:
        """Whether there was room for all channels of the rank."""
        return not self.uints[_AT.lost_channels]

    def text(self, number: int) -> str:
        """Return one of its texts."""
        return read_text(self.memory, self.layout.texts, number)

    def record(self, raw: RawRecord) -> Record:
        """Return the record with its texts."""
        call_site, _, source = self.text(raw.call_site).partition("\n")
        batch, finished = decode_batch(raw.batch)
        return Record(
            raw.number,
            self.text(raw.what),
            call_site,
            source,
            self.text(raw.group),
            raw.sequence,
            batch,
            finished,
            raw.entered,
            raw.left or None,
            self.text(raw.name),
            raw.loop,
        )


def decode_batch(number: int) -> tuple[int | None, bool]:
    """Return the batch that a record's `number` stands for, and whether its loop had ended after so
    many batches.
    """
    if number <= -2:
        return -2 - number, True
    return (None if number < 0 else number), False


def open_job(folder: Path) -> dict[int, RecorderReader]:
    """Open all flight recorders in a job's folder, by rank; those that cannot be read are left out.

    Experimental: may change in any release.
    """
    readers = {}
    with suppress(OSError):  # the folder is being removed
        for path in folder.glob("rank-*"):
            if re.fullmatch(r"rank-\d+", path.name):
                with suppress(OSError, ValueError):
                    reader = RecorderReader(path)
                    readers[reader.rank] = reader
    return dict(sorted(readers.items()))
