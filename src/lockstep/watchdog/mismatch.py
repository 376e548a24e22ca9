"""Differences between ranks' records of one collective, and collectives that one rank calls in
another order.

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
from typing import Any

from ..flight_recorder import FlightRecorder, RawRecord, Record, RecorderReader
from ..flight_recorder.layout import StateWords
from .call_sites import is_internal
from .report import Finding, advice_on_method, method_in
from .states import RecordRow

__all__ = [
    "KINDS",
    "StackEntry",
    "SwapDetector",
    "are_swapped",
    "capture_stack",
    "compare_records",
    "describe_collective",
    "describe_difference",
    "is_error",
    "is_next_iteration",
    "size_finding",
]


# --- Differences between two ranks' records of one collective
# ---------------------------------------------------------

KINDS = ("desync", "ended", "swap", "batches", "lines")
"""How two records of one collective can differ, the gravest first.

"desync": the calls themselves differ; "ended": one rank has run out of batches and the other has
not; "swap": one rank makes two like calls in another order; "batches": different batches of one
loop; "lines": different lines.
"""


def is_error(kind: str, strict: bool) -> bool:
    """Return whether a difference is an error, not a warning: programs branch, and skip a bad
    batch, on purpose.
    """
    return strict or kind not in ("batches", "lines")


def compare_records(
    mine: RawRecord | RecordRow, theirs: RawRecord | RecordRow, uneven: bool = False
) -> Iterator[str]:
    """Yield how two records of one collective differ, the gravest first; a "swap" does not show in
    one collective.

    Args:
        mine: one record.
        theirs: the other one.
        uneven: whether ranks have different numbers of batches on purpose.
    """
    if mine.fingerprint != theirs.fingerprint:
        yield "desync"
    # under `Join` a rank that has run out of batches makes the collectives of the others, on a line
    # of torch's
    lines = mine.line != theirs.line and not mine.name and not uneven
    if mine.loop == theirs.loop and mine.loop and mine.batch != theirs.batch and not uneven:
        if mine.batch >= 0 and theirs.batch >= 0:
            yield "batches"
        elif lines and (mine.batch >= 0) != (theirs.batch >= 0):
            yield "ended"
    if lines:
        yield "lines"


def describe_difference(kind: str, ranks: tuple[int, int], calls: tuple[Record, Record]) -> Finding:
    """Return what is wrong where two ranks differ.

    Args:
        kind: one of `KINDS`.
        ranks: the two ranks.
        calls: their records; without a call site where only what is compared is known.
    """
    where = describe_collective(calls[0].sequence, calls[0].group)
    if kind in ("batches", "ended"):
        found = [f"rank {rank} {_batch(call)}" for rank, call in zip(ranks, calls, strict=True)]
        return Finding(
            "batches", f"Batch mismatch at {where}: {', '.join(found)}.", (), *_BATCH_ADVICE
        )
    if kind in ("lines", "swap"):
        sites = [
            f"rank {rank} at {call.call_site}: {call.source}"
            for rank, call in zip(ranks, calls, strict=True)
        ]
        title = "Call site mismatch" if kind == "lines" else "Swapped collectives"
        sentence = f"{title} at {where}: {calls[0].what} was called by {sites[0]}; by {sites[1]}."
        return Finding("desync", sentence, (), *(_LINE_ADVICE if kind == "lines" else _SWAP_ADVICE))
    if all(call.what.startswith("model(") for call in calls):
        models = [
            f"rank {rank} has {call.what.removeprefix('model')}"
            for rank, call in zip(ranks, calls, strict=True)
        ]
        sentence = f"The models differ in their parameters: {', '.join(models)}."
        return Finding("parameters", sentence, (), *_MODEL_ADVICE)
    is_named = len({call.name for call in calls}) > 1
    called = []
    for rank, call in zip(ranks, calls, strict=True):
        name = f" named {call.name!r}" if is_named and call.name else ""
        site = f" at {call.call_site}" if call.call_site else ""
        called.append(f"rank {rank} called {call.what}{name}{site}")
    return Finding(
        "desync", f"Desync at {where}: {', '.join(called)}.", (), *_cause_and_advice(ranks, calls)
    )


def describe_collective(sequence: int, group: str) -> str:
    """Return ``collective #6 of the default group``, or ``... of group tp``."""
    return f"collective #{sequence} of {f'group {group}' if group else 'the default group'}"


def size_finding(ranks: tuple[int, int], sizes: tuple[int, int], tag: int, call: str) -> Finding:
    """Return the finding for a message that is larger than its receive.

    Args:
        ranks: source and destination.
        sizes: of the message and of the tensor that is to receive it, in bytes.
        tag: of the message.
        call: the one of both that came second, as text.
    """
    of_tag = f" (tag {tag})" if tag else ""
    return Finding(
        "desync",
        f"Rank {ranks[0]} sends {sizes[0]:,} bytes to rank {ranks[1]}{of_tag}, which receives "
        f"into {sizes[1]:,} bytes, in {call}.",
        (),
        "The tensors of this send and recv have other shapes or dtypes, or messages are received "
        "in another order than they were sent.",
        "Receive into a tensor of the shape and dtype that is sent, in the order of the sends; "
        "give messages that may overtake each other tags.",
    )


