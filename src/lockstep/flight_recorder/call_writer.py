"""Writes the records of calls, and in which of them the rank waits, into the flight recorder's
memory.

Several of these are written by every collective: the native extension does it in a fifth of the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from .layout import DEPTH, PHASES, RECORD, RING, Layout, StateWords

_native: ModuleType | None
try:
    _native = import_module("._native", __package__)
except ImportError:  # no compiler was found when the package was installed
    _native = None

_RUNS = PHASES.index("runs")
_WAITS = PHASES.index("waits")
# each collective writes these, and an attribute of the table would be looked up each time
_AT = StateWords()
_AT_PHASE = _AT.phase
_AT_SINCE = _AT.since
_AT_RECORDS = _AT.records
_AT_BATCH = _AT.batch
_AT_LOOP = _AT.loop
_AT_WAITED = _AT.waited
_AT_RECORD = _AT.since_record
_pack_record = RECORD.pack_into
_RECORD_BYTES = RECORD.size
LEFT_AT = RECORD.size - 8 - 4 - 5 * 4 - 8  # offset of the field `left` in a record


class CallWriter:
    """Writes the records of calls; the native type has the same methods, with arguments by
    position.

    Args:
        memory: of the flight recorder.
        layout: of the memory.
    """

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        self._record_numbers = layout.record_numbers >> 3
        self._last_sequences = layout.last_sequences >> 3
        self._ring = layout.ring
        self.attach(memory)

    def attach(self, memory: memoryview) -> None:
        """Write into that memory from now on."""
        self._memory = memory
        self._uints = memory.cast("Q")
        self._floats = memory.cast("d")
        self._signed = memory.cast("q")

    def enter(
        self,
        key: int,
        slot: int,
        sequence: int,
        fingerprint: int,
        line: int,
        what: int,
        call_site: int,
        group: int,
        name: int,
        peer: int,
        rejected: int,
        now: float,
        tag: int,
        loop: int | None,
    ) -> int:
        """Record the start of a collective or message; see `FlightRecorder.enter`.

        Args:
            key, slot, sequence, line, call_site, group, name, peer, rejected, now, tag, loop: as
                there.
            fingerprint: of its signature.
            what: number of the text of the signature.
        """
        uints = self._uints
        number: int = uints[_AT_RECORDS] + 1
        _pack_record(
            self._memory,
            self._ring + number % RING * _RECORD_BYTES,
            number,
            key,
            sequence,
            fingerprint,
            line,
            self._signed[_AT_BATCH],
            uints[_AT_LOOP] if loop is None else loop,
            now,
            0.0,
            what,
            call_site,
            group,
            name,
            peer,
            rejected,
            tag,
        )
        if sequence:
            uints[self._record_numbers + slot * DEPTH + sequence % DEPTH] = number
            uints[self._last_sequences + slot] = sequence
        uints[_AT_RECORDS] = number
        return number

    def leave(self, number: int, now: float) -> None:
        """Record the completion of that record's collective at the time `now`, unless it is
        recorded already.
        """
        at = (self._ring + number % RING * _RECORD_BYTES + LEFT_AT) >> 3
        if number + RING > self._uints[_AT_RECORDS] and not self._uints[at]:
            self._floats[at] = now

    def begin_wait(self, number: int, now: float) -> None:
        """Record that the rank is inside the blocking call of that record since `now`."""
        self._uints[_AT_RECORD] = number
        self._floats[_AT_SINCE] = now
        self._uints[_AT_PHASE] = _WAITS

    def end_wait(self, now: float) -> None:
        """Record that the rank computes again since `now`."""
        floats = self._floats
        self._uints[_AT_PHASE] = _RUNS
        floats[_AT_WAITED] += now - floats[_AT_SINCE]
        floats[_AT_SINCE] = now

    def agrees(self, number: int, slot: int, others: Sequence[memoryview]) -> bool:
        """Return whether it is certain that none of the other ranks has called something else.

        Args:
            number: of this rank's record of a collective.
            slot: of its group.
            others: the memory of the others' flight recorders, a tuple. The first of them that has
                called it is compared; if none has, there is nothing that differs.

        Returns:
            False where the records have to be compared in Python, as always without the extension.
        """
        return False


def make_call_writer(memory: memoryview, layout: Layout) -> Any:
    """Return the native writer, or the Python form where there is no extension."""
    if _native is None:
        return CallWriter(memory, layout)
    return _native.CallWriter(
        memory, layout.group_keys, layout.last_sequences, layout.record_numbers, layout.ring
    )
