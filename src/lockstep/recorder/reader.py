"""Reads a rank's recording from outside, without disturbing it."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from .layout import DEPTH, HEADER, LANES, MAGIC, PHASES, RECORD, RING, TOLD, VERSION, WORDS, WORDS_BYTES, Layout, State
from .texts import read_text

__all__ = ["RankState", "Raw", "Record", "Recording", "batch_of", "open_job"]

_AT = State()


@dataclass(frozen=True, slots=True)
class Record:
    """One collective or message, as a rank has called it.

    Attributes:
        number: counts all of the rank's, from 1.
        what: e.g. ``all_reduce(float32[10, 4], sum)``.
        place: e.g. ``train.py:31 in main``.
        source: the text of that line.
        group: the group's name, "" for the one of all ranks.
        sequence: its number in the group, from 1; 0 for a message.
        batch: the batch that the rank was on; None outside loops over batches.
        finished: the rank's loop had ended, after `batch` batches.
        entered: when it was called, in seconds of the monotonic clock of the rank's machine.
        left: when it had ended; None where it has not, or nobody has asked.
        name: see `named`; "" without one.
    """

    number: int
    what: str
    place: str
    source: str
    group: str
    sequence: int
    batch: int | None
    finished: bool
    entered: float
    left: float | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """A record in numbers; see `Recorder.enter` and `layout.RECORD`."""

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
    place: int
    group: int
    name: int
    peer: int
    refused: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank does now.

    Attributes:
        rank, world_size, pid, host, program: who it is.
        phase: one of `layout.PHASES`: "runs", "waits" (inside a blocking call), "left" (has destroyed its groups),
            "ended", "raised".
        since: when that began, in seconds of the monotonic clock of its machine, as all times here.
        call: its last collective or message; in "waits" the one that it waits in. None before the first.
        batch: the batch that it is on; None outside loops over batches.
        finished: its loop has ended, after `batch` batches.
        records: number of collectives and messages so far.
        waited_s: seconds in blocking calls so far.
        started: when it began.
        samples: number of samples seen; None where nobody counts.
        heartbeat: when it has last shown that it lives.
        unix_offset: seconds to add to its times to get those since the epoch.
        words: the traceback of what it has raised, or "".
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
    started: float
    samples: int | None
    heartbeat: float
    unix_offset: float
    words: str


class Recording:
    """The recording in the file `path`, mapped for reading; also one whose rank has ended.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is none, is damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # ValueError for an empty one
        self.memory = memoryview(self._map)
        try:
            self._open(path)
        except ValueError:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        if len(self.memory) < HEADER.size or bytes(self.memory[:8]) != MAGIC:
            raise ValueError(f"{path} is no recording of Lockstep's")
        _, version, self.rank, self.world_size, self.pid, self.started, self.unix_offset, host, program = (
            HEADER.unpack_from(self.memory)
        )
        if version != VERSION:
            raise ValueError(f"{path} was recorded by another version of Lockstep")
        self.layout = Layout(self.world_size)
        if len(self.memory) != self.layout.total:
            raise ValueError(f"{path} is damaged: {len(self.memory)} bytes instead of {self.layout.total}")
        self.host, self.program = (_padded(text) for text in (host, program))
        self.words, self.reals = self.memory.cast("Q"), self.memory.cast("d")
        self._signed = self.memory.cast("q")
        self._lanes, self._rows = self.layout.lanes >> 3, self.layout.rows >> 3
        self._heads, self._ring = self.layout.heads >> 3, self.layout.ring

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        for name in ("words", "reals", "_signed", "memory"):
            view = self.__dict__.pop(name, None)
            if view is not None:
                view.release()
        with suppress(BufferError):
            self._map.close()

    def state(self) -> RankState:
        """What the rank does now."""
        words, reals = self.words, self.reals
        count, phase = words[_AT.records], words[_AT.phase]
        waits_in = words[_AT.since_record] if PHASES[phase % len(PHASES)] == "waits" else count
        raw = self.raw(waits_in)
        batch, finished = batch_of(self._signed[_AT.batch])
        samples = self._signed[_AT.samples]
        return RankState(
            self.rank,
            self.world_size,
            self.pid,
            self.host,
            self.program,
            self.phase,
            reals[_AT.since],
            None if raw is None else self.record(raw),
            batch,
            finished,
            count,
            reals[_AT.waited],
            self.started,
            None if samples < 0 else samples,
            reals[_AT.heartbeat],
            self.unix_offset,
            self.said(),
        )

    def records(self, last: int | None = None) -> list[Record]:
        """The last records, the oldest first; those that are overwritten meanwhile are left out."""
        return [self.record(raw) for raw in self.raws(last)]

    # in numbers

    @property
    def phase(self) -> str:
        """One of `layout.PHASES`."""
        return PHASES[self.words[_AT.phase] % len(PHASES)]

    def word(self, index: int) -> int:
        """One of the words of `layout.State`."""
        return int(self.words[index])

    def said(self) -> str:
        """The rank's last words."""
        length = min(self.words[WORDS >> 3], WORDS_BYTES - 8)
        return bytes(self.memory[WORDS + 8 : WORDS + 8 + length]).decode(errors="replace")

    def raws(self, last: int | None = None) -> Iterator[Raw]:
        """The last records, the oldest first."""
        count = self.words[_AT.records]
        for number in range(max(1, count + 1 - (RING if last is None else min(last, RING))), count + 1):
            raw = self.raw(number)
            if raw is not None:
                yield raw

    def raw(self, number: int) -> Raw | None:
        """The record of that number, while it is kept."""
        if not number:
            return None
        raw = Raw(*RECORD.unpack_from(self.memory, self._ring + number % RING * RECORD.size))
        return raw if raw.number == number else None

    def told(self, number: int) -> bytes:
        """The beginning of what stands in the place of the record of that number, see `layout.TOLD`."""
        at = self._ring + number % RING * RECORD.size
        return self._map[at : at + TOLD.size]

    def lane(self, key: int) -> int:
        """The lane of the group `key`; -1 where the rank has none."""
        for lane in range(LANES):
            if self.words[self._lanes + lane] == key:
                return lane
        return -1

    def has_lane(self, lane: int, key: int) -> bool:
        """Whether `lane` is (still) that of the group `key`."""
        return bool(self.words[self._lanes + lane] == key)

    def head(self, lane: int) -> int:
        """The sequence number to which the rank has come in that group."""
        return int(self.words[self._heads + lane])

    def limit_s(self, lane: int) -> float:
        """The seconds that the user lets a collective of that group take; 0 where he has not said."""
        return float(self.reals[(self.layout.limits >> 3) + lane])

    @property
    def is_alone(self) -> bool:
        """Whether the rank does what the others are meant to wait for."""
        return bool(self.words[_AT.alone])

    @property
    def knows_one_alone(self) -> bool:
        """Whether it does, or has heard of a rank on another machine that does."""
        return bool(self.words[_AT.alone] or self.words[_AT.alone_elsewhere])

    def row(self, lane: int, sequence: int) -> int:
        """The number of the record of the group's collective `sequence`, or of one `DEPTH` before or after; or 0."""
        return int(self.words[self._rows + lane * DEPTH + sequence % DEPTH])

    def messages(self, peer: int, sent: bool) -> int:
        """How many messages the rank has sent to `peer`, or has waited for from it."""
        start = self.layout.sent if sent else self.layout.received
        return int(self.words[(start >> 3) + peer])

    def text(self, number: int) -> str:
        """One of its texts."""
        return read_text(self.memory, self.layout.texts, number)

    def record(self, raw: Raw) -> Record:
        """The same in words."""
        place, _, source = self.text(raw.place).partition("\n")
        batch, finished = batch_of(raw.batch)
        return Record(
            raw.number,
            self.text(raw.what),
            place,
            source,
            self.text(raw.group),
            raw.sequence,
            batch,
            finished,
            raw.entered,
            raw.left or None,
            self.text(raw.name),
        )


def batch_of(number: int) -> tuple[int | None, bool]:
    """The batch that a record's `number` stands for, and whether its loop had ended after so many."""
    if number <= -2:
        return -2 - number, True
    return (None if number < 0 else number), False


def open_job(folder: Path) -> dict[int, Recording]:
    """All recordings of a job's folder by rank; those that cannot be read are left out."""
    found = {}
    with suppress(OSError):  # it is removed at this moment
        for path in folder.glob("rank-*"):
            if re.fullmatch(r"rank-\d+", path.name):
                with suppress(OSError, ValueError):
                    recording = Recording(path)
                    found[recording.rank] = recording
    return dict(sorted(found.items()))


def _padded(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
