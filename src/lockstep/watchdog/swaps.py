"""Collectives that one rank calls in another order than others.

Only the call sites of swapped collectives differ between ranks, as they do in programs that branch
on purpose. A swap is told from a branch by the stack: on one of the ranks a for loop has called
both, one turn after the other.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from ..flight_recorder import FlightRecorder, RawRecord, RecorderReader
from ..flight_recorder.layout import StateWords
from .call_sites import is_internal

if TYPE_CHECKING:
    from .states import RecordRow

_WORDS = StateWords()


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One frame of a stack.

    Attributes:
        code: of the frame.
        at: offset of its current instruction.
        frame: its identity, which is meaningful while the frame exists.
    """

    code: CodeType
    at: int
    frame: int


@dataclass(frozen=True, slots=True)
class LineMismatch:
    """A collective that this rank and others called from different lines.

    Attributes:
        sequence: its sequence number in the group.
        line: digest of this rank's line.
        theirs: digests of the others' lines.
        batch, loop: this rank's.
        stack: in which this rank called it, outermost frame first.
    """

    sequence: int
    line: int
    theirs: frozenset[int]
    batch: int
    loop: int
    stack: tuple[StackEntry, ...]


class SwapDetector:
    """Finds possible swaps in one group and announces them to the other ranks.

    Args:
        recorder: this rank's flight recorder.
        key: of the group.
    """

    def __init__(self, recorder: FlightRecorder, key: int) -> None:
        self._recorder = recorder
        self._key = key
        self.last_mismatch: LineMismatch | None = None

    def note_lines(self, record: RawRecord, lines: set[int]) -> None:
        """Remember the stack of the collective of `record` if other ranks called it from other
        `lines`.
        """
        theirs = frozenset(lines - {record.line})
        if theirs:
            stack = capture_stack(sys._getframe(1))
            self.last_mismatch = LineMismatch(
                record.sequence, record.line, theirs, record.batch, record.loop, stack
            )

    def announce(self, last: LineMismatch, sequence: int, line: int, frame: FrameType) -> None:
        """Announce the collective `sequence` if a loop now calls what another rank called instead
        of the last one.
        """
        self.last_mismatch = None
        recorder = self._recorder
        same_batch = (last.batch, last.loop) == (recorder.batch, recorder.loop)
        may_swap = last.sequence + 1 == sequence and line in last.theirs and same_batch
        if may_swap and is_next_iteration(last.stack, frame):
            recorder.set_word(_WORDS.swap_group, self._key)
            recorder.set_word(_WORDS.swap, sequence)

    def has_announced(self, reader: RecorderReader, sequence: int) -> bool:
        """Return whether the rank of that flight recorder has announced the collective
        `sequence`.
        """
        return (
            reader.state_word(_WORDS.swap_group) == self._key
            and reader.state_word(_WORDS.swap) == sequence
        )


def are_swapped(
    before: tuple[RawRecord | RecordRow, RawRecord | RecordRow],
    now: tuple[RawRecord | RecordRow, RawRecord | RecordRow],
) -> bool:
    """Return whether two ranks have swapped two like collectives: each now calls what the other
    called just before.

    Args:
        before: a collective, as each of the two ranks has recorded it.
        now: the next collective of the group.
    """
    fingerprints = {raw.fingerprint for raw in (*before, *now)}
    named = any(raw.name for raw in (*before, *now))
    lines = (before[0].line, before[1].line) == (now[1].line, now[0].line)
    return len(fingerprints) == 1 and lines and not named and now[0].line != now[1].line


def capture_stack(frame: FrameType | None) -> tuple[StackEntry, ...]:
    """Return the stack that ends at `frame`, outermost frame first."""
    return tuple(
        StackEntry(caller.f_code, caller.f_lasti, id(caller))
        for caller in reversed(list(_outwards(frame)))
    )


def is_next_iteration(before: tuple[StackEntry, ...], frame: FrameType | None) -> bool:
    """Return whether one for loop makes both calls, by calling one item after the other of what it
    iterates over.

    ``for metric in metrics: metric.sync()`` does, and so does a loop over functions. Where both
    calls begin in one function (``if first: f() else: g()``), or what is called is not what the
    loop iterates over (``roles[step % 2]()``), ranks may take turns on purpose.

    Args:
        before: the stack of the first call.
        frame: of the second call.
    """
    now = list(_outwards(frame))[::-1]
    common = 0  # how many frames of both stacks are the same, outermost first
    for entry, current in zip(before, now, strict=False):
        if entry.code is not current.f_code or entry.at != current.f_lasti:
            break
        common += 1
    else:
        return False
    if not common or before[common].code is now[common].f_code:
        return False
    for i in reversed(range(common)):
        if before[i].frame == id(now[i]) and _iterates_over(now[i], now[i + 1]):
            return True
        if not is_internal(now[i].f_code.co_filename):  # decorators and the like may stand between
            return False
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _iterates_over(frame: FrameType, callee: FrameType) -> bool:
    """Return whether `frame` is in a for loop over what it has called, or over the objects whose
    method that is.
    """
    names = _loop_variables(frame.f_code, frame.f_lasti)
    # read only where ranks differ: before Python 3.13 a frame keeps the dictionary that this makes
    return any(
        _is_callee(frame.f_locals.get(name, frame.f_globals.get(name)), callee) for name in names
    )


def _loop_variables(code: CodeType, at: int) -> list[str]:
    """Return the names that the for loops around the instruction `at` assign in each turn."""
    names = list[str]()
    inside = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            inside = instruction.offset < at < instruction.argval
        elif inside and instruction.opname.startswith("STORE_"):
            names += (
                instruction.argval
                if isinstance(instruction.argval, tuple)
                else [instruction.argval]
            )
        elif not instruction.opname.startswith("UNPACK_"):
            inside = False
    return names


def _is_callee(value: Any, callee: FrameType) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        return function.__code__ is callee.f_code
    return value is not None and _first_argument(callee) is value


def _first_argument(frame: FrameType) -> Any:
    """Return the first argument with which a function was called; None without arguments."""
    code = frame.f_code
    if code.co_argcount:
        return frame.f_locals.get(code.co_varnames[0])
    if code.co_flags & inspect.CO_VARARGS:  # as of a function that a decorator has made
        return next(iter(frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ())), None)
    return None
