"""Downloads published files with known checksums."""

from __future__ import annotations

import fcntl
import hashlib
import os
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from ..errors import DataError
from ..system import atomic_files

_BLOCK = 1 << 16
_TIMEOUT_S = 30  # without an answer, or a further block


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

    A file gets its name only when it is complete and its checksum is correct. If several processes
    call this at the same time, one downloads and the others wait for it.

    Raises:
        DataError: no address provides the correct file, or the folder cannot be written; names the
            file, its addresses, the error of each, and what to do. New folders are removed again if
            they are empty.
    """
    with locked(folder, "to download into"):
        return [_fetch_one(file, folder, [other.name for other in files]) for file in files]


def _fetch_one(file: RemoteFile, folder: Path, names: Sequence[str]) -> Path:
    reasons = []
    for address in file.addresses:
        try:
            return _retrieve(address, file, folder)
        except (OSError, ValueError, HTTPException) as error:
            reasons.append(f"{address}: {_root_cause(error)}")
    raise DataError(
        f"{folder / file.name}: cannot be downloaded ({'; '.join(reasons)}). "
        f"Put {', '.join(names)} into {folder} yourself, or name the folder that holds them: "
        f"data_dir in a script, --data-dir on the command line"
    )


def _retrieve(address: str, file: RemoteFile, folder: Path) -> Path:
    path = folder / file.name
    if path.exists():  # another process has downloaded it meanwhile
        return path
    request = urllib.request.Request(address, headers={"User-Agent": "lockstep-train"})
    digest = hashlib.md5(usedforsecurity=False)
    received = 0
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        size = response.length
        with atomic_files.file(path) as temporary, _bar(file.name, size) as advance:
            with temporary.open("wb") as output:
                while block := response.read(_BLOCK):
                    output.write(block)
                    digest.update(block)
                    received += len(block)
                    advance(len(block))
            if size is not None and received != size:
                raise ValueError(f"expected {size} bytes, got {received}")
            if digest.hexdigest() != file.md5:
                raise ValueError(f"expected md5 {file.md5}, got {digest.hexdigest()}")
    return path


def _root_cause(error: BaseException) -> str:
    """Return the text of the error from which an error has come; a name for it in the loop above
    would keep it, with its traceback and the connection, until the garbage is collected.
    """
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


@contextmanager
def locked(folder: Path, purpose: str) -> Iterator[None]:
    """Create and lock `folder`, so that other processes do not write to it; remove it again after a
    failure.

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
def _bar(name: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, where there is a terminal; yield what advances it by a number of bytes.

    Args:
        name: of the file.
        size: of the file in bytes; None if the server does not send it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=size)
        yield lambda count: progress.advance(task, count)
