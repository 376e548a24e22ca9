"""Folders that belong to a job: a lock tells whether one of its processes still lives, also in
another container.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .private_folders import is_private
from .socket_folders import short_base

_LOCK = ".in-use"


class JobFolderLock:
    """Marks a job's folder as in use, until it is closed or this process ends, however that
    happens.

    Every process of the job holds one: the locks are shared. Process ids would not do, because
    containers that share /tmp or /dev/shm have numbers of their own. Where the file system has no
    locks, or no space for one, this does nothing, and the folder is never taken as abandoned.

    Args:
        folder: the job's folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = _open_locked(folder)

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_abandoned(folder: Path) -> bool:
    """Return whether all processes that have held a `JobFolderLock` of `folder` are gone."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is not the folder of a job, or that job has just removed it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def temporary_job_folder() -> Iterator[Path]:
    """Make a private temporary folder for a job of this host, and remove it at the end of the
    block.

    Those that other jobs of this user have left behind, because all their processes were killed,
    are removed first.
    """
    base = short_base() or tempfile.gettempdir()  # sockets are made in it
    for left in Path(base).glob(f"{_PREFIX}*"):
        if is_private(left) and is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base) as name:
        lock = JobFolderLock(Path(name))
        try:
            yield Path(name)
        finally:
            lock.close()


_PREFIX = "lockstep-"


def _open_locked(folder: Path) -> int:
    """Return a descriptor that holds the shared lock of `folder`.

    Raises:
        OSError: there can be none.
    """
    # The file gets its name when it is locked: a lock that nobody holds is that of a job whose
    # processes are gone.
    descriptor, draft = tempfile.mkstemp(prefix=f"{_LOCK}-", dir=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.link(draft, folder / _LOCK)
    except FileExistsError:  # another process of this job has made it
        os.close(descriptor)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        raise
    finally:
        Path(draft).unlink()
    return descriptor
