"""A few words of what a rank is about to call, which OR-ed over all ranks tell whether they call the same (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Call", "Digest", "words_of"]

# Batches are compared among the ranks that are in the same loop. A loop's go into one of so many slots; two loops in
# one slot cost a closer look, and are no error.
_SLOTS = 16
_BLOOM = 4  # words, of which each line sets a bit

_SEQUENCE, _FLAGS, _FINGERPRINT, _LINE, _LINES, _LOOP = 0, 2, 3, 5, 7, 7 + _BLOOM
_BATCHES = _LOOP + 2
_WORDS = _BATCHES + 2 * _SLOTS
# Bits of the flags; of the last two, the first of `_SLOTS`.
_UNEVEN, _NAMED, _GOES_OVER, _INSIDE, _OUTSIDE = 0, 1, 2, 8, 8 + _SLOTS


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is about to call; see `recorder.Raw`.

    Attributes:
        sequence: number of the collective in its group.
        uneven: whether ranks have different numbers of batches on purpose.
        goes_over: whether the rank has gone on, in a loop, to what another has called just before; see `swaps`.
        fingerprint, line, batch, loop, name: as in its record.
    """

    sequence: int
    uneven: bool
    goes_over: bool
    fingerprint: int
    line: int
    batch: int
    loop: int
    name: int


def words_of(call: Call) -> list[int]:
    """What all ranks OR, as signed 64-bit numbers.

    A number goes in with its complement: ranks have the same one if no bit is set in both of the OR-ed words.
    """
    words = [0] * _WORDS
    slot = call.loop % _SLOTS
    flags = bool(call.uneven) << _UNEVEN | bool(call.name) << _NAMED | bool(call.goes_over) << _GOES_OVER
    if call.loop:
        flags |= 1 << ((_INSIDE if call.batch >= 0 else _OUTSIDE) + slot)
    words[_FLAGS] = flags
    for at, number in ((_SEQUENCE, call.sequence), (_FINGERPRINT, call.fingerprint), (_LINE, call.line)):
        _put(words, at, number)
    _put(words, _LOOP, call.loop)
    if call.loop and call.batch >= 0:
        _put(words, _BATCHES + 2 * slot, call.batch)
    for number in range(_BLOOM):  # lines are digests: any of their bits are as good as those of another
        words[_LINES + number] = _signed(1 << (call.line >> 16 * number & 63))
    return words


@dataclass(frozen=True, slots=True)
class Digest:
    """The words of all ranks, OR-ed."""

    words: Sequence[int]

    @property
    def counts_alike(self) -> bool:
        """Whether this is the collective of the same number for all ranks."""
        return not self._differs(_SEQUENCE)

    @property
    def is_alike(self) -> bool:
        """Whether no two ranks differ in anything that is worth a word."""
        return not (self._differs(_FINGERPRINT) or self._differs(_LINE) or self._batches_differ())

    @property
    def pattern(self) -> tuple[int, ...] | None:
        """What stays the same while ranks differ by no more than their lines and batches; else None.

        Programs that branch, or skip a batch, have few patterns, each of which needs one closer look.
        """
        if self._differs(_FINGERPRINT) or self._some_have_run_out():
            return None
        slots = (slot for slot in range(_SLOTS) if self._differs(_BATCHES + 2 * slot))
        return (*self.words[_LINE:_BATCHES], self.words[_FLAGS], *slots)

    def _batches_differ(self) -> bool:
        if self.words[_FLAGS] >> _UNEVEN & 1:
            return False
        return any(self._differs(_BATCHES + 2 * slot) for slot in range(_SLOTS)) or self._some_have_run_out()

    def _some_have_run_out(self) -> bool:
        """Whether of the ranks of a loop some have no more batches; which they may where all call the same line."""
        flags, mask = self.words[_FLAGS], (1 << _SLOTS) - 1
        return self._differs(_LINE) and bool(flags >> _INSIDE & flags >> _OUTSIDE & mask)

    def _differs(self, at: int) -> bool:
        return bool(self.words[at] & self.words[at + 1])


def _put(words: list[int], at: int, number: int) -> None:
    words[at] = _signed(number)
    words[at + 1] = ~words[at]


def _signed(number: int) -> int:
    """The same 64 bits, as torch knows them."""
    return number - (1 << 64) if number >= 1 << 63 else number
