"""Files and folders that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["file", "folder", "remove", "restore", "sweep", "write_bytes", "write_json", "write_text"]

# ".tmp-" is something unfinished or being removed; ".old-" is a whole folder that is being replaced.
_NAME = re.compile(
    r"\.(?P<kind>tmp|old)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}-(?P<name>.+)", re.DOTALL
)
# Of a process on another host nobody here can say whether it lives; no single write takes a day.
_FOREIGN_SECONDS = 24 * 3600.0


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, or replace it, in one instant.

    The data goes to a temporary name in the same folder, is flushed to the device, and then renamed: a reader, and
    whoever comes after a crash, finds the old content or the new, never a part.

    Raises:
        OSError: it could not be written; the old file, if there was one, is untouched and no temporary file stays.
    """
    with file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name, which is not there yet; it gets its name as in `write_bytes`.

    Raises:
        OSError: as `write_bytes`.
    """
    path = Path(path)
    temporary = _beside(path, "tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        _erase(temporary)
        raise
    _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, obj: Any) -> None:
    """Write a JSON file as `write_bytes` does; NaN and infinities, which JSON does not have, become null.

    Raises:
        TypeError: `obj` holds something that is no JSON value.
        OSError: as `write_bytes`.
    """
    write_text(path, json.dumps(_finite(obj), indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """Fill a folder under a temporary name beside `path`; it gets its name when the block has ended without error.

    A folder that has the name already is replaced. After an error in the block, or in giving the name, the temporary
    folder is gone and the old one untouched. If the process is killed between taking the old one away and naming the
    new, `restore` puts the old one back.

    Raises:
        NotADirectoryError: something that is no folder has this name.
        OSError: the folder could not be made, flushed or renamed.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    temporary = _beside(path, "tmp")
    try:
        temporary.mkdir()
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            if not entry.is_symlink():
                _sync(entry)
        _put(temporary, path)
    except BaseException:
        _erase(temporary)
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder; no part of it is ever seen under its name.

    Raises:
        OSError: it is not there or may not be removed.
    """
    path = Path(path)
    doomed = _beside(path, "tmp")
    path.rename(doomed)
    _erase(doomed)


def restore(parent: Path) -> None:
    """Put back each folder in `parent` whose replacement was cut short by the end of its process.

    What cannot be put back, for want of permission say, stays where it is; nothing is raised.
    """
    for path, match in _abandoned(parent):
        if _is_only_copy(path, match):
            with contextlib.suppress(OSError):
                path.rename(path.with_name(match["name"]))


def sweep(parent: Path) -> None:
    """Do what `restore` does, then remove what processes that no longer live have left unfinished in `parent`.

    A process on another host is taken to be alive for a day after its last change. Nothing is raised.
    """
    restore(parent)
    for path, match in _abandoned(parent):
        if not _is_only_copy(path, match):
            _erase(path)


def _put(temporary: Path, path: Path) -> None:
    # rename(2) replaces no folder that holds something, so the old one has to step aside first.
    old = _beside(path, "old")
    try:
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        if old.exists() and not os.path.lexists(path):
            old.rename(path)
        raise
    _sync(path.parent)
    _erase(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot flush a folder; there is nothing better to be done there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _erase(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _beside(path: Path, kind: str) -> Path:
    # A temporary name needs only a recognisable part of the name, or long names would become too long.
    name = path.name if kind == "old" else path.name[:32]
    pid = os.getpid()
    return path.with_name(f".{kind}-{_host()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(4)}-{name}")


def _host() -> str:
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _started(pid: int) -> int | None:
    """When process `pid` began, in clock ticks after boot; 0 if the system does not tell, None if it has ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass  # it lives, and is another user's
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _abandoned(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        entries = [(path, _NAME.fullmatch(path.name)) for path in sorted(parent.iterdir())]
    except OSError:
        return []
    return [(path, match) for path, match in entries if match and not _in_use(path, match)]


def _is_only_copy(path: Path, match: re.Match[str]) -> bool:
    return match["kind"] == "old" and not os.path.lexists(path.with_name(match["name"]))


def _in_use(path: Path, match: re.Match[str]) -> bool:
    if match["host"] != _host():
        try:
            return time.time() - path.lstat().st_ctime < _FOREIGN_SECONDS
        except OSError:
            return True
    started, written_by = _started(int(match["pid"])), int(match["started"])
    # In a container the next process often has the same number as the one that was killed, but not the same start.
    return started is not None and (started == written_by or 0 in (started, written_by))


def _finite(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: _finite(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_finite(value) for value in obj]
    return None if isinstance(obj, float) and not math.isfinite(obj) else obj
