"""Writing this rank's flight recorder: its current state, a record for each collective, the batch,
and names.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .call_writer import LEFT_AT, make_call_writer
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
    TextTable,
    do_nothing,
    rank_file,
)

_AT = StateWords()
# those that each hook writes
_AT_ACTIVITY = _AT.activity
_AT_IS_OWN = _AT.activity_is_own
_AT_SOLO = _AT.solo
# those that each step writes
_AT_DATA_WAIT = _AT.data_wait
_AT_STEPS = _AT.steps
_AT_STEP = _AT.step
_AT_PRODUCTIVE = _AT.productive
_AT_TOKENS = _AT.tokens_per_sample
_SPARE_SLOTS = 8  # free ones; the slots of groups that are destroyed are reused in turn


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The signature of a collective: what all ranks of the group must call alike.

    Attributes:
        fingerprint: 64-bit digest of its operation, shapes, dtypes, reduce op and root.
        text: the same as text.
        number: of that text in the text table.
    """

    fingerprint: int
    text: str
    number: int


class FlightRecorder:
    """The flight recorder of this rank, a file in `folder` that is mapped into memory.

    Writing never blocks and makes no system call.

    Args:
        folder: of the job on this host; it must exist.
        rank: this rank in the job.
        world_size: number of ranks.
        host: name of this host.
        program: command line of the job.

    Attributes:
        calls: writes the records of calls.
        leave, begin_wait, end_wait, agrees: methods of `calls`, see `CallWriter`.

    Raises:
        OSError: there is no space for the file.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, host: str, program: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.layout = Layout(world_size)
        self.path = rank_file(folder, rank)
        self.pid = os.getpid()
        self._map = _make(self.path, self.layout.total)
        self._set_views(self._map)
        self._record_numbers = self.layout.record_numbers >> 3
        self._ring = self.layout.ring
        self._last_sequences = self.layout.last_sequences >> 3
        self.calls = make_call_writer(self.memory, self.layout)
        self.leave: Callable[[int, float], None] = self.calls.leave
        self.begin_wait: Callable[[int, float], None] = self.calls.begin_wait
        self.end_wait: Callable[[float], None] = self.calls.end_wait
        self.agrees: Callable[[int, int, tuple[memoryview, ...]], bool] = self.calls.agrees
        self.texts = TextTable(self.memory, self.layout.texts)
        self._loading_since = 0.0  # of the last batch; 0.0 if it was loaded elsewhere
        self._slots: list[int] = [
            0
        ] * GROUP_SLOTS  # when each slot was used last; the oldest closed one is reused
        self._uses = 0
        self._channels: dict[
            int, int
        ] = {}  # word in which each channel begins, by its key; 0 for one without room
        now = time.monotonic()
        offset = time.time() - now
        names = host.encode(errors="replace")[:64], program.encode(errors="replace")[:256]
        for word, value in ((_AT.since, now), (_AT.heartbeat, now)):
            self.floats[word] = value
        self._signed[_AT.batch] = self._signed[_AT.samples] = -1
        HEADER.pack_into(
            self.memory, 0, MAGIC, VERSION, rank, world_size, self.pid, now, offset, *names
        )

    def _set_views(self, raw: mmap.mmap | bytearray) -> None:
        self._raw = raw
        self.memory = memoryview(raw)
        self.uints = self.memory.cast("Q")
        self.floats = self.memory.cast("d")
        self._signed = self.memory.cast("q")

    def close(self) -> None:
        """Unmap the memory; later writes are discarded."""
        views = (self.uints, self.floats, self._signed, self.memory)
        self._set_views(bytearray(self.layout.total))
        self.calls.attach(self.memory)
        self.texts.memory = self.memory
        self.texts.on_wraparound = do_nothing  # the table and who caches its numbers form a cycle
        for view in views:
            view.release()
        self._map.close()

    # groups

    def open_group(self, key: int, limit_s: float = 0.0, ranks: Sequence[int] = ()) -> int:
        """Assign a slot to the group `key` and return its number.

        Args:
            key: of the group.
            limit_s: timeout in seconds that the user has set for the group; 0 for none.
            ranks: its members; they are not recorded where few slots are left.
        """
        slot = min(range(GROUP_SLOTS), key=self._slots.__getitem__)
        self._uses += 1
        self._slots[slot] = self._uses + (1 << 62)
        self.uints[(self.layout.group_keys >> 3) + slot] = 0
        start = self._record_numbers + slot * DEPTH
        for row in (*range(start, start + DEPTH), self._last_sequences + slot):
            self.uints[row] = 0
        self.set_limit(slot, limit_s)
        # of a rank whose slot has been reused nobody can tell whether it has ever made the group
        is_kept = sum(use < 1 << 62 for use in self._slots) >= _SPARE_SLOTS
        self._set_members(slot, ranks if is_kept else ())
        self.uints[(self.layout.group_keys >> 3) + slot] = key
        return slot

    @property
    def has_free_slot(self) -> bool:
        """Whether `open_group` takes a slot that no open group has."""
        return min(self._slots) < 1 << 62

    def _set_members(self, slot: int, ranks: Sequence[int]) -> None:
        words = [0] * self.layout.member_words
        for rank in ranks:
            words[rank // 64] |= 1 << rank % 64
        start = (self.layout.members >> 3) + slot * len(words)
        for index, word in enumerate(words):
            self.uints[start + index] = word

    def set_limit(self, slot: int, limit_s: float) -> None:
        """Set the timeout in seconds of the group in `slot`."""
        self.floats[(self.layout.limits >> 3) + slot] = limit_s

    def close_group(self, slot: int) -> None:
        """Release the slot of a destroyed group; its records stay readable until the slot is
        reused.
        """
        self._uses += 1
        self._slots[slot] = self._uses

    # collectives

    def enter(
        self,
        key: int,
        slot: int,
        sequence: int,
        call: CallSignature,
        line: int,
        call_site: int,
        group: int,
        name: int,
        peer: int,
        rejected: int = 0,
        now: float = 0.0,
        tag: int = 0,
        loop: int | None = None,
    ) -> int:
        """Record the start of a collective or message and return the number of its record.

        Args:
            key: of its group.
            slot: of the group.
            sequence: sequence number in the group, from 1; 0 for a message.
            call: its signature.
            line: 64-bit digest of the user's source line.
            call_site: number of the text of that line.
            group: number of the text of the group's name.
            name: number of the text of the name that the user gave the collective.
            peer: the other rank of a message, or -1.
            rejected: how many earlier calls of this group the backend has rejected.
            now: in seconds of the monotonic clock, which is read if this is 0.
            tag: of a message.
            loop: over batches, to which it belongs; 0 for none, None for the rank's current one.
        """
        number: int = self.calls.enter(
            key,
            slot,
            sequence,
            call.fingerprint,
            line,
            call.number,
            call_site,
            group,
            name,
            peer,
            rejected,
            now or time.monotonic(),
            tag,
            loop,
        )
        return number

    @property
    def count(self) -> int:
        """The number of records."""
        return int(self.uints[_AT.records])

    @property
    def batch(self) -> int:
        """The current batch, -1 for none; see `note_batch`."""
        return int(self._signed[_AT.batch])

    @property
    def loop(self) -> int:
        """The loop over batches that it belongs to, 0 for none."""
        return int(self.uints[_AT.loop])

    def set_sequence(self, slot: int, sequence: int) -> None:
        """Note that the rank has begun that collective of a group, which is not recorded."""
        self.uints[self._last_sequences + slot] = sequence

    def compared_bytes(self, number: int) -> bytes | bytearray:
        """Return the fields of that record that ranks compare; see `layout.COMPARED`."""
        at = self._ring + number % RING * RECORD.size
        return self._raw[at + 8 : at + COMPARED.size]

    def reopen(self, number: int) -> None:
        """Mark that record's collective as pending again: it has not completed but failed."""
        self.floats[(self._ring + number % RING * RECORD.size + LEFT_AT) >> 3] = 0.0

    def cancel_call(self, slot: int, sequence: int) -> None:
        """Remove the group's last collective, which the backend rejected before anything was
        sent.
        """
        self.uints[self._last_sequences + slot] = sequence - 1
        self.uints[self._record_numbers + slot * DEPTH + sequence % DEPTH] = 0

    # state of the rank

    def add_message_wait(self, seconds: float) -> None:
        """Count `seconds` of a wait that has just ended as a wait in a point-to-point message."""
        self.floats[_AT.waited_in_messages] += seconds

    def record_heartbeat(self) -> None:
        """Record that the process is alive."""
        self.floats[_AT.heartbeat] = time.monotonic()

    def set_phase(self, phase: str) -> None:
        """Record another phase, one of `layout.PHASES`."""
        self.floats[_AT.since] = time.monotonic()
        self.uints[_AT.phase] = PHASES.index(phase)

    @property
    def phase(self) -> str:
        """The current phase, one of `layout.PHASES`."""
        return PHASES[self.uints[_AT.phase]]

    def note_batch(self, batch: int, loop: int) -> None:
        """Record the batch, -1 for none, and the loop over batches that it belongs to, 0 for
        none.
        """
        self._signed[_AT.batch] = batch
        self.uints[_AT.loop] = loop

    def note_samples(self, samples: int) -> None:
        """Count `samples` more samples."""
        self._signed[_AT.samples] = max(0, self._signed[_AT.samples]) + samples

    def note_data_wait(self, began: float, ended: float) -> None:
        """Count the time in which the program has waited for a batch, by the monotonic clock."""
        self._loading_since = began
        self.floats[_AT_DATA_WAIT] += ended - began

    def note_step(self, step: int | None = None) -> None:
        """Count a step that is complete, with the time since its batch was asked for.

        Args:
            step: the number of steps of the training so far; None for those that were counted here.
        """
        count = self.uints[_AT_STEPS] + 1
        self.uints[_AT_STEPS] = count
        self.uints[_AT_STEP] = count if step is None else step
        if self._loading_since:
            self.floats[_AT_PRODUCTIVE] += time.monotonic() - self._loading_since
            self._loading_since = 0.0
        self.floats[_AT_TOKENS] = current.tokens_per_sample

    def set_word(self, word: int, value: int) -> None:
        """Set one of the state words; see `layout.StateWords`."""
        self.uints[word] = value

    def write_traceback(self, text: str) -> None:
        """Record the traceback of the exception that ends the rank."""
        data = text.encode(errors="replace")[-(TRACEBACK_BYTES - 8) :]
        self.uints[TRACEBACK >> 3] = 0
        self.memory[TRACEBACK + 8 : TRACEBACK + 8 + len(data)] = data
        self.uints[TRACEBACK >> 3] = len(data)

    def count_message(self, peer: int, sent: bool, channel: int, size: int) -> int:
        """Count a message sent to `peer`, or a receive posted for it; return how many the channel
        has had with it.

        Args:
            peer: the other rank; -1 for a receive from any rank.
            sent: whether it is sent.
            channel: key of its channel, not 0; see `Layout.channels`.
            size: its size in bytes.

        Returns:
            The number of the message in its channel, from 1; 0 if there is no room for the channel.
        """
        uints = self.uints
        if peer >= 0:
            uints[((self.layout.sent if sent else self.layout.received) >> 3) + peer] += 1
        at = self._channels.get(channel)
        if at is None:
            at = self._channels[channel] = self._open_channel(channel)
        if not at:
            return 0
        number = int(uints[at + 1]) + 1
        uints[at + 2 + number % CHANNEL_SIZES] = (
            size  # before the number, as others read it by that
        )
        uints[at + 1] = number
        return number

    def cancel_message(self, peer: int, sent: bool, channel: int) -> None:
        """Take back the last message of `channel`, which the backend has rejected; see
        `count_message`.
        """
        if peer >= 0:
            self.uints[((self.layout.sent if sent else self.layout.received) >> 3) + peer] -= 1
        if at := self._channels.get(channel):
            self.uints[at + 1] -= 1

    @property
    def messages(self) -> int:
        """The number of messages that this rank has sent, or has posted a receive for."""
        first = self.layout.sent >> 3
        return int(sum(self.uints[first : first + 2 * self.layout.world_size]))

    def _open_channel(self, channel: int) -> int:
        slots = self.layout.channel_slots
        start = self.layout.channels >> 3
        if len(self._channels) >= slots * 3 // 4:
            self.uints[_AT.lost_channels] += 1
            return 0
        at = channel % slots
        while self.uints[start + at * CHANNEL_WORDS]:
            at = (at + 1) % slots
        self.uints[start + at * CHANNEL_WORDS] = channel
        return start + at * CHANNEL_WORDS


