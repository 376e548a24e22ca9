"""The pre-flight check across hosts: ranks compare a digest of what they call before any data moves.

A host does not see what the ranks of other hosts record. So before each collective the ranks all-reduce a digest of
what they are about to call: as many bytes for a thousand ranks as for two. Only where the digest does not show that all
call the same do they exchange some numbers of their calls, by way of the store; and only where these differ do two of
them exchange their whole records, and all ranks fail alike.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from .. import messages
from ..flight_recorder import RawRecord, Record
from ..stores import Ranges, exchange_available, from_ranges, read_message, to_ranges
from . import mismatch
from .mismatch import SwapDetector, are_swapped
from .shared_state import PendingCall, WatchdogState

__all__ = ["CallInfo", "Digest", "PendingCheck", "PreflightCheck", "encode"]

# --- The digest: a few words of each rank, combined by bitwise OR (pure) ---------------------------------------------

# Batches are compared among the ranks that are in the same loop. Loops are hashed into this many slots; two loops in
# one slot cost an exchange, and are no error.
_LOOP_SLOTS = 16
_BLOOM_WORDS = 4  # a Bloom filter of the lines: each line sets a bit in each of them

# Positions of the words. Each number is followed by its complement, see `encode`.
_SEQUENCE, _FLAGS, _FINGERPRINT, _LINE, _LINES, _LOOP = 0, 2, 3, 5, 7, 7 + _BLOOM_WORDS
_BATCHES = _LOOP + 2
_WORDS = _BATCHES + 2 * _LOOP_SLOTS
# Bits of the flags. The last two are the first of `_LOOP_SLOTS` bits: some rank is inside a loop of that slot; some
# rank's loop has ended.
_UNEVEN, _NAMED, _SWAPPED, _INSIDE, _ENDED = 0, 1, 2, 8, 8 + _LOOP_SLOTS


class CallInfo(msgspec.Struct, frozen=True):
    """What a rank is about to call, in numbers; see `flight_recorder.RawRecord`.

    Attributes:
        sequence: sequence number of the collective in its group.
        uneven: whether ranks have different numbers of batches on purpose.
        may_be_swapped: whether the rank has announced a possible swap; see `swaps`.
        fingerprint, line, batch, loop, name: as in its record.
    """

    sequence: int
    uneven: bool
    may_be_swapped: bool
    fingerprint: int
    line: int
    batch: int
    loop: int
    name: int


class _CallRanks(msgspec.Struct, frozen=True):
    """A call, and the ranks that are about to make it."""

    call: CallInfo
    ranks: Ranges


_RECORD_FIELDS = ("fingerprint", "line", "batch", "loop", "name")


def encode(call: CallInfo) -> list[int]:
    """Return the words that all ranks combine by OR, as signed 64-bit numbers.

    A number is encoded with its complement: all ranks have the same number if no bit is set in both combined words.
    """
    words = [0] * _WORDS
    slot = call.loop % _LOOP_SLOTS
    flags = bool(call.uneven) << _UNEVEN | bool(call.name) << _NAMED | bool(call.may_be_swapped) << _SWAPPED
    if call.loop:
        flags |= 1 << ((_INSIDE if call.batch >= 0 else _ENDED) + slot)
    words[_FLAGS] = flags
    for at, number in ((_SEQUENCE, call.sequence), (_FINGERPRINT, call.fingerprint), (_LINE, call.line)):
        _put(words, at, number)
    _put(words, _LOOP, call.loop)
    if call.loop and call.batch >= 0:
        _put(words, _BATCHES + 2 * slot, call.batch)
    for number in range(_BLOOM_WORDS):  # lines are digests already, of which any bits will do
        words[_LINES + number] = _as_signed(1 << (call.line >> 16 * number & 63))
    return words


@dataclass(frozen=True, slots=True)
class Digest:
    """The combined words of all ranks."""

    words: Sequence[int]

    @property
    def same_sequence(self) -> bool:
        """Whether the collective has the same sequence number on all ranks."""
        return not self._differs(_SEQUENCE)

    @property
    def is_equal(self) -> bool:
        """Whether no two ranks differ in anything that is reported."""
        return not (self._differs(_FINGERPRINT) or self._differs(_LINE) or self._batches_differ())

    @property
    def pattern(self) -> tuple[int, ...] | None:
        """What stays the same while ranks differ in nothing but their lines and batches; None if they do.

        Programs that branch, or skip a batch, have few patterns, each of which needs one exchange.
        """
        if self._differs(_FINGERPRINT) or self._some_loops_ended():
            return None
        slots = (slot for slot in range(_LOOP_SLOTS) if self._differs(_BATCHES + 2 * slot))
        return (*self.words[_LINE:_BATCHES], self.words[_FLAGS], *slots)

    def _batches_differ(self) -> bool:
        if self.words[_FLAGS] >> _UNEVEN & 1:
            return False
        return any(self._differs(_BATCHES + 2 * slot) for slot in range(_LOOP_SLOTS)) or self._some_loops_ended()

    def _some_loops_ended(self) -> bool:
        """Return whether only some ranks of a loop have ended it, as they may where all call the same line."""
        flags, mask = self.words[_FLAGS], (1 << _LOOP_SLOTS) - 1
        return self._differs(_LINE) and bool(flags >> _INSIDE & flags >> _ENDED & mask)

    def _differs(self, at: int) -> bool:
        return bool(self.words[at] & self.words[at + 1])


def _put(words: list[int], at: int, number: int) -> None:
    words[at] = _as_signed(number)
    words[at + 1] = ~words[at]


def _as_signed(number: int) -> int:
    """Return the signed number with the same 64 bits, as torch has no others."""
    return number - (1 << 64) if number >= 1 << 63 else number


# --- The check of one group -------------------------------------------------------------------------------------------

_TIMEOUT = timedelta(seconds=5)  # for another rank to publish what it has called


class PreflightCheck:
    """Compares the collectives of one group that has ranks on several hosts.

    Args:
        group: has `allreduce_unwatched`, an all-reduce that the watchdog does not record.
        state: of the watchdog.
        key: of the group.
        ranks: global ranks of its members.
        swaps: of the group.
    """

    def __init__(self, group: Any, state: WatchdogState, key: int, ranks: Sequence[int], swaps: SwapDetector) -> None:
        self._group, self._state, self._key, self._ranks, self._swaps = group, state, key, ranks, swaps
        self._warned: set[tuple[str, tuple[int, ...]]] = set()  # lines and loops that were warned about
        self._before: tuple[int, list[RawRecord]] = (0, [])  # sequence number and records of the last collective
        self._patterns: set[tuple[int, ...]] = set()  # of digests that an exchange has shown to be no error

    def begin(self, pending: PendingCall, blocking: bool = False) -> PendingCheck:
        """Begin to compare a collective; every rank must do so for the same one.

        Args:
            pending: the collective.
            blocking: whether the caller waits for the result before it does anything else.
        """
        own = self._state.own.raw(pending.number)
        uneven = bool(self._state.uneven_batches)
        may_be_swapped = self._swaps.has_announced(self._state.own, pending.sequence)
        numbers = (getattr(own, name, 0) for name in _RECORD_FIELDS)
        mine = CallInfo(pending.sequence, uneven, may_be_swapped, *numbers)
        words = torch.tensor(encode(mine))
        work = self._all_reduce(words, blocking)
        return PendingCheck(lambda: self._evaluate(pending, mine, words), work)

    def _all_reduce(self, words: torch.Tensor, blocking: bool) -> Any:
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp.BOR, not blocking
        return self._group.allreduce_unwatched([words], options)

    def _evaluate(self, pending: PendingCall, mine: CallInfo, words: torch.Tensor) -> None:
        """Exchange the calls if the digest calls for it; all ranks have the same digest, and so decide alike.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        digest = Digest(words.tolist())
        if not digest.same_sequence or digest.is_equal or digest.pattern in self._patterns:
            return  # sequence numbers differ where some ranks' calls were rejected, and do not count there
        self.compare_calls(pending, self._exchange_calls(pending, mine))
        if digest.pattern is not None:
            self._patterns.add(digest.pattern)

    def _exchange_calls(self, pending: PendingCall, mine: CallInfo) -> list[CallInfo]:
        """Return what each rank is about to call; for a rank that publishes nothing in time, this rank's own call.

        Raises:
            TransportError: what is in the store is damaged.
        """
        # by way of the store: the collective itself may have begun already, and not complete
        state = self._state
        own = state.own.raw(pending.number)
        topic = f"preflight/{self._key}/{pending.sequence}.{own.rejected if own is not None else 0}/rows"
        at, size = self._ranks.index(state.rank), len(self._ranks)
        text = messages.encode(mine)
        combined = exchange_available(state.rendezvous.store, topic, at, text, size, _group_by_call, _TIMEOUT)
        calls = [mine] * size
        for group in read_message(combined, list[_CallRanks], "the pre-flight check, the calls of all ranks"):
            for rank in from_ranges(group.ranks, size):
                calls[rank] = group.call
        return calls

    def compare_calls(self, pending: PendingCall, calls: Sequence[CallInfo]) -> None:
        """Compare the calls of all ranks. All ranks have the same ones here, and so come to the same result.

        Args:
            pending: the collective.
            calls: of each rank.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        if len({call.sequence for call in calls}) > 1:
            return  # calls were rejected on some ranks, and do not count there
        own = self._state.own.raw(pending.number)
        if own is None:
            return
        uneven = any(call.uneven for call in calls)
        raws = [replace(own, **{name: getattr(call, name) for name in _RECORD_FIELDS}) for call in calls]
        found = [list(mismatch.compare_records(raws[0], raw, uneven)) for raw in raws]
        if any(call.may_be_swapped for call in calls):
            self._add_swaps(own.sequence, raws, found)
        self._before = own.sequence, raws
        self._swaps.note_lines(own, {raw.line for raw in raws})
        for kind in mismatch.KINDS:
            at = next((at for at, kinds in enumerate(found) if kind in kinds), -1)
            if at >= 0 and (mismatch.is_error(kind, self._state.limits.strict) or not self._has_warned(kind, raws)):
                self._report(pending, kind, (self._ranks[0], self._ranks[at]))

    def _add_swaps(self, sequence: int, raws: Sequence[RawRecord], found: Sequence[list[str]]) -> None:
        """Add "swap" to the differences of the ranks that have swapped this collective and the last one."""
        number, before = self._before
        if number + 1 == sequence:
            for raw, last, kinds in zip(raws, before, found, strict=True):
                if are_swapped((before[0], last), (raws[0], raw)):
                    kinds.append("swap")

    def _report(self, pending: PendingCall, kind: str, pair: tuple[int, int]) -> None:
        state = self._state
        difference = mismatch.describe_difference(kind, pair, self._exchange_records(pending, pair))
        if mismatch.is_error(kind, state.limits.strict):
            state.fail(difference.at(self._key, pending.sequence))
            state.check()
        elif state.rank == pair[0] and pair[1] not in state.peers:  # ranks of one host warn of it themselves
            state.write_message(difference.as_warning())

    def _has_warned(self, kind: str, raws: Sequence[RawRecord]) -> bool:
        topic = kind, tuple(sorted({raw.line if kind == "lines" else raw.loop for raw in raws}))
        known = topic in self._warned
        self._warned.add(topic)
        return known

    def _exchange_records(self, pending: PendingCall, pair: tuple[int, int]) -> tuple[Record, Record]:
        """Return the records of two ranks."""
        # by way of the store: all of Gloo's threads may be busy with what does not complete
        state, store = self._state, self._state.rendezvous.store
        topic = f"preflight/{self._key}/{pending.sequence}"
        own = state.own.raw(pending.number)
        if state.rank in pair and own is not None:
            store.set(f"{topic}/{state.rank}", messages.encode(state.own.record(own)))
        first, second = (_read_record(store, f"{topic}/{rank}") for rank in pair)
        return first, second


class PendingCheck:
    """A pre-flight check whose all-reduce may not have completed.

    Args:
        evaluate: called when it has; raises if ranks differ.
        work: of the all-reduce.
    """

    def __init__(self, evaluate: Callable[[], None], work: Any) -> None:
        self._evaluate, self._work = evaluate, work
        self._result: torch.futures.Future[Any] | None = None

    def wait(self) -> None:
        """Wait for the other ranks and evaluate the digest.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        if self._result is not None:
            self._result.wait()
            return
        self._work.wait()
        self._evaluate()

    def evaluate_when_done(self) -> PendingCheck:
        """Evaluate the digest as soon as the all-reduce completes, in whichever thread completes it."""

        def evaluate(exchanged: torch.futures.Future[Any]) -> None:
            exchanged.value()
            self._evaluate()

        self._result = self._work.get_future().then(evaluate)
        return self

    def is_done(self) -> bool:
        """Return whether `wait` returns, or raises, at once."""
        return self._result is None or bool(self._result.done())

    def guard(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """Return a future with the value of `future` that fails if ranks differ."""
        if self._result is None:
            return future
        both = torch.futures.collect_all([self._result, future])
        return both.then(lambda ended: [each.value() for each in ended.value()][1])


def _group_by_call(published: Mapping[int, str]) -> str:
    """Return the distinct calls with their ranks: of a thousand ranks' calls there are most often two."""
    found: dict[CallInfo, list[int]] = {}
    for rank, text in published.items():
        call = read_message(text, CallInfo, f"the pre-flight check, the call of rank {rank}")
        found.setdefault(call, []).append(rank)
    return messages.encode([_CallRanks(call, to_ranges(ranks)) for call, ranks in found.items()])


def _read_record(store: Any, key: str) -> Record:
    try:
        store.wait([key], _TIMEOUT)
        return messages.decode(store.get(key), Record)
    except (RuntimeError, ValueError, TypeError):  # its rank, or the store, is gone
        return Record(0, "a collective", "an unknown line", "", "", 0, None, False, 0.0, None)
