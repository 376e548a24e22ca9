"""Texts in a recording: written once, then known by a number; the oldest make room."""

from __future__ import annotations

import struct
from collections.abc import Callable

from .layout import SLOT_BYTES, SLOTS

__all__ = ["Texts", "read_text"]

_HEAD = struct.Struct("<QI")
_ROOM = SLOT_BYTES - _HEAD.size


class Texts:
    """Writes texts.

    Args:
        memory: of the recording.
        start: where the texts begin in it.
    """

    def __init__(self, memory: memoryview, start: int) -> None:
        self.memory, self._start = memory, start
        self.on_turn: Callable[[], None] = _nothing  # called when numbers that somebody keeps may soon be too old
        self._numbers: dict[str, int] = {}
        self._next = 1  # 0 is the empty text

    def number(self, text: str) -> int:
        """The number by which readers find `text`."""
        if not text:
            return 0
        found = self._numbers.get(text)
        # one that was written long ago is about to be overwritten
        if found is not None and self._next - found < SLOTS // 2:
            return found
        if self._next % (SLOTS // 2) == 0:
            self._numbers = {each: found for each, found in self._numbers.items() if self._next - found < SLOTS // 2}
            self.on_turn()
        self._numbers[text] = number = self._next
        self._next += 1
        data = text.encode(errors="replace")[:_ROOM]
        at = self._start + number % SLOTS * SLOT_BYTES
        _HEAD.pack_into(self.memory, at, 0, 0)
        self.memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self.memory, at, number, len(data))
        return number


def read_text(memory: memoryview, start: int, number: int) -> str:
    """The text of that `number`; "?" where it has been overwritten, or never was."""
    if not number:
        return ""
    at = start + number % SLOTS * SLOT_BYTES
    found, length = _HEAD.unpack_from(memory, at)
    if found != number or length > _ROOM:
        return "?"
    return bytes(memory[at + _HEAD.size : at + _HEAD.size + length]).decode(errors="replace")


def _nothing() -> None:
    return