def _make(path: Path, size: int) -> mmap.mmap:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # allocate all blocks, so that a full file system is an error now and not a bus error later
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
        draft.rename(path)
    except BaseException:
        draft.unlink()
        raise
    finally:
        os.close(descriptor)
    return memory


class _Thread(threading.local):
    name = ""
    method = ""


class _Current:
    """The recorder of this process.

    Attributes:
        recorder: None if nothing is recorded.
        thread: thread-local; its `name` is that of the thread's collectives, "" for none, and its
            `method` the method of Lockstep that calls them, see `in_method`.
        tokens_per_sample: of the training; 0 if it is not known.
    """

    def __init__(self) -> None:
        self.recorder: FlightRecorder | None = None
        self.tokens_per_sample = 0.0
        self.thread = _Thread()


current = _Current()

_USER_LOOP = 1  # not a digest of a source line


def note_batch(number: int, finished: bool = False, loop: int = _USER_LOOP) -> None:
    """Record which batch this rank is on, so that the watchdog can name a rank that has skipped
    one.

    All ranks must be on the same batch when they take part in the same collective.

    Args:
        number: index of the batch, or if the loop has ended, the number of its batches. -1 for no
            batch.
        finished: whether the loop has ended.
        loop: identifies the loop over batches, 0 < loop < 2**64; batches of different loops are not
            compared.
    """
    if current.recorder is not None:
        current.recorder.note_batch(-2 - number if finished else number, loop if number >= 0 else 0)


