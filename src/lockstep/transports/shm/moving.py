"""Collectives that only move data: broadcast, gather, all-gather, scatter, all-to-all, barrier, through the arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .arena import Arena
from .layout import HEADER
from .waiting import Steps

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "flat_of", "gather", "put_back", "scatter"]


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
    board, rank = arena.board, arena.rank
    flat = flat_of(tensor)
    for chunk in _chunks(flat, arena.chunk // flat.element_size()):
        yield from arena.claim(1, ends_reading=True)
        slot = arena.slots((chunk.numel(),), chunk.dtype)[root]
        if rank == root:
            slot.copy_(chunk)
        else:
            yield from board.until(root, board.state.tick + 1)
            chunk.copy_(slot)
        board.post()
    if rank != root:
        put_back(flat, tensor)


def gather(arena: Arena, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank i's `tensor` into `outputs[i]` of rank `root`; all tensors have the same number of elements."""
    board, flat = arena.board, flat_of(tensor)
    length = arena.chunk // flat.element_size()
    flats = [flat_of(output) for output in outputs]
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from arena.claim(1, ends_reading=True)
        slots = arena.slots((chunk.numel(),), chunk.dtype)
        if arena.rank == root:
            for source, out in enumerate(flats):
                if source != root:
                    yield from board.until(source, board.state.tick + 1)
                out[start : start + length].copy_(chunk if source == root else slots[source])
        else:
            slots[arena.rank].copy_(chunk)
        board.post()
    for out, output in zip(flats, outputs, strict=True):
        put_back(out, output)


def scatter(arena: Arena, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Steps:
    """Copy `inputs[i]` of rank `root` into rank i's `tensor`; all tensors have the same number of elements."""
    board, flat = arena.board, flat_of(tensor)
    length = arena.chunk // flat.element_size()
    flats = [flat_of(part) for part in inputs]
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from arena.claim(1, ends_reading=True)
        slots = arena.slots((chunk.numel(),), chunk.dtype)
        if arena.rank == root:
            for target, part in enumerate(flats):
                (chunk if target == root else slots[target]).copy_(part[start : start + length])
        else:
            yield from board.until(root, board.state.tick + 1)
            chunk.copy_(slots[arena.rank])
        board.post()
    put_back(flat, tensor)


def all_gather(arena: Arena, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
    """Copy rank i's `tensor` into everyone's `outputs[i]`; sizes may differ between ranks."""
    board, rank = arena.board, arena.rank
    mine, flats = flat_of(tensor), [flat_of(output) for output in outputs]
    length = arena.chunk // mine.element_size()
    for start in range(0, max(flat.numel() for flat in flats), length):
        yield from arena.claim(1, ends_reading=False)
        chunk = mine[start : start + length]
        arena.slots((chunk.numel(),), chunk.dtype)[rank].copy_(chunk)
        tick = board.post()
        yield from board.until_all(tick)
        for source, flat in enumerate(flats):
            out = flat[start : start + length]
            out.copy_(chunk if source == rank else arena.slots((out.numel(),), out.dtype)[source])
    for flat, output in zip(flats, outputs, strict=True):
        put_back(flat, output)


def all_to_all(arena: Arena, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
    """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; sizes may differ everywhere.

    No rank knows the sizes of all, so each says in its slot's header how many chunks it needs, and the first chunk
    tells everyone the most.
    """
    board, rank = arena.board, arena.rank
    sources, targets = [_bytes(flat_of(part)) for part in inputs], [flat_of(output) for output in outputs]
    room = (arena.chunk - HEADER) // arena.size // HEADER * HEADER
    rounds = needed = max(1, *(-(-part.numel() // room) for part in sources))
    done = 0
    while done < rounds:
        yield from arena.claim(1, ends_reading=False)
        headers, start = arena.slots((1,), torch.int64), done * room
        headers[rank].fill_(needed)
        for target, part in enumerate(sources):
            piece = part[start : start + room]
            if target != rank and piece.numel():
                _piece(arena, rank, target, room, piece.numel()).copy_(piece)
        tick = board.post()
        yield from board.until_all(tick)
        if done == 0:
            rounds = max(int(header) for header in headers[:-1])
        for source, flat in enumerate(targets):
            out = _bytes(flat)[start : start + room]
            if source != rank and out.numel():
                out.copy_(_piece(arena, source, rank, room, out.numel()))
        done += 1
    targets[rank].copy_(flat_of(inputs[rank]))
    for flat, output in zip(targets, outputs, strict=True):
        put_back(flat, output)


def _piece(arena: Arena, source: int, target: int, room: int, nbytes: int) -> torch.Tensor:
    return arena.slots((nbytes,), torch.uint8, HEADER + target * room)[source]


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _chunks(flat: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), length):
        yield flat[start : start + length]
