"""Memory that a process and its loader processes share, in which the parts of a batch are written
beside each other, so that the batch is there without a copy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

ALIGNMENT = 64
"""Of the memory of a tensor, in bytes: that of torch's own."""

_HAS_MEMORY_FILES = hasattr(os, "memfd_create")

_NUMBERS = count()


def padded(size: int) -> int:
    """Return `size` bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Place:
    """Where a loader process writes the tensors of its samples; it is sent with a request.

    The first tensors of all samples of a batch lie behind one another, then the second ones, and so
    on.

    Attributes:
        piece: the number of the piece of memory.
        oldest: pieces with lower numbers are not used any more.
        path: where the piece can be opened.
        inode: what is to be found there: device and inode.
        sizes: bytes of each tensor of a sample.
        samples: number of samples of the batch.
        first: the first sample of the part of this process, in the batch.
    """

    piece: int
    oldest: int
    path: str
    inode: tuple[int, int]
    sizes: tuple[int, ...]
    samples: int
    first: int

    def cuts(self, count: int) -> Iterator[slice]:
        """Yield where each tensor of `count` samples lies, in bytes; sample by sample."""
        starts = []
        start = 0
        for size in self.sizes:
            starts.append(start)
            start += padded(size * self.samples)
        for sample in range(self.first, self.first + count):
            for start, size in zip(starts, self.sizes, strict=True):
                yield slice(start + sample * size, start + (sample + 1) * size)


class _Piece:
    """A piece of memory in a file without a name, which loader processes open by this process's
    descriptor: it needs no room in /dev/shm, and is gone with the last process that has it.

    Attributes:
        number: its number.
        path: where it can be opened.
        inode: its device and inode.
        memory: its bytes.
        array: what refers to the array of its last lease.
    """

    def __init__(self, size: int) -> None:
        self.number = next(_NUMBERS)
        descriptor = os.memfd_create("lockstep-batch")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.inode = _inode(descriptor)
        self.memory = _mapped(descriptor)
        self.array: Callable[[], NDArray[np.uint8] | None] = lambda: None


def _inode(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _mapped(descriptor: int) -> torch.Tensor:
    """Return the bytes of an open file, as memory that all who map it share."""
    size = os.fstat(descriptor).st_size
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class Lease:
    """A piece of memory for one batch. It is free again when nothing refers to its bytes: no batch,
    no part of one, and not this object.

    Args:
        piece: the piece.
        sizes: bytes of each tensor of a sample.
        samples: number of samples of the batch.
    """

    def __init__(self, piece: _Piece, sizes: tuple[int, ...], samples: int) -> None:
        self.piece = piece
        self.sizes = sizes
        self.samples = samples
        # An array of its own, which tensors over it keep: it ends with the last of them.
        self.array: NDArray[np.uint8] = piece.memory.numpy()[:]
        piece.array = weakref.ref(self.array)

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return `torch.utils.data.default_collate`, but tensors that lie behind one another in
        this memory are not copied.
        """
        stack = partial(_stacked, torch.from_numpy(self.array))
        return partial(collate, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack})


def _stacked(memory: torch.Tensor, tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """Return tensors as one: a part of `memory`, if that is where they are, else a copy."""
    first = tensors[0]
    size = first.nbytes
    start = first.data_ptr() - memory.data_ptr()
    stop = start + size * len(tensors)
    if 0 <= start < stop <= len(memory) and all(
        tensor.data_ptr() == first.data_ptr() + number * size
        and tensor.dtype == first.dtype
        and tensor.shape == first.shape
        and tensor.is_contiguous()
        for number, tensor in enumerate(tensors)
    ):
        return memory[start:stop].view(first.dtype).view(len(tensors), *first.shape)
    stacked: torch.Tensor = collate_tensor_fn(tensors, **options)
    return stacked


class BatchMemory:
    """The pieces of memory of a loader: as many as there are batches under way and in use.

    How large a batch is, is learned from one that came without: `learn`.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._sizes: tuple[int, ...] = ()

    def learn(self, sizes: tuple[int, ...]) -> None:
        """Note the bytes of each tensor of a sample; empty if samples are not alike."""
        self._sizes = sizes

    def lease(self, samples: int) -> Lease | None:
        """Return memory for a batch of `samples`; None while the sizes of samples are not known,
        and on systems other than Linux.
        """
        needed = sum(padded(size * samples) for size in self._sizes)
        if not needed or not _HAS_MEMORY_FILES:
            return None
        for piece in [piece for piece in self._pieces if piece.array() is None]:
            if len(piece.memory) >= needed:
                return Lease(piece, self._sizes, samples)
            self._pieces.remove(piece)
        self._pieces.append(_Piece(needed))
        return Lease(self._pieces[-1], self._sizes, samples)

    def place(self, lease: Lease, first: int) -> Place:
        """Return what the process of a part is told.

        Args:
            lease: the memory of the batch.
            first: the first sample of the part, in the batch.
        """
        piece = lease.piece
        oldest = min([piece.number, *(other.number for other in self._pieces)])
        return Place(
            piece.number, oldest, piece.path, piece.inode, lease.sizes, lease.samples, first
        )

    def forget(self) -> None:
        """Use no piece again: processes may still write into them."""
        self._pieces.clear()


class OpenPieces:
    """The pieces that a loader process has opened."""

    def __init__(self) -> None:
        self._pieces: dict[int, torch.Tensor] = {}

    def of(self, place: Place) -> torch.Tensor | None:
        """Return the memory of a place; None if it cannot be opened, or not any more."""
        for number in [number for number in self._pieces if number < place.oldest]:
            del self._pieces[number]
        if place.piece not in self._pieces:
            try:
                descriptor = os.open(place.path, os.O_RDWR)
            except OSError:
                return None
            try:
                # another file may have got the number of a descriptor that was closed
                if _inode(descriptor) != place.inode:
                    return None
                self._pieces[place.piece] = _mapped(descriptor)
            finally:
                os.close(descriptor)
        return self._pieces[place.piece]