def note_samples(number: int) -> None:
    """Count `number` more samples that this rank has processed."""
    if current.recorder is not None:
        current.recorder.note_samples(number)


def note_data_wait(began: float, ended: float) -> None:
    """Count a wait for a batch, from `began` to `ended` by the monotonic clock, in seconds."""
    if current.recorder is not None:
        current.recorder.note_data_wait(began, ended)


def note_step(step: int | None = None) -> None:
    """Count a step that this rank has completed; `step` is their number in the training so far."""
    if current.recorder is not None:
        current.recorder.note_step(step)


def recorded_exchanges() -> int | None:
    """Return how many collectives this process has called, and messages it has sent or received;
    None if they are not recorded.
    """
    recorder = current.recorder
    return None if recorder is None else recorder.count + recorder.messages


def recorded_collectives() -> int | None:
    """Return how many collectives this process has called; None if they are not recorded."""
    return None if current.recorder is None else current.recorder.count


@contextmanager
def solo_section() -> Iterator[None]:
    """A context in which this rank works while the others are meant to wait for it, however long
    that takes.
    """
    recorder = current.recorder
    word = StateWords().solo
    if recorder is not None:
        recorder.set_word(word, recorder.uints[word] + 1)
    try:
        yield
    finally:
        if recorder is not None:
            recorder.set_word(word, recorder.uints[word] - 1)


