"""The mapping of a group's shared memory on one host: it is private, and leaves no file."""

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
from ...stores import exchange
from ..runtime.c10d import PrefixStore, Store

_DESCRIPTOR = re.compile(r"/proc/[0-9]{1,19}/fd/[0-9]{1,10}")

SHM = Path("/dev/shm")  # files in it are in memory; where it is missing, temporary files are used


class Segment:
    """A mapping of shared memory.

    Attributes:
        bytes: all of it, a uint8 tensor of shape (size,).
        words: all of it as signed 64-bit integers, for counters; index = byte offset / 8.
        raw: all of it as a writable buffer.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.raw = mmap.mmap(descriptor, size)
        # the group may be created in one mode of autograd and used in another
        with torch.inference_mode(False):
            self.bytes: torch.Tensor = torch.frombuffer(self.raw, dtype=torch.uint8)
        self.words = memoryview(self.raw).cast("q")


def share(store: Store, rank: int, size: int, nbytes: int) -> Segment:
    """Make `nbytes` of zeroed memory on rank 0 and map it on all `size` ranks; every rank must call
    it.

    The memory never has a name, so no file is left behind however and whenever the ranks end; the
    others open it through rank 0's descriptor in /proc, which the kernel allows to the same user
    only. Where there is no memfd, an unnamed file is used, allocated in full beforehand: a full
    /dev/shm is then an error here and not a bus error later.

    Raises:
        TransportError: on every rank, with the reason why each kind of memory failed.
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


def _attempt(
    make: Callable[[int], int], store: Store, rank: int, size: int, nbytes: int
) -> tuple[Segment | None, str]:
    """Return this rank's mapping, or else the first problem of any rank, the same on every rank."""
    descriptor = -1
    segment = None
    problem = ""
    try:
        if rank == 0:
            try:
                descriptor = make(nbytes)
            # AttributeError: no memfd_create on this system
            except (OSError, AttributeError) as error:
                problem = _describe(error)
            store.set("path", f"/proc/{os.getpid()}/fd/{descriptor}" if descriptor >= 0 else "")
        path = store.get("path").decode()
        if path:
            try:
                segment = _map(path, nbytes)
            except (OSError, ValueError) as error:
                problem = _describe(error)
        verdict = exchange(store, "mapped", rank, problem, range(size), _first_problem)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return (None, verdict) if verdict else (segment, "")


def _first_problem(problems: Mapping[int, str]) -> str:
    return next((f"rank {i}: {problem}" for i, problem in problems.items() if problem), "")


def _map(path: str, nbytes: int) -> Segment:
    # the path comes from the store, and writing to the store must not be enough to choose a file of
    # this user
    if not _DESCRIPTOR.fullmatch(path):
        raise ValueError(f"expected /proc/PID/fd/NUMBER, rank 0's memory, got {path!r}")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_size != nbytes
        ):
            raise ValueError(f"{path} is not {nbytes} bytes of this user's memory")
        return Segment(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _memfd(nbytes: int) -> int:
    descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)  # by itself a memfd has 0777
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unnamed_file(nbytes: int) -> int:
    """Create a file of mode 0600 without a name."""
    with tempfile.TemporaryFile(buffering=0, dir=SHM if SHM.is_dir() else None) as file:
        # Taken now: where there is no room, this is an error, and a later write would be a SIGBUS.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return os.dup(file.fileno())


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
