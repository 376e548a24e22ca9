"""Fetches published files with known checksums."""

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

__all__ = ["RemoteFile", "fetch"]

_BLOCK = 1 << 16  # pooch's own 1 KiB costs a write and a flush for each


@dataclass(frozen=True)
class RemoteFile:
    """A file that is published somewhere.

    Attributes:
        name: the file name it gets here.
        md5: its checksum in hexadecimal, as its publisher states it.
        addresses: where it is, the first to be tried first.
    """

    name: str
    md5: str
    addresses: tuple[str, ...]


def fetch(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Each of `files` in `folder`, downloaded where it is not there yet.

    A file appears under its name when it is whole and its checksum is right, not before. When several processes
    ask at once, one downloads and the others wait for it.

    Raises:
        DataError: naming the file, its addresses, what went wrong at each, and what to do, when no address gives
            the right file, or the folder cannot be written. What had been made until then is removed, except files
            that are whole.
    """
    with _alone_in(folder):
        return [_fetch_one(file, folder, [other.name for other in files]) for file in files]


def _fetch_one(file: RemoteFile, folder: Path, names: Sequence[str]) -> Path:
    reasons = []
    for address in file.addresses:
        try:
            return _retrieve(address, file, folder)
        except (OSError, ValueError) as error:  # what pooch raises for networks, disks and wrong checksums
            reasons.append(f"{address}: {_first_cause(error)}")
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
        # pooch leaves it the mode of a temporary file, which shuts out the other users of a shared folder.
        path.chmod(0o644)
    return path


def _first_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder, keeps other processes from downloading into it, and removes it again after a failure."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(
            f"{folder}: expected a folder to download into, got {error.strerror or error}. "
            f"Name another: data_dir in a script, --data-dir on the command line"
        ) from None
    try:
        # Some network file systems lock no folders: there, each process downloads for itself.
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
    # pooch announces each download; the bar says the same.
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
    """A rich progress bar in the form in which pooch drives one."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._total = progress, task, 0

    @property
    def total(self) -> int:
        """Bytes to come, 0 where the server does not say."""
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        self._progress.update(self._task, total=size or None)

    def update(self, size: int) -> None:
        """Notes `size` more bytes."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Begins again at nothing."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Nothing: the bar ends with the block that shows it."""
