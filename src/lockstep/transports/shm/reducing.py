"""Collectives that add: all-reduce, reduce, reduce-scatter, through the arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import signs
from .arena import Arena
from .compiled import carry_out
from .fold import Fold
from .moving import flat_of, put_back
from .waiting import Steps

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

_WHOLE = 32 << 10  # up to this many bytes over all ranks each adds everything itself, which needs one tick, not two
_ALIGN = 64  # bytes; slices begin on a cache line, so that no two ranks write into one


def all_reduce(arena: Arena, tensor: torch.Tensor, fold: Fold, code: int = -1) -> Steps:
    """Reduce `tensor` over all ranks, in place, any shape and strides; every rank gets the same bits.

    Args:
        arena: where the ranks exchange it.
        tensor: this rank's values, and then the result.
        fold: the reduction.
        code: see `compiled_code`; -1 for what the compiled part does not do. It takes the same ticks
            and gives the same bits, so ranks with and without it work together.
    """
    if code >= 0 and tensor.numel():
        flat = flat_of(tensor)
        yield from carry_out(arena, signs.ALL_REDUCE, [flat], [flat], 0, code)
        put_back(flat, tensor)
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes * (arena.size - 1) <= _WHOLE and nbytes <= arena.chunk:
        yield from _all_reduce_whole(arena, tensor, fold)
        return
    flat = flat_of(tensor)
    length = arena.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        yield from _all_reduce_sliced(arena, flat[start : start + length], flat.nbytes, fold)
    put_back(flat, tensor)


def _all_reduce_whole(arena: Arena, tensor: torch.Tensor, fold: Fold) -> Steps:
    board = arena.board
    yield from arena.claim(signs.ALL_REDUCE, tensor.dtype, tensor.nbytes, 1, ends_reading=False)
    slots = arena.slots(tensor.shape, tensor.dtype)
    slots[arena.rank].copy_(tensor)
    tick = board.post()
    if not board.all_reached(tick):
        yield from board.until_all(tick)
    arena.agree_all(tensor.nbytes)
    fold(slots[:-1], tensor)


def _all_reduce_sliced(arena: Arena, flat: torch.Tensor, nbytes: int, fold: Fold) -> Steps:
    """Each rank reduces its own slice; what only it reads of its own data never goes through shared memory."""
    board, rank = arena.board, arena.rank
    yield from arena.claim(signs.ALL_REDUCE, flat.dtype, nbytes, 2, ends_reading=False)
    slots = arena.slots((flat.numel(),), flat.dtype)
    begin, end = _bounds(flat, arena.size, rank)
    mine, result = slots[rank], slots[-1]
    for a, b in ((0, begin), (end, flat.numel())):
        if a < b:
            mine[a:b].copy_(flat[a:b])
    tick = board.post()
    yield from board.until_all(tick)
    arena.agree_all(nbytes)
    if begin < end:
        own = flat[begin:end]
        fold([own if i == rank else slots[i][begin:end] for i in range(arena.size)], own)
        result[begin:end].copy_(own)
    tick = board.post()
    yield from board.until_all(tick)
    for a, b in ((0, begin), (end, flat.numel())):
        if a < b:
            flat[a:b].copy_(result[a:b])


def reduce(arena: Arena, tensor: torch.Tensor, root: int, fold: Fold, code: int = -1) -> Steps:
    """Reduce `tensor` over all ranks into rank `root`'s, in place; the others' tensors stay as they are."""
    flat = flat_of(tensor)
    if code >= 0:
        yield from carry_out(arena, signs.REDUCE, [flat], [flat], root, code)
    else:
        length = arena.chunk // flat.element_size()
        for start in range(0, flat.numel(), length):
            yield from _reduce_chunk(arena, flat[start : start + length], flat.nbytes, root, fold)
    if arena.rank == root:
        put_back(flat, tensor)


def _reduce_chunk(arena: Arena, flat: torch.Tensor, nbytes: int, root: int, fold: Fold) -> Steps:
    board = arena.board
    yield from arena.claim(signs.REDUCE, flat.dtype, nbytes, 3, ends_reading=True)
    slots = arena.slots((flat.numel(),), flat.dtype)
    slots[arena.rank].copy_(flat)
    tick = board.post()
    yield from board.until_all(tick)
    arena.agree_all(nbytes)
    begin, end = _bounds(flat, arena.size, arena.rank)
    if begin < end:
        fold([slot[begin:end] for slot in slots[:-1]], slots[-1][begin:end])
    tick = board.post()
    if arena.rank == root:
        yield from board.until_all(tick)
        flat.copy_(slots[-1])
    board.post()


def reduce_scatter(
    arena: Arena, output: torch.Tensor, inputs: Sequence[torch.Tensor], fold: Fold, code: int = -1
) -> Steps:
    """Reduce `inputs[i]` over all ranks into rank i's `output`; sizes may differ between i, not between ranks."""
    result, parts = flat_of(output), [flat_of(part) for part in inputs]
    if code >= 0:
        yield from carry_out(arena, signs.REDUCE_SCATTER, parts, [result], 0, code)
    else:
        yield from _reduce_scatter(arena, result, parts, fold)
    put_back(result, output)


def _reduce_scatter(arena: Arena, result: torch.Tensor, parts: Sequence[torch.Tensor], fold: Fold) -> Steps:
    length = arena.chunk // arena.size // _ALIGN * _ALIGN // result.element_size()
    nbytes = sum(part.nbytes for part in parts)
    for start in range(0, max(part.numel() for part in parts), length):
        yield from arena.claim(signs.REDUCE_SCATTER, result.dtype, nbytes, 1, ends_reading=False)
        chunk = [part[start : start + length] for part in parts]
        yield from _reduce_scatter_chunk(arena, result[start : start + length], chunk, length, nbytes, fold)


def _reduce_scatter_chunk(
    arena: Arena, out: torch.Tensor, parts: Sequence[torch.Tensor], stride: int, nbytes: int, fold: Fold
) -> Steps:
    board, rank = arena.board, arena.rank
    slots = arena.slots((stride * arena.size,), out.dtype)
    for target, part in enumerate(parts):
        if target != rank and part.numel():
            slots[rank][target * stride : target * stride + part.numel()].copy_(part)
    tick = board.post()
    yield from board.until_all(tick)
    arena.agree_all(nbytes)
    if out.numel():
        begin, end = rank * stride, rank * stride + out.numel()
        fold([parts[rank] if i == rank else slots[i][begin:end] for i in range(arena.size)], out)


def _bounds(flat: torch.Tensor, ranks: int, rank: int) -> tuple[int, int]:
    """The slice of `flat` that `rank` reduces."""
    step = _ALIGN // flat.element_size()
    per = -(-flat.numel() // ranks)
    per = -(-per // step) * step
    return min(rank * per, flat.numel()), min((rank + 1) * per, flat.numel())