class activity:  # noqa: N801 - used like the functions here; a class, as it is entered several times a step
    """A context in which warnings about this rank say what it is doing.

    Args:
        text: follows "rank 0 is in", such as "the callback Curve.on_train_end".
        is_own: whether this is work of Lockstep's own that may take seconds, so that the first
            warning comes later.
        is_solo: whether it is also a `solo_section`.
    """

    __slots__ = ("_before", "_is_own", "_is_solo", "_recorder", "_text")

    def __init__(self, text: str, is_own: bool = False, is_solo: bool = False) -> None:
        self._text = text
        self._is_own = is_own
        self._is_solo = is_solo
        self._recorder = current.recorder

    def __enter__(self) -> None:
        if self._recorder is not None:
            words = self._recorder.uints
            self._before = words[_AT_ACTIVITY], words[_AT_IS_OWN], words[_AT_SOLO]
            words[_AT_ACTIVITY] = self._recorder.texts.intern(self._text)
            words[_AT_IS_OWN] = self._is_own
            words[_AT_SOLO] = self._before[2] + self._is_solo

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            words = self._recorder.uints
            words[_AT_ACTIVITY], words[_AT_IS_OWN], words[_AT_SOLO] = self._before


class named:  # noqa: N801 - used like the functions here; a class, as it is entered several times a step
    """A context in which the collectives of this thread have a name; different names on other ranks
    are an error.

    Args:
        name: as reports show it.
    """

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        thread = current.thread
        self._before = thread.name
        thread.name = f"{thread.method}: {self._name}" if thread.method else self._name

    def __exit__(self, *_: object) -> None:
        current.thread.name = self._before


@contextmanager
def in_method(method: str) -> Iterator[None]:
    """A context in which the names of this thread's collectives begin with a method that every rank
    must call.

    A report then says that a rank is in that method and another is not. Of nested methods the
    outermost counts, which is the one that the program has called.

    Args:
        method: as programs call it, such as "Trainer.evaluate".
    """
    thread = current.thread
    if thread.method:
        yield
        return
    before = thread.name
    thread.name = thread.method = method
    try:
        yield
    finally:
        thread.name = before
        thread.method = ""
