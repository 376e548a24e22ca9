"""Collectives by the compiled part, where it is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arena import Arena
from .signs import dtype_number
from .waiting import Steps

__all__ = ["begin", "carry_out", "number_of", "spans"]

_WAITING, _DONE, _DIFFERENT = range(3)  # as in _exchange.h
_LARGE = 64 << 10  # as in _exchange.h


def spans(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Address and bytes of each tensor, one after the other."""
    numbers: list[int] = []
    for tensor in tensors:
        numbers += (tensor.data_ptr(), tensor.nbytes)
    return tuple(numbers)


def number_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """The number that stands for the dtype of a collective's tensors; 0 where it has none."""
    given = inputs or outputs
    return dtype_number(given[0].dtype) if given else 0


def begin(
    arena: Arena,
    kind: int,
    root: int,
    code: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    looks: int,
    kept: object,
) -> Steps | None:
    """Begin a collective; the steps that are left, or None when it is done.

    Args:
        arena: where the ranks exchange their data.
        kind: which one; of those in signs.py.
        root: its root, or any rank.
        code: the number of the tensors' dtype, see signs.py; of one that it can add, if it is a sum.
        inputs: addresses and sizes in bytes of what this rank gives; one pair may stand for equal parts in a row.
        outputs: the same of what it gets.
        looks: how often it looks at the counters, whenever it waits, before it offers the core to others and then gives
            up for now; -1 to give up at once.
        kept: what has to stay alive until the collective has ended: the owners of those addresses.
    """
    outcome = arena.state.begin(kind, root, code, looks, inputs, outputs)
    if outcome == _DONE:
        return None
    nbytes = max(sum(inputs[1::2]), sum(outputs[1::2]))
    return _go_on(arena, outcome, arena.looks // 2 if nbytes >= _LARGE else -1, kept)


def _go_on(arena: Arena, outcome: int, looks: int, kept: object) -> Steps:
    # a large one leaves the interpreter to others while it looks
    state, board = arena.state, arena.board
    while outcome == _WAITING:
        if state.whom < 0:
            yield from board.until_all(state.awaited)
        else:
            yield from board.until(state.whom, state.awaited)
        outcome = state.advance(looks)
    if outcome == _DIFFERENT:
        raise board.difference(state.odd, state.told, state.expected)


def carry_out(
    arena: Arena,
    kind: int,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    root: int = 0,
    code: int | None = None,
) -> Steps:
    """A collective of flat tensors of one dtype, shape (numel,); `code` is that of a sum, see `compiled_code`."""
    if code is None:
        code = number_of(inputs, outputs)
    rest = begin(arena, kind, root, code, spans(inputs), spans(outputs), -1, (inputs, outputs))
    if rest is not None:
        yield from rest
