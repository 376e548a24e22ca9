"""Collectives that only move data: broadcast, gather, all-gather, scatter, all-to-all, barrier, through the arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import signs
from .arena import Arena
from .compiled import carry_out
from .layout import HEADER
from .waiting import Steps

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "flat_of", "gather", "put_back", "scatter"]

Tensors = Sequence[torch.Tensor]


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of `tensor` in order, shape (numel,): a view where it is contiguous, otherwise a copy."""
    if tensor.is_conj() or tensor.is_neg():  # lazily conjugated or negated: its bytes are not yet what it says
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.contiguous().view(-1)
    # a single element is contiguous whatever its stride says, but not to `view(dtype)`
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,), flat.storage_offset())


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `flat` into `tensor` unless it is a view of it."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def barrier(arena: Arena) -> Steps:
    """Go on when all ranks have come here."""
    tick = arena.board.post()
    yield from arena.board.until_all(tick)


def broadcast(arena: Arena, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank `root`'s `tensor` into everyone's, in place. The root goes on as soon as its data is in the arena."""
    flat = flat_of(tensor)
    if arena.compiled:
        yield from carry_out(arena, signs.BROADCAST, [flat], [flat], root)
    else:
        yield from _broadcast(arena, flat, root)
    if arena.rank != root:
        put_back(flat, tensor)


def gather(arena: Arena, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank i's `tensor` into `outputs[i]` of rank `root`; all tensors have the same number of elements."""
    flat, flats = flat_of(tensor), [flat_of(output) for output in outputs]
    if arena.compiled:
        yield from carry_out(arena, signs.GATHER, [flat], flats, root)
    else:
        yield from _gather(arena, flats, flat, root)
    _put_all_back(flats, outputs)


def scatter(arena: Arena, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    """Copy `inputs[i]` of rank `root` into rank i's `tensor`; all tensors have the same number of elements."""
    flat, flats = flat_of(tensor), [flat_of(part) for part in inputs]
    if arena.compiled:
        yield from carry_out(arena, signs.SCATTER, flats, [flat], root)
    else:
        yield from _scatter(arena, flat, flats, root)
    put_back(flat, tensor)


def all_gather(arena: Arena, outputs: Tensors, tensor: torch.Tensor) -> Steps:
    """Copy rank i's `tensor` into everyone's `outputs[i]`; sizes may differ between ranks."""
    flat, flats = flat_of(tensor), [flat_of(output) for output in outputs]
    if arena.compiled:
        yield from carry_out(arena, signs.ALL_GATHER, [flat], flats)
    else:
        yield from _all_gather(arena, flats, flat)
    _put_all_back(flats, outputs)


def all_to_all(arena: Arena, outputs: Tensors, inputs: Tensors) -> Steps:
    """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; sizes may differ everywhere."""
    sources, targets = [flat_of(part) for part in inputs], [flat_of(output) for output in outputs]
    if arena.compiled:
        yield from carry_out(arena, signs.ALL_TO_ALL, sources, targets)
    else:
        plain = [_bytes(flat) for flat in targets], [_bytes(flat) for flat in sources]
        yield from _all_to_all(arena, *plain, sources[0].dtype)
    _put_all_back(targets, outputs)


# The same without the compiled part; all tensors are flat.


def _broadcast(arena: Arena, flat: torch.Tensor, root: int) -> Steps:
    board, rank = arena.board, arena.rank
    length = arena.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from arena.claim(signs.BROADCAST, flat.dtype, flat.nbytes, 1, ends_reading=True, writes=rank == root)
        slot = arena.slots((chunk.numel(),), chunk.dtype)[root]
        if rank == root:
            slot.copy_(chunk)
        else:
            yield from board.until(root, board.state.tick + 1)
            arena.agree(root, flat.nbytes)
            chunk.copy_(slot)
        board.post()


def _gather(arena: Arena, outputs: Tensors, flat: torch.Tensor, root: int) -> Steps:
    board = arena.board
    length = arena.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from arena.claim(signs.GATHER, flat.dtype, flat.nbytes, 1, ends_reading=True, writes=arena.rank != root)
        slots = arena.slots((chunk.numel(),), chunk.dtype)
        if arena.rank == root:
            for source, out in enumerate(outputs):
                if source != root:
                    yield from board.until(source, board.state.tick + 1)
                    arena.agree(source, flat.nbytes)
                out[start : start + length].copy_(chunk if source == root else slots[source])
        else:
            slots[arena.rank].copy_(chunk)
        board.post()


def _scatter(arena: Arena, flat: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    board = arena.board
    length = arena.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from arena.claim(signs.SCATTER, flat.dtype, flat.nbytes, 1, ends_reading=True, writes=arena.rank == root)
        slots = arena.slots((chunk.numel(),), chunk.dtype)
        if arena.rank == root:
            for target, part in enumerate(inputs):
                if target != root:
                    slots[target].copy_(part[start : start + length])
            chunk.copy_(inputs[root][start : start + length])  # last, as it may be one of the inputs
        else:
            yield from board.until(root, board.state.tick + 1)
            arena.agree(root, flat.nbytes)
            chunk.copy_(slots[arena.rank])
        board.post()


def _all_gather(arena: Arena, outputs: Tensors, mine: torch.Tensor) -> Steps:
    board, rank = arena.board, arena.rank
    length = arena.chunk // mine.element_size()
    for start in range(0, max(flat.numel() for flat in outputs), length):
        yield from arena.claim(signs.ALL_GATHER, mine.dtype, mine.nbytes, 1, ends_reading=False)
        chunk = mine[start : start + length]
        arena.slots((chunk.numel(),), chunk.dtype)[rank].copy_(chunk)
        tick = board.post()
        yield from board.until_all(tick)
        for source, flat in enumerate(outputs):
            arena.agree(source, flat.nbytes)
            out = flat[start : start + length]
            out.copy_(chunk if source == rank else arena.slots((out.numel(),), out.dtype)[source])


def _all_to_all(arena: Arena, outputs: Tensors, inputs: Tensors, dtype: torch.dtype) -> Steps:
    """Of the bytes of tensors of `dtype`.

    A slot begins with the most that its rank sends to anyone, and then what it sends to each. No rank
    knows the sizes of all: the first chunk tells everyone how many there are.
    """
    board, rank, size = arena.board, arena.rank, arena.size
    sizes = [part.numel() for part in inputs]
    begin = -(-(size + 1) * 8 // HEADER) * HEADER
    room = (arena.chunk - begin) // size // HEADER * HEADER
    start, most = 0, max(sizes)
    while start == 0 or start < most:
        yield from arena.claim(signs.ALL_TO_ALL, dtype, 0, 1, ends_reading=False)
        arena.write_sizes([max(sizes), *sizes])
        for target, part in enumerate(inputs):
            piece = part[start : start + room]
            if target != rank and piece.numel():
                arena.slots((piece.numel(),), torch.uint8, begin + target * room)[rank].copy_(piece)
        tick = board.post()
        yield from board.until_all(tick)
        for source, out in enumerate(outputs):
            arena.agree(source, 0)
            told = arena.read_sizes(source, size + 1)
            most = max(most, told[0])
            if told[1 + rank] != out.numel():
                raise arena.difference(source, told[1 + rank], out.numel())
            piece = out[start : start + room]
            if source != rank and piece.numel():
                piece.copy_(arena.slots((piece.numel(),), torch.uint8, begin + rank * room)[source])
        start += room
    outputs[rank].copy_(inputs[rank])


def _put_all_back(flats: Tensors, tensors: Tensors) -> None:
    for flat, tensor in zip(flats, tensors, strict=True):
        put_back(flat, tensor)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)
