"""Memory that the ranks of a group on one machine share, and that no other user sees and no crash leaves behind."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import TransportError
from ..c10d import PrefixStore, Store

__all__ = ["Segment", "share"]


class Segment:
    """A mapping of shared memory.

    Attributes:
        bytes: all of it, a uint8 tensor of shape (size,).
        words: all of it as signed 64-bit integers, for counters; index = byte offset / 8.
        raw: all of it as a writable buffer.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.raw = mmap.mmap(descriptor, size)
        self.bytes: torch.Tensor = torch.frombuffer(self.raw, dtype=torch.uint8)
        self.words = memoryview(self.raw).cast("q")


def share(store: Store, rank: int, size: int, nbytes: int) -> Segment:
    """Make `nbytes` of zeroed memory on rank 0 and map it on all `size` ranks; every rank must call it.

    The memory has no name (memfd), so nothing is left in any folder however the ranks end; the others open it through
    rank 0's descriptor in /proc, which the kernel allows to the same user only. Where that cannot be had, a file of
    mode 0600 is used, allocated in full beforehand (a full /dev/shm is then an error here and not a bus error later)
    and unlinked as soon as all have it.

    Raises:
        TransportError: on every rank, with what each way failed for.
    """
    failures = []
    for way in (_Memfd, _File):
        segment, problem = _attempt(way(), PrefixStore(way.__name__, store), rank, size, nbytes)
        if segment is not None:
            return segment
        failures.append(problem)
    raise TransportError(f"shm: no shared memory of {nbytes} bytes between {size} ranks: " + "; ".join(failures))


def _attempt(way: _Memfd | _File, store: Store, rank: int, size: int, nbytes: int) -> tuple[Segment | None, str]:
    if rank == 0:
        offer, problem = _try(lambda: way.create(nbytes))
        store.set("offer", json.dumps(offer))
    else:
        offer, problem = json.loads(store.get("offer")), ""
    segment: Segment | None = None
    if offer is not None:
        segment, problem = _try(lambda: _map(way.open(offer), nbytes))
    verdict = _all_agree(store, rank, size, problem)
    if rank == 0:
        way.forget()
    return (None, verdict) if verdict else (segment, "")


def _all_agree(store: Store, rank: int, size: int, problem: str) -> str:
    """The first rank's problem, on every rank; "" when none has any."""
    store.set(f"answer/{rank}", problem)
    if rank == 0:
        answers = [store.get(f"answer/{i}").decode() for i in range(size)]
        store.set("verdict", next((f"rank {i}: {text}" for i, text in enumerate(answers) if text), ""))
    verdict: str = store.get("verdict").decode()
    return verdict


def _try(action: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return action(), ""
    except (OSError, AttributeError, ValueError) as error:  # AttributeError: no memfd_create on this system
        return None, f"{type(error).__name__}: {error}"


def _map(descriptor: int, nbytes: int) -> Segment:
    try:
        return Segment(descriptor, nbytes)
    finally:
        os.close(descriptor)


class _Memfd:
    """Memory without a name, reached through its maker's open descriptor."""

    def __init__(self) -> None:
        self._descriptor = -1

    def create(self, nbytes: int) -> str:
        self._descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, nbytes)
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def open(self, offer: str) -> int:
        return os.open(offer, os.O_RDWR | os.O_CLOEXEC)

    def forget(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class _File:
    """A private file, gone from its folder once all have it."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def create(self, nbytes: int) -> str:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        descriptor, name = tempfile.mkstemp(prefix="lockstep-", dir=folder)
        self._path = Path(name)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except BaseException:
            self.forget()
            raise
        finally:
            os.close(descriptor)
        return name

    def open(self, offer: str) -> int:
        return os.open(offer, os.O_RDWR | os.O_CLOEXEC)

    def forget(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