# Likely cause, and what to do.

_LINE_ADVICE = (
    "Two collectives are called in another order on one rank, or a collective that only one rank "
    "calls was matched with another one.",
    "Call the same collectives in the same order on every rank. If ranks branch here on purpose, "
    "nothing is wrong: "
    'lockstep.flight_recorder.named("...") names a collective, and LOCKSTEP_WATCHDOG=strict '
    "makes this an error.",
)

_SWAP_ADVICE = (
    "Each rank has just called what the other one calls now: a loop calls the same items in "
    "another order on one rank, as over a set, or over a dictionary that was filled in another "
    "order.",
    "Iterate in the same order on every rank, for example over sorted items. If nothing is "
    "wrong, give both "
    'collectives the same name: with lockstep.flight_recorder.named("...").',
)

_BATCH_ADVICE = (
    "A rank has skipped a batch, has taken an extra one, or has fewer batches than another.",
    "Let every rank take the same number of batches. If the numbers differ on purpose, call "
    "lockstep.flight_recorder.note_batch(-1) after each batch.",
)

_MODEL_ADVICE = (
    "The model has other layers, other sizes, or another order of layers on one rank.",
    "Build the same model on every rank: the class, its options and its layers must not depend on "
    "the rank.",
)


def _batch(call: Record) -> str:
    if call.finished:
        return f"ran out of batches after {call.batch}"
    return f"is on batch {call.batch}"


_SAME_ORDER = "Call the same collectives in the same order on every rank of the group."


def _cause_and_advice(ranks: tuple[int, int], calls: tuple[Record, Record]) -> tuple[str, str]:
    first, second = calls
    methods = [method_in(call.name) for call in calls]
    if methods[0] != methods[1]:
        at = max(
            (0, 1), key=lambda number: (methods[number] != "Trainer.fit") * len(methods[number])
        )
        at = at if methods[at] else 1 - at
        others = f"in {methods[1 - at]}" if methods[1 - at] else "not"
        return (
            f"Rank {ranks[at]} is in {methods[at]}, rank {ranks[1 - at]} is {others}: it is "
            "called in a branch that only some ranks take.",
            advice_on_method(methods[at]),
        )
    if not (first.call_site and second.call_site):
        return (
            "A collective is in a branch that only some ranks take, or their tensors differ.",
            _SAME_ORDER,
        )
    same_operation = first.what.partition("(")[0] == second.what.partition("(")[0]
    if first.loop == second.loop and first.finished != second.finished and not same_operation:
        return (
            "One rank has fewer batches than another, and has continued with what follows the "
            "loop.",
            "Give every rank the same number of batches, e.g. with a DistributedSampler, "
            "drop_last=True or lockstep.Loader.",
        )
    if not same_operation or first.call_site != second.call_site or first.name != second.name:
        return (
            "A collective is in a branch that only some ranks take, or ranks call collectives in "
            "different orders.",
            _SAME_ORDER,
        )
    return (
        "Tensors have different shapes or dtypes on some ranks: a smaller last batch, another "
        "model, or mixed precision on some ranks only.",
        "Give the tensors the same shape and dtype on every rank before the collective.",
    )


# --- Swapped collectives
# ----------------------------------------------------------------------------------------------

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

    def note_lines(self, own: RawRecord, lines: set[int]) -> None:
        """Remember the stack of the collective `own` if other ranks called it from other
        `lines`.
        """
        theirs = frozenset(lines - {own.line})
        if theirs:
            stack = capture_stack(sys._getframe(1))
            self.last_mismatch = LineMismatch(
                own.sequence, own.line, theirs, own.batch, own.loop, stack
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


def are_swapped(before: tuple[RawRecord, RawRecord], now: tuple[RawRecord, RawRecord]) -> bool:
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


# --- Stacks and loops
# -------------------------------------------------------------------------------------------------


def capture_stack(frame: FrameType | None) -> tuple[StackEntry, ...]:
    """Return the stack that ends at `frame`, outermost frame first."""
    return tuple(
        StackEntry(each.f_code, each.f_lasti, id(each)) for each in reversed(list(_outwards(frame)))
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
    pairs = zip(before, now, strict=False)
    common = next((i for i, (entry, each) in enumerate(pairs) if not _is_at(entry, each)), 0)
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


def _is_at(entry: StackEntry, frame: FrameType) -> bool:
    return entry.code is frame.f_code and entry.at == frame.f_lasti


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
    for each in dis.get_instructions(code):
        if each.opname == "FOR_ITER":
            inside = each.offset < at < each.argval
        elif inside and each.opname.startswith("STORE_"):
            names += each.argval if isinstance(each.argval, tuple) else [each.argval]
        elif not each.opname.startswith("UNPACK_"):
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
