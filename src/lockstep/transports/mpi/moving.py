"""Collectives that only move data, over an MPI communicator, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..shm.moving import flat_of, put_back
from ..shm.waiting import Steps
from .following import follow
from .library import load
from .memory import gathered, room_for, sizes_of, span

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]

Tensors = Sequence[torch.Tensor]


def barrier(comm: Any) -> Steps:
    """Go on when all ranks have come here."""
    yield from follow(comm.Ibarrier, None)


def broadcast(comm: Any, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank `root`'s `tensor` into everyone's, in place."""
    flat = flat_of(tensor)
    yield from follow(lambda: comm.Ibcast(_bytes(flat), root), flat)
    if comm.rank != root:
        put_back(flat, tensor)


def all_gather(comm: Any, outputs: Tensors, tensor: torch.Tensor) -> Steps:
    """Copy rank i's `tensor` into everyone's `outputs[i]`; sizes may differ between ranks."""
    room = room_for(outputs)
    _put_own(room, outputs, comm.rank, tensor)
    received = [span(room), sizes_of(outputs), load().BYTE]
    yield from follow(lambda: comm.Iallgatherv(load().IN_PLACE, received), room)
    _deal_out(room, outputs)


def gather(comm: Any, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank i's `tensor` into `outputs[i]` of rank `root`; all tensors have the same number of elements."""
    if comm.rank != root:
        flat = flat_of(tensor)
        yield from follow(lambda: comm.Igather(_bytes(flat), None, root), flat)
        return
    room = room_for(outputs)
    _put_own(room, outputs, root, tensor)
    yield from follow(lambda: comm.Igather(load().IN_PLACE, _bytes(room), root), room)
    _deal_out(room, outputs)


def scatter(comm: Any, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    """Copy `inputs[i]` of rank `root` into rank i's `tensor`; all tensors have the same number of elements."""
    if comm.rank != root:
        room = room_for([tensor])
        yield from follow(lambda: comm.Iscatter(None, _bytes(room), root), room)
        put_back(room, tensor)
        return
    flat = gathered(inputs)
    yield from follow(lambda: comm.Iscatter(_bytes(flat), load().IN_PLACE, root), flat)
    put_back(flat_of(inputs[root]), tensor)


def all_to_all(comm: Any, outputs: Tensors, inputs: Tensors) -> Steps:
    """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; sizes may differ everywhere."""
    flat, own = gathered(inputs), flat_of(inputs[comm.rank])
    room = room_for(outputs, apart_from=flat)
    sent = [span(flat), _without(comm.rank, inputs), load().BYTE]
    received = [span(room), _without(comm.rank, outputs), load().BYTE]
    yield from follow(lambda: comm.Ialltoallv(sent, received), (flat, room))
    _put_own(room, outputs, comm.rank, own)
    _deal_out(room, outputs)


def _without(rank: int, parts: Tensors) -> tuple[list[int], list[int]]:
    """Sizes and places of all parts but this rank's own, as MPI is slow to send a rank something of its own."""
    sizes, places = sizes_of(parts)
    return [0 if other == rank else size for other, size in enumerate(sizes)], places


def _bytes(flat: torch.Tensor) -> list[Any]:
    return [span(flat), load().BYTE]


def _put_own(room: torch.Tensor, outputs: Tensors, rank: int, tensor: torch.Tensor) -> None:
    begin = sum(output.numel() for output in outputs[:rank])
    own, flat = room[begin : begin + outputs[rank].numel()], flat_of(tensor)
    if own.data_ptr() != flat.data_ptr():
        own.copy_(flat)


def _deal_out(room: torch.Tensor, outputs: Tensors) -> None:
    parts = torch.split(room, [output.numel() for output in outputs])
    for part, output in zip(parts, outputs, strict=True):
        put_back(part, output)
