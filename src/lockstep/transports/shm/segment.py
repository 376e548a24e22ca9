"""Memory that the ranks of a group on one machine share, and that no other user sees and no crash leaves behind."""

from __future__ import annotations

import mmap
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...errors import TransportError
from ...store_exchange import exchange
from ..c10d import PrefixStore, Store

__all__ = ["Segment", "share"]

_DESCRIPTOR = re.compile(r"/proc/[0-9]{1,19}/fd/[0-9]{1,10}")

SHM = Path("/dev/shm")  # files in it are in memory; where it is missing, they lie with other temporary files


class Segment:
    """A mapping of shared memory.

    Attributes:
        bytes: all of it, a uint8 tensor of shape (size,).
        words: all of it as signed 64-bit integers, for counters; index = byte offset / 8.
        raw: all of it as a writable buffer.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.raw = mmap.mmap(descriptor, size)
        self.bytes: torch.Tensor = _tensor(self.raw)
        self.words = memoryview(self.raw).cast("q")


def share(store: Store, rank: int, size: int, nbytes: int) -> Segment:
    """Make `nbytes` of zeroed memory on rank 0 and map it on all `size` ranks; every rank must call it.

    The memory never has a name, so nothing is left in any folder however and whenever the ranks end; the others open
    it through rank 0's descriptor in /proc, which the kernel allows to the same user only. Where there is no memfd, a
    file is used, allocated in full beforehand: a full /dev/shm is then an error here and not a bus error later.

    Raises:
        TransportError: on every rank, with what each way failed for.
        StallError: when some ranks do not call it.
    """
    failures = []
    for make in (_memfd, _unnamed_file):
        segment, problem = _attempt(make, PrefixStore(make.__name__, store), rank, size, nbytes)
        if segment is not None:
            return segment
        failures.append(problem)
    raise TransportError(
        f"shm: no shared memory of {nbytes} bytes between {size} ranks: {'; '.join(failures)}. "
        "LOCKSTEP_SHM_SIZE, or ShmOptions(size=...), asks for less."
    )


def _attempt(make: Callable[[int], int], store: Store, rank: int, size: int, nbytes: int) -> tuple[Segment | None, str]:
    """This rank's mapping, or else what has gone wrong first, on every rank alike."""
    descriptor, segment, problem = -1, None, ""
    try:
        if rank == 0:
            try:
                descriptor = make(nbytes)
            except (OSError, AttributeError) as error:  # AttributeError: no memfd_create on this system
                problem = _said(error)
            store.set("path", f"/proc/{os.getpid()}/fd/{descriptor}" if descriptor >= 0 else "")
        path = store.get("path").decode()
        if path:
            try:
                segment = _map(path, nbytes)
            except (OSError, ValueError) as error:
                problem = _said(error)
        verdict = exchange(store, "mapped", rank, problem, range(size), _first_problem)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return (None, verdict) if verdict else (segment, "")


def _first_problem(said: Mapping[int, str]) -> str:
    return next((f"rank {i}: {problem}" for i, problem in said.items() if problem), "")


def _map(path: str, nbytes: int) -> Segment:
    # the path comes from the store: whoever can write there must not choose a file of this user's to be written to
    if not _DESCRIPTOR.fullmatch(path):
        raise ValueError(f"expected /proc/PID/fd/NUMBER, rank 0's memory, got {path!r}")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != nbytes:
            raise ValueError(f"{path} is not {nbytes} bytes of this user's memory")
        return Segment(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _memfd(nbytes: int) -> int:
    descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unnamed_file(nbytes: int) -> int:
    """A file of mode 0600 without a name."""
    with tempfile.TemporaryFile(buffering=0, dir=SHM if SHM.is_dir() else None) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return os.dup(file.fileno())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _tensor(memory: mmap.mmap) -> torch.Tensor:
    with torch.inference_mode(False):  # whatever mode the group is made in, it may be used in another
        return torch.frombuffer(memory, dtype=torch.uint8)
