"""Downloads published files with known checksums."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["RemoteFile", "fetch", "locked"]

_BLOCK = 1 << 16  # pooch writes and flushes each block; its default is 1 KiB


@dataclass(frozen=True)
class RemoteFile:
    """A published file.

    Attributes:
        name: the local file name.
        md5: its checksum in hexadecimal, as its publisher states it.
        addresses: its URLs, in the order in which they are tried.
    """

    name: str
    md5: str
    addresses: tuple[str, ...]


def fetch(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Return the paths of `files` in `folder`, after downloading the missing ones.

    A file gets its name only when it is complete and its checksum is correct. If several processes call this at the
    same time, one downloads and the others wait for it.

    Raises:
        DataError: no address provides the correct file, or the folder cannot be written; names the file, its addresses,
            the error of each, and what to do. New folders are removed again if they are empty.
    """
    with locked(folder, "to download into"):
        return [_fetch_one(file, folder, [other.name for other in files]) for file in files]


def _fetch_one(file: RemoteFile, folder: Path, names: Sequence[str]) -> Path:
    reasons = []
    for address in file.addresses:
        try:
            return _retrieve(address, file, folder)
        except (OSError, ValueError) as error:  # what pooch raises for networks, disks and wrong checksums
            reasons.append(f"{address}: {_root_cause(error)}")
    raise DataError(
        f"{folder / file.name}: cannot be downloaded ({'; '.join(reasons)}). "
        f"Put {', '.join(names)} into {folder} yourself, or name the folder that holds them: "
        f"data_dir in a script, --data-dir on the command line"
    )


def _retrieve(address: str, file: RemoteFile, folder: Path) -> Path:
    import pooch

    path = folder / file.name
    is_new = not path.exists()
    with _bar(file.name) as bar, _quiet(pooch.get_logger()):
        downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=_BLOCK)
        pooch.retrieve(address, f"md5:{file.md5}", file.name, folder, downloader=downloader)
    if is_new:
        # pooch leaves it the mode of a temporary file, which other users of a shared folder cannot read.
        path.chmod(0o644)
    return path


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


@contextmanager
def locked(folder: Path, purpose: str) -> Iterator[None]:
    """Create and lock `folder`, so that other processes do not write to it; remove it again after a failure.

    Args:
        folder: the folder.
        purpose: what it is for, as errors say it: "to download into".

    Raises:
        DataError: it cannot be created or read.
    """
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(
            f"{folder}: expected a folder {purpose}, got {error.strerror or error}. "
            f"Name another: data_dir in a script, --data-dir on the command line"
        ) from None
    try:
        # Some network file systems cannot lock folders; on these, each process makes the files.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise
    finally:
        os.close(handle)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    # pooch logs each download; the progress bar shows the same.
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _bar(name: str) -> Iterator[_Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bar(progress, progress.add_task(name, total=None))


class _Bar:
    """A rich progress bar with the interface that pooch expects (that of tqdm)."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._total = progress, task, 0

    @property
    def total(self) -> int:
        """Size of the download in bytes; 0 if the server does not send it."""
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        self._progress.update(self._task, total=size or None)

    def update(self, size: int) -> None:
        """Advance by `size` bytes."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Start again at 0."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: `_bar` ends the progress bar."""
