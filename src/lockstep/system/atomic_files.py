"""Atomic writes of files and folders: a reader sees the old content or the new, whatever ends the
writing process.
"""

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

from .processes import is_alive, read_status

# ".tmp-" is unfinished or being removed; ".old-" is a complete folder that is being replaced.
_NAME = re.compile(
    r"\.(?P<kind>tmp|old)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}-(?P<name>.+)",
    re.DOTALL,
)
# The liveness of a process on another host is unknown; no single write takes a day.
_FOREIGN_SECONDS = 24 * 3600.0


def write_bytes(path: Path, data: bytes) -> None:
    """Write or replace a file atomically.

    The data is written under a temporary name in the same folder, flushed to the device, and then
    renamed: a reader, also after a crash, finds the old content or the new, never a part.

    Raises:
        OSError: it could not be written; an existing file is untouched and no temporary file
            remains.
    """
    with file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which does not exist yet, for a file that is renamed to `path` as in
    `write_bytes`.

    Raises:
        OSError: as `write_bytes`.
    """
    path = Path(path)
    temporary = _temporary_name(path, "tmp")
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
    """Write a JSON file as `write_bytes` does; NaN and infinities, which JSON lacks, become null.

    Raises:
        TypeError: `obj` holds a value that JSON cannot represent.
        OSError: as `write_bytes`.
    """
    write_text(path, json.dumps(_finite(obj), indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path` that is renamed to `path` if the block ends without an
    error.

    An existing folder is replaced. After an error in the block or in the renaming, the temporary
    folder is removed and the old one untouched. If the process is killed between moving the old
    folder away and renaming the new one, `restore` puts the old one back.

    Raises:
        NotADirectoryError: `path` exists and is not a folder.
        OSError: the folder could not be created, flushed or renamed.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    temporary = _temporary_name(path, "tmp")
    try:
        temporary.mkdir()
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            if not entry.is_symlink():
                _sync(entry)
        _replace_folder(temporary, path)
    except BaseException:
        _erase(temporary)
        raise


def link(path: Path, target: str) -> None:
    """Make or replace a symbolic link from `path` to `target` atomically.

    Raises:
        OSError: the file system has no links, or the folder may not be written.
    """
    temporary = _temporary_name(path, "tmp")
    try:
        temporary.symlink_to(target)
        temporary.replace(path)
    except BaseException:
        _erase(temporary)
        raise
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder atomically.

    Raises:
        OSError: it does not exist or may not be removed.
    """
    path = Path(path)
    doomed = _temporary_name(path, "tmp")
    path.rename(doomed)
    _erase(doomed)


def restore(parent: Path) -> None:
    """Rename back each folder in `parent` whose replacement was interrupted by the end of its
    process.

    A folder that cannot be renamed, e.g. for lack of permission, is left as it is; nothing is
    raised.
    """
    for path, match in _abandoned(parent):
        if _is_only_copy(path, match):
            with contextlib.suppress(OSError):
                path.rename(path.with_name(match["name"]))


def remove_abandoned(parent: Path) -> None:
    """Call `restore`, then remove the unfinished files and folders of dead processes in `parent`.

    A process on another host counts as alive for a day after its last change. Nothing is raised.
    """
    restore(parent)
    for path, match in _abandoned(parent):
        if not _is_only_copy(path, match):
            _erase(path)


def _replace_folder(temporary: Path, path: Path) -> None:
    # rename(2) replaces no folder that has entries, so the old one is moved away first.
    old = _temporary_name(path, "old")
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
        # Some network and user-space file systems cannot flush a folder.
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


def _temporary_name(path: Path, kind: str) -> Path:
    # Only the start of the name: long names would become too long.
    name = path.name if kind == "old" else path.name[:32]
    pid = os.getpid()
    return path.with_name(
        f".{kind}-{_host()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(4)}-{name}"
    )


def _host() -> str:
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _started(pid: int) -> int | None:
    """Return the start time of process `pid`, in clock ticks after boot; 0 if unknown, None if it
    has ended.
    """
    status = read_status(pid)
    if status is None:
        return 0 if is_alive(pid) else None
    return None if status.state in ("Z", "X") else status.started


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
    started = _started(int(match["pid"]))
    written_by = int(match["started"])
    # In a container the next process often has the PID of the killed one, but not the same start
    # time.
    return started is not None and (started == written_by or 0 in (started, written_by))


def _finite(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: _finite(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_finite(value) for value in obj]
    return None if isinstance(obj, float) and not math.isfinite(obj) else obj
