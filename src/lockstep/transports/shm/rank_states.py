"""The ranks' counters and states in shared memory: how far each rank is, who has left, who has
failed and why.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ReduceOp

from ...errors import RankLostError, StallError, TransportError
from ...system.processes import ProcessLiveness
from ..runtime.backoff import Steps
from .memory_layout import BLOCK, SIGNATURES, Layout
from .segment import Segment
from .signatures import dtype_number, mismatch_error

# Data is written, then a counter; a reader sees the counter, then reads the data. Neither pair may
# be swapped.
#
# x86-64 never makes two stores of a core visible in another order, nor does it let a load overtake
# an earlier load (Intel SDM vol. 3, 9.2.2; AMD64 APM vol. 2, 7.2), and no compiler sees both sides,
# since each is a call of its own into torch or the interpreter: nothing has to be done.
#
# ARM, POWER and RISC-V may do both. Taking a lock is an acquire and giving it back a release: what
# comes after the first stays after it, what comes before the second stays before it. One lock is
# not enough, because earlier and later accesses may both move inside it and there pass each other;
# a release followed by an acquire may not be swapped (C++20 31.4, ARMv8 RCsc: LDAR never passes an
# earlier STLR), so of two cycles the first holds back what came before and the second what comes
# after. A counter is one aligned 64-bit word, which all of them write in one piece.

_lock = threading.Lock()


def _full_fence() -> None:
    with _lock:
        pass
    with _lock:
        pass


def _no_fence() -> None:
    return


memory_fence = (
    _no_fence if platform.machine().lower() in ("x86_64", "amd64", "i686", "i386") else _full_fence
)


_native: ModuleType | None
try:
    _native = import_module("._native", __package__)
except ImportError:  # no compiler was found when the package was installed
    _native = None

# what the native extension sums, with the dtypes' numbers: the first of those in signatures.py
NATIVE_SUMS = {
    dtype: dtype_number(dtype) for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
}
_MAX_NATIVE_RANKS = 1024  # as in _exchange.h
SUM = hash(ReduceOp.SUM)


class ExchangeState:
    """How far this rank is; the native type has the same attributes, and the methods that native.py
    calls.

    Attributes:
        tick: the last tick that this rank has posted.
        low: a tick that every rank is known to have reached.
        half: the half of the chunk buffers that was claimed last.
        free_0, free_1: the tick that all ranks must have posted before that half is written again.
    """

    __slots__ = ("free_0", "free_1", "half", "low", "tick")

    def __init__(self) -> None:
        self.tick = self.low = self.half = self.free_0 = self.free_1 = 0


def native_sum_code(op: Any, dtype: torch.dtype) -> int:
    """Return the dtype's number, if the native extension does the reduction `op` of it; -1 where it
    does not.
    """
    return NATIVE_SUMS.get(dtype, -1) if hash(op) == SUM else -1


def _make_state(segment: Segment, layout: Layout, rank: int) -> Any:
    """Return the native state, or the Python form where there is no extension, or too many ranks
    for it.
    """
    if _native is None or layout.ranks > _MAX_NATIVE_RANKS:
        return ExchangeState()
    return _native.ExchangeState(
        segment.raw,
        rank,
        layout.ranks,
        BLOCK,
        SIGNATURES,
        layout.chunk,
        layout.halves,
        layout.half_bytes,
        layout.fragment,
    )


# Words of a control block: counter, state, process; of a rank that has failed, the length of its
# error text, the kind of error, and the number of ranks that the error names, which follow after
# the signatures of the two halves.
_TICK, _STATE, _PID, _LENGTH, _KIND, _COUNT = range(SIGNATURES)
_RANKS = SIGNATURES + 2
_MAX_RANKS = 10  # of those that an error names; further ones are left out
_WORDS = BLOCK // 8
# bytes into a control block; what follows holds a failed rank's error text
_TEXT = (_RANKS + _MAX_RANKS) * 8
_ACTIVE = 1
_LEFT = 2
_FAILED = 3
_OTHER = 0
_LOST = 1
_STALLED = 2


class RankStates:
    """One rank's view of the control blocks.

    Every collective takes the same number of ticks on every rank. A rank's counter is the number of
    the last tick that it has posted; what a tick means (data written, data read) is defined by the
    collective. As ticks only grow, "all have reached tick t" stays true once it is.

    Args:
        segment: the group's memory.
        layout: its division.
        rank: this rank, 0 ≤ rank < layout.ranks.
        display_ranks: the number of each rank in errors: its rank in a group that spans hosts.
    """

    def __init__(
        self, segment: Segment, layout: Layout, rank: int, display_ranks: Sequence[int]
    ) -> None:
        self.rank = rank
        self.size = layout.ranks
        self._display_ranks = display_ranks
        self._segment = segment
        self._words = segment.words
        self._own_block = rank * _WORDS
        self._others = tuple((i, i * _WORDS) for i in range(self.size) if i != rank)
        self._peers: ProcessLiveness | None = None
        self.failure = ""  # why waits of this rank are to end, if they are
        self.state = _make_state(segment, layout, rank)

    def announce(self, pid: int) -> None:
        """Publish this rank's process; to be called before any rank calls `watch_processes`."""
        self._words[self._own_block + _PID] = pid
        self._words[self._own_block + _STATE] = _ACTIVE

    def watch_processes(self) -> None:
        """Begin to watch the other ranks' processes; all ranks have called `announce`."""
        self._peers = ProcessLiveness(
            {rank: self._words[block + _PID] for rank, block in self._others}
        )

    def post(self) -> int:
        """Post this rank's next tick, and return its number."""
        tick: int = self.state.tick + 1
        self.state.tick = tick
        memory_fence()  # whoever sees the tick sees what was written before it
        self._words[self._own_block] = tick
        return tick

    def write_signature(self, signature: int) -> None:
        """Publish which collective this rank writes to the half that it has claimed; see
        signatures.py.
        """
        self._words[self._own_block + SIGNATURES + self.state.half] = signature

    def check_signature(self, rank: int, expected: int) -> None:
        """Raise TransportError unless `rank`, which has posted, has written to this half for the
        same collective.
        """
        signature = self._words[rank * _WORDS + SIGNATURES + self.state.half]
        if rank != self.rank and signature != expected:
            raise self.mismatch_error(rank, signature, expected)

    def mismatch_error(self, rank: int, signature: int, expected: int) -> TransportError:
        """Return the error when `rank` is in another collective."""
        return mismatch_error(self.rank, rank, signature, expected, self._display_ranks)

    def all_reached(self, tick: int) -> bool:
        """Return whether every rank has posted `tick`."""
        state = self.state
        if state.low >= tick:
            return True
        words = self._words
        for _, block in self._others:
            if words[block] < tick:
                return False
        state.low = min(tick, state.tick)
        memory_fence()  # what the others have written is read after their ticks
        return True

    def reached(self, rank: int, tick: int) -> bool:
        """Return whether `rank` has posted `tick`."""
        if self._words[rank * _WORDS] < tick:
            return False
        memory_fence()  # what that rank has written is read after its tick
        return True

    def wait_for_all(self, tick: int) -> Steps:
        """Wait until all have posted `tick`."""
        if self.all_reached(tick):
            return
        yield None
        while not self.all_reached(tick):
            yield lambda: (rank for rank, block in self._others if self._words[block] < tick)

    def wait_for(self, rank: int, tick: int) -> Steps:
        """Wait until `rank` has posted `tick`."""
        if self.reached(rank, tick):
            return
        yield None
        while not self.reached(rank, tick):
            yield lambda: (slow for slow in (rank,) if not self.reached(slow, tick))

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has left the group in good order."""
        return self._words[rank * _WORDS + _STATE] == _LEFT

    def check(self, operation: str, awaited: Iterable[int], waited: float, timeout: float) -> None:
        """Raise when one of the `awaited` ranks will never arrive at `operation`, or the time limit
        is over.

        Raises:
            RankLostError: it has ended, or has left the group; or another rank has given up because
                of that.
            StallError: more than `timeout` seconds have been `waited`, here or where a rank has
                given up.
            TransportError: a rank has given up for another reason, which is in the message. Or this
                one has, in another thread.
        """
        if self.failure:
            raise TransportError(f"shm: this rank gave up: {self.failure}")
        for rank, block in self._others:
            if self._words[block + _STATE] == _FAILED:
                raise self._failure_of(rank)
        lost = self._lost_ranks()
        # iterated after the lost ranks are known: a rank may arrive, and then end
        missing = list(awaited)
        for rank in missing:
            if rank in lost:
                raise RankLostError(self._display_ranks[rank], f"shm: {operation}: {lost[rank]}")
        if waited > timeout:
            ranks = tuple(self._display_ranks[rank] for rank in missing)
            names = (
                f"rank{'s'[: len(ranks) != 1]} {', '.join(map(str, ranks))}"
                if ranks
                else "ranks on other hosts"
            )
            raise StallError(
                f"shm: {operation} timed out: {names} did not arrive within {waited:.1f} s", ranks
            )

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Let the others know that this rank has given up; each of their waits ends with an error.

        Args:
            reason: the text of their errors.
            error: the error here; theirs are of the same kind and name the same ranks.
        """
        if self._words[self._own_block + _PID] != os.getpid():
            return  # a forked child; the rank is its parent
        kind = _OTHER
        ranks: tuple[int, ...] = ()
        if isinstance(error, RankLostError):
            kind = _LOST
            ranks = (error.rank,)
        elif isinstance(error, StallError):
            kind = _STALLED
            ranks = error.ranks[:_MAX_RANKS]
        text = reason.encode()[: BLOCK - _TEXT]
        start = self.rank * BLOCK + _TEXT
        self._segment.raw[start : start + len(text)] = text
        for word, value in enumerate((len(text), kind, len(ranks)), self._own_block + _LENGTH):
            self._words[word] = value
        for word, rank in enumerate(ranks, self._own_block + _RANKS):
            self._words[word] = rank
        memory_fence()  # whoever sees the state sees the error that was written before it
        self._words[self._own_block + _STATE] = _FAILED

    def close(self) -> None:
        """Leave the group: ranks that still wait for this one get an error."""
        if self._words[self._own_block + _PID] != os.getpid():
            return  # a forked child; the rank is its parent
        if self._words[self._own_block + _STATE] == _ACTIVE:
            self._words[self._own_block + _STATE] = _LEFT
        if self._peers is not None:
            self._peers.close()

    def _lost_ranks(self) -> dict[int, str]:
        """Return the ranks that will not arrive any more, and why."""
        gone = self._peers.poll() if self._peers is not None else set()
        lost = {}
        for rank, block in self._others:
            if self.has_left(rank):
                lost[rank] = (
                    f"rank {self._display_ranks[rank]} has left the group that others wait in"
                )
            elif rank in gone:
                lost[rank] = (
                    f"the process of rank {self._display_ranks[rank]} "
                    f"({self._words[block + _PID]}) has ended"
                )
        memory_fence()  # whether a rank has arrived is read after whether it has ended
        return lost

    def _failure_of(self, rank: int) -> TransportError:
        """Return the error that `rank` has given up with."""
        memory_fence()  # the state was read before; the error is read after it
        block = rank * _WORDS
        start = rank * BLOCK + _TEXT
        length, kind, count = self._words[block + _LENGTH : block + SIGNATURES]
        ranks = tuple(self._words[block + _RANKS : block + _RANKS + count])
        reason = bytes(self._segment.raw[start : start + length]).decode(errors="replace")
        text = f"shm: rank {self._display_ranks[rank]} gave up: {reason}"
        if kind == _LOST:
            return RankLostError(ranks[0], text)
        return StallError(text, ranks) if kind == _STALLED else TransportError(text)
