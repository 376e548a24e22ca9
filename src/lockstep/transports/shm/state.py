"""What one rank knows of the exchange, in C where the compiled part is there."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ReduceOp

from .layout import BLOCK, SIGNS, Layout
from .segment import Segment
from .signs import dtype_number

_native: ModuleType | None
try:
    _native = import_module("._native", __package__)
except ImportError:  # no compiler was found when the package was installed
    _native = None

_ADDED = 4  # dtypes that the compiled part adds, of those in signs.py the first
_MOST_RANKS = 1024  # as in _exchange.h
_SUM = hash(ReduceOp.SUM)

__all__ = ["State", "compiled_code", "make_state"]


class State:
    """The Python form; the compiled one has the same attributes, and the methods that compiled.py calls.

    Attributes:
        tick: the last tick that this rank has posted.
        low: a tick that every rank is known to have reached.
        half: which half of the arena was claimed last.
        free_0, free_1: the tick that all must have posted before that half is written again.
    """

    __slots__ = ("free_0", "free_1", "half", "low", "tick")

    def __init__(self) -> None:
        self.tick = self.low = self.half = self.free_0 = self.free_1 = 0


def compiled_code(op: Any, dtype: torch.dtype) -> int:
    """The dtype's number, if the compiled part does the reduction `op` of it; -1 where it does not."""
    number = dtype_number(dtype)
    return number if number < _ADDED and hash(op) == _SUM else -1


def make_state(segment: Segment, layout: Layout, rank: int) -> Any:
    """The compiled state, or the Python form where there is none, or too many ranks for it."""
    if _native is None or layout.ranks > _MOST_RANKS:
        return State()
    return _native.State(
        segment.raw,
        rank,
        layout.ranks,
        BLOCK,
        SIGNS,
        layout.chunk,
        layout.halves,
        layout.half_bytes,
        layout.fragment,
    )
