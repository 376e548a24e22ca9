"""Writes one rank's recording: a few words and one record for each collective, in memory that others may read."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .layout import DEPTH, HEADER, LANES, MAGIC, PHASES, RECORD, RING, TOLD, VERSION, WORDS, WORDS_BYTES, Layout, State
from .places import rank_file
from .texts import Texts

__all__ = ["Call", "Recorder"]

_RUNS, _WAITS, _LEFT, _ENDED, _RAISED = range(len(PHASES))
_AT = State()
_AT_PHASE, _AT_SINCE, _AT_RECORD = _AT.phase, _AT.since, _AT.since_record  # those that every call needs
_AT_RECORDS, _AT_WAITED = _AT.records, _AT.waited
_LEFT_AT = RECORD.size - 4 - 5 * 4 - 8  # of the field that says when a collective was left


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective's record says beside where and when it was called.

    Attributes:
        fingerprint: of its operation, shapes, dtypes, reduction and root: 64 bits on which the ranks must agree.
        text: the same in words.
        number: of that text in the recording.
    """

    fingerprint: int
    text: str
    number: int


class Recorder:
    """The recording of this rank, which lies in `folder`.

    A writer never waits and never asks the system for anything.

    Args:
        folder: of the job on this machine; it must be there.
        rank: this rank in the job.
        world_size: number of ranks.
        host: name of this machine.
        program: what is run.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, host: str, program: str) -> None:
        self.rank, self.world_size, self.layout = rank, world_size, Layout(world_size)
        self.path, self.pid = rank_file(folder, rank), os.getpid()
        self._map = _make(self.path, self.layout.total)
        self._look_at(self._map)
        self._rows, self._ring, self._heads = self.layout.rows >> 3, self.layout.ring, self.layout.heads >> 3
        self.texts = Texts(self.memory, self.layout.texts)
        self.count = 0  # of records
        self.batch, self.loop = -1, 0
        self._lanes: list[int] = [0] * LANES  # the number of the use of each lane; the oldest left one is used again
        self._uses = 0
        now = time.monotonic()
        offset = time.time() - now
        names = host.encode(errors="replace")[:64], program.encode(errors="replace")[:256]
        for word, value in ((_AT.since, now), (_AT.heartbeat, now)):
            self.reals[word] = value
        self._signed[_AT.batch] = self._signed[_AT.samples] = -1
        HEADER.pack_into(self.memory, 0, MAGIC, VERSION, rank, world_size, self.pid, now, offset, *names)

    def _look_at(self, raw: mmap.mmap | bytearray) -> None:
        self._raw, self.memory = raw, memoryview(raw)
        self.words, self.reals, self._signed = self.memory.cast("Q"), self.memory.cast("d"), self.memory.cast("q")

    def close(self) -> None:
        """Let go of the memory; what is noted from here on nobody sees."""
        views = (self.words, self.reals, self._signed, self.memory)
        self._look_at(bytearray(self.layout.total))
        self.texts.memory = self.memory
        for view in views:
            view.release()
        self._map.close()

    # groups

    def open_lane(self, key: int, limit_s: float = 0.0) -> int:
        """Room for the group `key`; its number.

        Args:
            key: of the group.
            limit_s: seconds that the user lets its collectives take; 0 where he has not said.
        """
        lane = min(range(LANES), key=self._lanes.__getitem__)
        self._uses += 1
        self._lanes[lane] = self._uses + (1 << 62)
        self.words[(self.layout.lanes >> 3) + lane] = 0
        start = self._rows + lane * DEPTH
        for row in (*range(start, start + DEPTH), self._heads + lane):
            self.words[row] = 0
        self.allow(lane, limit_s)
        self.words[(self.layout.lanes >> 3) + lane] = key
        return lane

    def allow(self, lane: int, limit_s: float) -> None:
        """Note how many seconds the user lets a collective of that group take."""
        self.reals[(self.layout.limits >> 3) + lane] = limit_s

    def close_lane(self, lane: int) -> None:
        """The group has been left; others may still read what it has done, until the room is needed."""
        self._uses += 1
        self._lanes[lane] = self._uses

    # collectives

    def enter(
        self,
        key: int,
        lane: int,
        sequence: int,
        call: Call,
        line: int,
        place: int,
        group: int,
        name: int,
        peer: int,
        refused: int = 0,
        now: float = 0.0,
    ) -> int:
        """Note that a collective begins; returns the number of its record.

        Args:
            key: of its group.
            lane: of the group.
            sequence: its number in the group, from 1; 0 for a message, which has none.
            call: what it is.
            line: 64 bits made of the user's source line.
            place: number of the text of that line.
            group: number of the text of the group's name.
            name: number of the text of the name that the user has given the collective.
            peer: the other rank of a message, or -1.
            refused: how many calls of this group have been refused before.
            now: in seconds of the monotonic clock; read from it if 0.
        """
        self.count = number = self.count + 1
        at, now = self._ring + number % RING * RECORD.size, now or time.monotonic()
        told = number, key, sequence, call.fingerprint, line, self.batch, self.loop
        RECORD.pack_into(self.memory, at, *told, now, 0.0, call.number, place, group, name, peer, refused)
        words = self.words
        if sequence:
            words[self._rows + lane * DEPTH + sequence % DEPTH] = number
            words[self._heads + lane] = sequence
        words[_AT_RECORDS] = number
        return number

    def told(self, number: int) -> bytes | bytearray:
        """What of that record ranks agree on, beside its number; see `layout.TOLD`."""
        at = self._ring + number % RING * RECORD.size
        return self._raw[at + 8 : at + TOLD.size]

    def leave(self, number: int, now: float) -> None:
        """Note that the collective of that record has ended, unless that is known already."""
        at = (self._ring + number % RING * RECORD.size + _LEFT_AT) >> 3
        if number + RING > self.count and not self.words[at]:
            self.reals[at] = now

    def reopen(self, number: int) -> None:
        """Note that the collective of that record has not ended, as it seemed: it has failed."""
        self.reals[(self._ring + number % RING * RECORD.size + _LEFT_AT) >> 3] = 0.0

    def take_back(self, lane: int, sequence: int) -> None:
        """The group's last collective has been refused before anything was sent."""
        self.words[self._heads + lane] = sequence - 1
        self.words[self._rows + lane * DEPTH + sequence % DEPTH] = 0

    # the rank

    def wait(self, number: int, now: float) -> None:
        """Note that the rank is inside the blocking call of that record, since `now`."""
        words = self.words
        words[_AT_RECORD] = number
        self.reals[_AT_SINCE] = now
        words[_AT_PHASE] = _WAITS

    def run(self) -> float:
        """Note that it computes again; returns the time."""
        now, reals = time.monotonic(), self.reals
        self.words[_AT_PHASE] = _RUNS
        reals[_AT_WAITED] += now - reals[_AT_SINCE]
        reals[_AT_SINCE] = now
        return now

    def beat(self) -> None:
        """Note that the process is alive."""
        self.reals[_AT.heartbeat] = time.monotonic()

    def turn(self, phase: str) -> None:
        """Note another phase."""
        self.reals[_AT.since] = time.monotonic()
        self.words[_AT.phase] = PHASES.index(phase)

    @property
    def phase(self) -> str:
        """The phase that was noted last."""
        return PHASES[self.words[_AT.phase]]

    def note_batch(self, batch: int, loop: int) -> None:
        """Note the batch, -1 for none, and the loop over batches that it belongs to, 0 for none."""
        self.batch, self.loop = batch, loop
        self._signed[_AT.batch] = batch
        self.words[_AT.loop] = loop

    def note_samples(self, samples: int) -> None:
        """Note that so many more samples have been seen."""
        self._signed[_AT.samples] = max(0, self._signed[_AT.samples]) + samples

    def note(self, word: int, value: int) -> None:
        """Set one of the words of `State`."""
        self.words[word] = value

    def say(self, text: str) -> None:
        """Leave last words."""
        data = text.encode(errors="replace")[-(WORDS_BYTES - 8) :]
        self.words[WORDS >> 3] = 0
        self.memory[WORDS + 8 : WORDS + 8 + len(data)] = data
        self.words[WORDS >> 3] = len(data)

    def count_message(self, peer: int, sent: bool) -> None:
        """Note a message sent to `peer`, or waited for from it."""
        start = self.layout.sent if sent else self.layout.received
        self.words[(start >> 3) + peer] += 1


def _make(path: Path, size: int) -> mmap.mmap:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # in full: a file system without room is an error now and not a bus error later
        os.posix_fallocate(descriptor, 0, size)
        made = mmap.mmap(descriptor, size)
        draft.rename(path)
    except BaseException:
        draft.unlink()
        raise
    finally:
        os.close(descriptor)
    return made
