"""Two like collectives that a rank calls in another order than others, told from a branch by the loop around them."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from ..recorder import Raw
from .places import is_internal

__all__ = ["Passed", "Step", "crosses", "is_next_of_a_loop", "steps_to"]


@dataclass(frozen=True, slots=True)
class Step:
    """One frame of a stack. Attributes: code; at, the instruction; frame, its identity while it lives, or another's."""

    code: CodeType
    at: int
    frame: int


@dataclass(frozen=True, slots=True)
class Passed:
    """A collective in which this rank and others were on different lines.

    Attributes:
        sequence: its number in the group.
        line: this rank's.
        theirs: those of the others.
        batch, loop: this rank's.
        stack: in which this rank called it, outermost first.
    """

    sequence: int
    line: int
    theirs: frozenset[int]
    batch: int
    loop: int
    stack: tuple[Step, ...]


def crosses(before: tuple[Raw, Raw], now: tuple[Raw, Raw]) -> bool:
    """Whether two ranks have changed lines: each now calls what the other has just called, and all four are alike.

    Args:
        before: a collective, as each of the two has recorded it.
        now: the next one of the group.
    """
    alike = {raw.fingerprint for raw in (*before, *now)}
    named = any(raw.name for raw in (*before, *now))
    lines = (before[0].line, before[1].line) == (now[1].line, now[0].line)
    return len(alike) == 1 and lines and not named and now[0].line != now[1].line


def steps_to(frame: FrameType | None) -> tuple[Step, ...]:
    """The stack that leads to `frame`, outermost first."""
    return tuple(Step(each.f_code, each.f_lasti, id(each)) for each in reversed(list(_outwards(frame))))


def is_next_of_a_loop(before: tuple[Step, ...], frame: FrameType | None) -> bool:
    """Whether a for loop has called what was called before, and now calls the next one, of things that it goes over.

    ``for metric in metrics: metric.sync()`` does, and so does a loop over functions. Where the two calls begin in one
    function (``if first: f() else: g()``), or what is called is not what the loop goes over (``roles[step % 2]()``),
    ranks may take turns on purpose.

    Args:
        before: the stack of the first call.
        frame: of the second call.
    """
    now = list(_outwards(frame))[::-1]
    pairs = zip(before, now, strict=False)
    alike = next((i for i, (step, each) in enumerate(pairs) if not _is_there(step, each)), 0)
    if not alike or before[alike].code is now[alike].f_code:
        return False
    for i in reversed(range(alike)):
        if before[i].frame == id(now[i]) and _goes_over(now[i], now[i + 1]):
            return True
        if not is_internal(now[i].f_code.co_filename):  # what only passes calls on may stand between
            return False
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_there(step: Step, frame: FrameType) -> bool:
    return step.code is frame.f_code and step.at == frame.f_lasti


def _goes_over(frame: FrameType, callee: FrameType) -> bool:
    """Whether `frame` is in a for loop whose variable is what it has called, or the object whose method that is."""
    names = _loop_variables(frame.f_code, frame.f_lasti)
    # asked for only where ranks have changed lines: before Python 3.13 a frame keeps what it is asked for
    return any(_is(frame.f_locals.get(name, frame.f_globals.get(name)), callee) for name in names)


def _loop_variables(code: CodeType, at: int) -> list[str]:
    """The names that the for loops around the instruction `at` set in each turn."""
    names, inside = list[str](), False
    for each in dis.get_instructions(code):
        if each.opname == "FOR_ITER":
            inside = each.offset < at < each.argval
        elif inside and each.opname.startswith("STORE_"):
            names += each.argval if isinstance(each.argval, tuple) else [each.argval]
        elif not each.opname.startswith("UNPACK_"):
            inside = False
    return names


def _is(value: Any, callee: FrameType) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        return function.__code__ is callee.f_code
    return value is not None and _first_argument(callee) is value


def _first_argument(frame: FrameType) -> Any:
    """What a function was called with first; None without arguments."""
    code = frame.f_code
    if code.co_argcount:
        return frame.f_locals.get(code.co_varnames[0])
    if code.co_flags & inspect.CO_VARARGS:  # as of a function that a decorator has made
        return next(iter(frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ())), None)
    return None
