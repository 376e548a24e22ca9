"""The pre-flight check across hosts: ranks compare a digest of what they call before any of them
uses its result.

Ranks of one host look at each other's records, see `monitor`. A host does not see what the ranks of
other hosts record. So before each collective, or beside it,
the ranks all-reduce a digest of what they are about to call: as many bytes for a thousand ranks as
for two. Only where the digest does not show that all call the same do they exchange some numbers of
their calls, by way of the store; and only where these differ do two of them exchange their whole
records, and all ranks fail alike.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import messages
from ..flight_recorder import Record
from ..stores import Ranges, exchange_available, from_ranges, read_message, to_ranges
from . import mismatch
from .call_order import CallOrder
from .shared_state import PendingCall, WatchdogState
from .states import RecordRow
from .swaps import SwapDetector, are_swapped

# Batches are compared among the ranks that are in the same loop. Loops are hashed into this many
# slots; two loops in one slot cost an exchange, and are no error.
_LOOP_SLOTS = 16
_BLOOM_WORDS = 4  # a Bloom filter of the lines: each line sets a bit in each of them

# Positions of the words. Each number is followed by its complement, see `encode`.
_SEQUENCE = 0
_FLAGS = 2
_FINGERPRINT = 3
_LINE = 5
_LINES = 7
_LOOP = 7 + _BLOOM_WORDS
_BATCHES = _LOOP + 2
_WORDS = _BATCHES + 2 * _LOOP_SLOTS
# Bits of the flags. The last two are the first of `_LOOP_SLOTS` bits: some rank is inside a loop of
# that slot; some rank's loop has ended.
_UNEVEN = 0
_NAMED = 1
_SWAPPED = 2
_INSIDE = 8
_ENDED = 8 + _LOOP_SLOTS


_Calls = list[tuple[RecordRow, Ranges]]
"""The distinct calls, each with the ranks that are about to make it."""


def encode(call: RecordRow, uneven: bool = False, may_be_swapped: bool = False) -> list[int]:
    """Return the words that all ranks combine by OR, as signed 64-bit numbers.

    A number is encoded with its complement: all ranks have the same number if no bit is set in both
    combined words.

    Args:
        call: what a rank is about to call.
        uneven: whether ranks have different numbers of batches on purpose.
        may_be_swapped: whether the rank has announced a possible swap; see `SwapDetector`.
    """
    words = [0] * _WORDS
    slot = call.loop % _LOOP_SLOTS
    flags = bool(uneven) << _UNEVEN | bool(call.name) << _NAMED | bool(may_be_swapped) << _SWAPPED
    if call.loop:
        flags |= 1 << ((_INSIDE if call.batch >= 0 else _ENDED) + slot)
    words[_FLAGS] = flags
    for at, number in (
        (_SEQUENCE, call.sequence),
        (_FINGERPRINT, call.fingerprint),
        (_LINE, call.line),
    ):
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
    def same_fingerprint(self) -> bool:
        """Whether no two ranks call another operation, or with other shapes, types or options."""
        return not self._differs(_FINGERPRINT)

    @property
    def is_equal(self) -> bool:
        """Whether no two ranks differ in anything that is reported."""
        return not (self._differs(_FINGERPRINT) or self._differs(_LINE) or self._batches_differ())

    @property
    def pattern(self) -> tuple[int, ...] | None:
        """What stays the same while ranks differ in nothing but their lines and batches; None if
        they do.

        Programs that branch, or skip a batch, have few patterns, each of which needs one exchange.
        """
        if self._differs(_FINGERPRINT) or self._some_loops_ended():
            return None
        slots = (slot for slot in range(_LOOP_SLOTS) if self._differs(_BATCHES + 2 * slot))
        return (*self.words[_LINE:_BATCHES], self.words[_FLAGS], *slots)

    @property
    def uneven(self) -> bool:
        """Whether some rank says that ranks have different numbers of batches on purpose."""
        return bool(self.words[_FLAGS] >> _UNEVEN & 1)

    @property
    def may_be_swapped(self) -> bool:
        """Whether some rank has announced a possible swap."""
        return bool(self.words[_FLAGS] >> _SWAPPED & 1)

    def _batches_differ(self) -> bool:
        if self.uneven:
            return False
        return (
            any(self._differs(_BATCHES + 2 * slot) for slot in range(_LOOP_SLOTS))
            or self._some_loops_ended()
        )

    def _some_loops_ended(self) -> bool:
        """Return whether only some ranks of a loop have ended it, as they may where all call the
        same line.
        """
        flags = self.words[_FLAGS]
        mask = (1 << _LOOP_SLOTS) - 1
        return self._differs(_LINE) and bool(flags >> _INSIDE & flags >> _ENDED & mask)

    def _differs(self, at: int) -> bool:
        return bool(self.words[at] & self.words[at + 1])


def _put(words: list[int], at: int, number: int) -> None:
    words[at] = _as_signed(number)
    words[at + 1] = ~words[at]


def _as_signed(number: int) -> int:
    """Return the signed number with the same 64 bits, as torch has no others."""
    return number - (1 << 64) if number >= 1 << 63 else number


_MOST_EXPECTED = 4096
_MOST_CERTAIN = 3  # a call is expected until others have come that often in its place, more or less


class ExpectedCalls:
    """Which call comes next in a group, given the last two and what has followed these before.

    Loops make the same calls turn by turn. What is expected follows from this rank's own calls
    alone, so that all ranks that have called the same expect the same.
    """

    def __init__(self) -> None:
        self._last_two = (0, 0)
        self._next: dict[
            tuple[int, int], list[int]
        ] = {}  # the last two: [the next one, how certain it is]

    def note(self, fingerprint: int) -> bool:
        """Note the next call, and return whether it was expected."""
        expected = self._next.get(self._last_two)
        if expected is None:
            if len(self._next) == _MOST_EXPECTED:
                self._next.clear()
            self._next[self._last_two] = [fingerprint, 1]
            was_expected = False
        else:
            was_expected = _update(expected, fingerprint)
        self._last_two = (self._last_two[1], fingerprint)
        return was_expected


def _update(expected: list[int], fingerprint: int) -> bool:
    if expected[0] == fingerprint:
        expected[1] = min(expected[1] + 1, _MOST_CERTAIN)
        return True
    expected[1] -= 1
    if expected[1] == 0:
        expected[:] = [fingerprint, 1]
    return False


_TIMEOUT = timedelta(seconds=5)  # for another rank to publish what it has called
_POLL_S = 0.01


class PreflightCheck:
    """Compares the collectives of one group that has ranks on several hosts.

    A call that is expected starts right behind its check, and both go on at the same time: the
    check's error is raised before the call's result is used. Any other call starts when its check
    has ended. So whatever ranks call that are out of step, no two different calls have started: a
    rank whose call is not the expected one posts no receive into which something could arrive that
    does not fit, and sends nothing. (Gloo ends a process that receives more than it has room for,
    fills a part of it with less, and adds up values of other types.) And it starts no later call
    either. The others are in the expected call, whose wait ends with the report.

    Args:
        group: has `allreduce_unwatched` and `allreduce_beside`, all-reduces that the watchdog does
            not record.
        state: of the watchdog.
        key: of the group.
        ranks: global ranks of its members.
        swaps: of the group.
        abandon: called with the work of a call that has started, and for which nobody waits any
            more.
    """

    def __init__(
        self,
        group: Any,
        state: WatchdogState,
        key: int,
        ranks: Sequence[int],
        swaps: SwapDetector,
        abandon: Callable[[Any], None],
    ) -> None:
        self._group = group
        self._state = state
        self._key = key
        self._ranks = ranks
        self._swaps = swaps
        self._abandon = abandon
        # lines and loops that were warned about
        self._warned: set[tuple[str, tuple[int, ...]]] = set()
        self._before: Sequence[RecordRow] = ()  # the last collective, as the ranks have called it
        # of digests that an exchange has shown to be no error
        self._patterns: set[tuple[int, ...]] = set()
        self._expected = ExpectedCalls()
        self._order = CallOrder(lambda: self._state.check())
        # operations of the group in which waits cannot be ended
        self._never_ended: Collection[str] = getattr(group, "never_ended", ())

    def check(self, pending: PendingCall) -> Any:
        """Compare a collective; every rank must do so for the same one.

        Args:
            pending: the collective.

        Returns:
            The work of the check, which has completed; None where the calls are not those of one
            collective, as some ranks' calls before it were rejected.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        self._order.wait()
        mine = self._call_of(pending)
        self._expected.note(mine.fingerprint)
        return self._compare(pending, mine)

    def run(self, pending: PendingCall, call: Callable[[], Any], operation: str) -> Any:
        """Compare a blocking collective and start it; return its work when all ranks are known to
        call the same.

        A barrier is over when all ranks have called it, as its check is.

        Args:
            pending: the collective.
            call: starts it, or does it.
            operation: its name.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        self._order.wait()
        mine = self._call_of(pending)
        is_expected = self._expected.note(mine.fingerprint)
        waits_first = (
            self._state.limits.strict or operation == "barrier" or operation in self._never_ended
        )
        if is_expected and not waits_first:
            return self._run_beside(pending, mine, call)
        checked = self._compare(pending, mine)
        return checked if operation == "barrier" and checked is not None else call()

    def start(
        self, pending: PendingCall, call: Callable[[], Any], can_wait: bool
    ) -> tuple[Any, PendingCheck | None]:
        """Start to compare an asynchronous collective, and start it: now if it is expected, or
        later.

        Args:
            pending: the collective.
            call: starts it.
            can_wait: whether it may start in another thread, when its check has ended.

        Returns:
            The work of the collective, and its check; None if the work waits for that as well.
        """
        mine = self._call_of(pending)
        is_expected = self._expected.note(mine.fingerprint)
        starts_now = (is_expected and not self._state.limits.strict) or not can_wait
        start = partial(self._start_beside, pending, mine, call)
        if starts_now and self._order.is_free:
            return start()
        if starts_now:
            return self._order.add(None, start), None
        return self._order.add(partial(self._begin, pending, mine), lambda: (call(), None)), None

    def _call_of(self, pending: PendingCall) -> RecordRow:
        """Return what this rank is about to call."""
        record = self._state.own_reader.raw(pending.number)
        return RecordRow(pending.sequence) if record is None else RecordRow.of(record)

    def _words(self, mine: RecordRow) -> torch.Tensor:
        """Return this rank's words, see `encode`."""
        uneven = bool(self._state.uneven_batches)
        may_be_swapped = self._swaps.has_announced(self._state.own_reader, mine.sequence)
        return torch.tensor(encode(mine, uneven, may_be_swapped))

    def _compare(self, pending: PendingCall, mine: RecordRow) -> Any:
        words = self._words(mine)
        work = self._group.allreduce_unwatched([words], _options(blocking=True))
        work.wait()
        return work if self._evaluate(pending, mine, words) else None

    def _begin(self, pending: PendingCall, mine: RecordRow) -> torch.futures.Future[None]:
        words = self._words(mine)
        work = self._group.allreduce_unwatched([words], _options(blocking=False))
        return PendingCheck(work, lambda: self._evaluate(pending, mine, words)).ended

    def _run_beside(self, pending: PendingCall, mine: RecordRow, call: Callable[[], Any]) -> Any:
        words, end = self._begin_beside(pending, mine)
        try:
            work = call()
        except Exception:
            checked = end(None)
            if checked is not None and self._state.error is None:  # ranks that differ explain it
                checked.wait()
                self._evaluate(pending, mine, words)
            raise
        try:
            end(work).wait()
            self._evaluate(pending, mine, words)
        except BaseException:
            self._abandon(work)
            raise
        return work

    def _start_beside(
        self, pending: PendingCall, mine: RecordRow, call: Callable[[], Any]
    ) -> tuple[Any, PendingCheck]:
        words, end = self._begin_beside(pending, mine)
        try:
            work = call()
        except BaseException:
            end(None)
            raise
        return work, PendingCheck(end(work), lambda: self._evaluate(pending, mine, words))

    def _begin_beside(
        self, pending: PendingCall, mine: RecordRow
    ) -> tuple[torch.Tensor, Callable[[Any], Any]]:
        """Start a check beside a call that comes right behind it.

        Returns:
            The words; and a function of the call's work, None if the call has failed, that returns
            the work of the check, None if that has failed with it.
        """
        words = self._words(mine)
        look = partial(self._look, pending, mine, words)
        return words, self._group.allreduce_beside(words, _options(blocking=False), look)

    def _evaluate(self, pending: PendingCall, mine: RecordRow, words: torch.Tensor) -> bool:
        """Exchange the calls if the digest calls for it; all ranks have the same digest, and so
        decide alike.

        Returns:
            Whether the calls were compared; not where some ranks' calls were rejected, so that
            sequence numbers differ.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        digest = Digest(words.tolist())
        if not digest.same_sequence or digest.is_equal or digest.pattern in self._patterns:
            return digest.same_sequence
        if not self._look(pending, mine, words):
            self.compare_calls(pending, self._exchange_calls(pending, mine), digest)
        if digest.pattern is not None:
            self._patterns.add(digest.pattern)
        return True

    def _look(self, pending: PendingCall, mine: RecordRow, words: torch.Tensor) -> bool:
        """Compare the calls of hosts if these are not of one collective, in a group that has a
        leader for each host.

        The leaders alone do so: where a call has started beside its check, the others of a host,
        which call the same as their leader, are within it.

        Returns:
            Whether they were compared.

        Raises:
            DesyncError: the hosts do not call the same.
        """
        digest = Digest(words.tolist())
        hosts = getattr(self._group, "hosts", None)
        if hosts is None or not digest.same_sequence or digest.same_fingerprint:
            return False
        own_host = next(
            number
            for number, ranks in enumerate(hosts)
            if self._ranks.index(self._state.rank) in ranks
        )
        if self._ranks[hosts[own_host][0]] != self._state.rank:
            self._await_report()
            return True
        calls = [mine] * len(self._ranks)
        for call, ranks in zip(
            self._exchange(pending, mine, "hosts", own_host, len(hosts)), hosts, strict=True
        ):
            for rank in ranks:
                calls[rank] = call
        self.compare_calls(pending, calls, digest)
        return True

    def _await_report(self) -> None:
        """Wait for the report of this host's leader."""
        deadline = time.monotonic() + _TIMEOUT.total_seconds()
        while not self._state.poll_report() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._state.check()

    def _exchange_calls(self, pending: PendingCall, mine: RecordRow) -> list[RecordRow]:
        """Return what each rank is about to call; for a rank that publishes nothing in time, this
        rank's own call.

        Raises:
            TransportError: what is in the store is damaged.
        """
        return self._exchange(
            pending, mine, "rows", self._ranks.index(self._state.rank), len(self._ranks)
        )

    def _exchange(
        self, pending: PendingCall, mine: RecordRow, topic: str, place: int, size: int
    ) -> list[RecordRow]:
        """Return what is called at each of `size` places, of which this rank is at `place`; see
        `_exchange_calls`.
        """
        # by way of the store: the collective itself may have begun already, and not complete
        state = self._state
        record = state.own_reader.raw(pending.number)
        rejected = record.rejected if record is not None else 0
        name = f"preflight/{self._key}/{pending.sequence}.{rejected}/{topic}"
        text = messages.encode(mine)
        combined = exchange_available(
            state.rendezvous.store, name, place, text, size, _group_by_call, _TIMEOUT
        )
        calls = [mine] * size
        distinct = read_message(combined, _Calls, "the pre-flight check, the calls of all ranks")
        for call, ranges in distinct:
            for rank in from_ranges(ranges, size):
                calls[rank] = call
        return calls

    def compare_calls(
        self, pending: PendingCall, calls: Sequence[RecordRow], digest: Digest
    ) -> None:
        """Compare the calls of all ranks. All ranks have the same ones here, and so come to the
        same result.

        Args:
            pending: the collective.
            calls: of each rank.
            digest: of the calls.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        if len({call.sequence for call in calls}) > 1:
            return  # calls were rejected on some ranks, and do not count there
        record = self._state.own_reader.raw(pending.number)
        if record is None:
            return
        differences = [
            list(mismatch.compare_records(calls[0], call, digest.uneven)) for call in calls
        ]
        if digest.may_be_swapped:
            self._add_swaps(calls, differences)
        self._before = calls
        self._swaps.note_lines(record, {call.line for call in calls})
        for kind in mismatch.KINDS:
            at = next((at for at, kinds in enumerate(differences) if kind in kinds), -1)
            if at >= 0 and (
                mismatch.is_error(kind, self._state.limits.strict)
                or not self._has_warned(kind, calls)
            ):
                self._report(pending, kind, (self._ranks[0], self._ranks[at]))

    def _add_swaps(self, calls: Sequence[RecordRow], differences: Sequence[list[str]]) -> None:
        """Add "swap" to the differences of the ranks that have swapped this collective and the last
        one.
        """
        before = self._before
        if before and before[0].sequence + 1 == calls[0].sequence:
            for call, last, kinds in zip(calls, before, differences, strict=True):
                if are_swapped((before[0], last), (calls[0], call)):
                    kinds.append("swap")

    def _report(self, pending: PendingCall, kind: str, pair: tuple[int, int]) -> None:
        state = self._state
        difference = mismatch.describe_difference(kind, pair, self._exchange_records(pending, pair))
        if mismatch.is_error(kind, state.limits.strict):
            state.fail(difference.at(self._key, pending.sequence))
            state.check()
        elif state.rank == pair[0] and pair[1] not in state.peers:
            # ranks of one host warn of it themselves
            state.write_message(difference.as_warning())

    def _has_warned(self, kind: str, calls: Sequence[RecordRow]) -> bool:
        topic = kind, tuple(sorted({call.line if kind == "lines" else call.loop for call in calls}))
        known = topic in self._warned
        self._warned.add(topic)
        return known

    def _exchange_records(
        self, pending: PendingCall, pair: tuple[int, int]
    ) -> tuple[Record, Record]:
        """Return the records of two ranks."""
        # by way of the store: all of Gloo's threads may be busy with what does not complete
        state = self._state
        store = self._state.rendezvous.store
        topic = f"preflight/{self._key}/{pending.sequence}"
        record = state.own_reader.raw(pending.number)
        if state.rank in pair and record is not None:
            store.set(f"{topic}/{state.rank}", messages.encode(state.own_reader.record(record)))
        first, second = (_read_record(store, f"{topic}/{rank}") for rank in pair)
        return first, second


class PendingCheck:
    """The pre-flight check of an asynchronous collective; the thread that completes it evaluates
    its digest.

    Args:
        work: of the check's all-reduce.
        evaluate: called when it has completed; raises if ranks differ.

    Attributes:
        ended: completed when ranks are known to call the same, or with the error.
    """

    def __init__(self, work: Any, evaluate: Callable[[], object]) -> None:
        def look(exchanged: torch.futures.Future[Any]) -> None:
            exchanged.value()
            evaluate()

        self.ended: torch.futures.Future[None] = work.get_future().then(look)

    def wait(self) -> None:
        """Wait for the other ranks.

        Raises:
            DesyncError: the ranks do not call the same.
        """
        self.ended.wait()

    def is_done(self) -> bool:
        """Return whether `wait` returns, or raises, at once."""
        return bool(self.ended.done())

    def guard(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """Return a future with the value of `future` that fails if ranks differ."""
        both = torch.futures.collect_all([self.ended, future])
        return both.then(lambda ended: [future_ended.value() for future_ended in ended.value()][1])


def _options(blocking: bool) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BOR
    options.asyncOp = not blocking
    return options


def _group_by_call(published: Mapping[int, str]) -> str:
    """Return the distinct calls with their ranks: of a thousand ranks' calls there are most often
    two.
    """
    ranks_of_call: dict[RecordRow, list[int]] = {}
    for rank, text in published.items():
        call = read_message(text, RecordRow, f"the pre-flight check, the call of rank {rank}")
        ranks_of_call.setdefault(call, []).append(rank)
    return messages.encode([(call, to_ranges(ranks)) for call, ranks in ranks_of_call.items()])


def _read_record(store: Any, key: str) -> Record:
    try:
        store.wait([key], _TIMEOUT)
        return messages.decode(store.get(key), Record)
    except (RuntimeError, ValueError, TypeError):  # its rank, or the store, is gone
        return Record(0, "a collective", "an unknown line", "", "", 0, None, False, 0.0, None)
