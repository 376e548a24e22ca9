"""Folders of this user's alone below those in which every user may make folders."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["find_folders", "is_private", "leave", "make_folder", "make_random", "make_usual"]


def make_folder(parent: Path, runtime: Path | None) -> Path:
    """The usual folder, or one with a random name where others have taken its place.

    Args:
        parent: a folder for all users, such as /tmp.
        runtime: this user's runtime directory, where there is one.

    Raises:
        OSError: neither can be made.
    """
    return make_usual(parent, runtime) or make_random(parent, secrets.token_hex(6))


def make_usual(parent: Path, runtime: Path | None) -> Path | None:
    """The first folder of a known name that is this user's alone, made where it is missing.

    Anybody can make the one below `parent` first, as its name can be guessed; nobody else the one in `runtime`.
    """
    for folder in _usual(parent, runtime):
        with suppress(OSError):  # it is there, or cannot be made
            folder.mkdir(mode=0o700)
        if is_private(folder):
            return folder
    return None


def make_random(parent: Path, token: str) -> Path:
    """The folder that belongs to `token`, a text that nobody could have guessed; it may be there already.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    folder = parent / f"{_name()}-{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is not a folder of this user's alone")
    return folder


def find_folders(parent: Path, runtime: Path | None) -> list[Path]:
    """All that are there: the usual ones, and those with random names."""
    found = [*_usual(parent, runtime)]
    with suppress(OSError):
        found += parent.glob(f"{_name()}-*")
    return [folder for folder in found if is_private(folder)]


def leave(folder: Path) -> None:
    """Remove `folder` if it has a random name and is empty; the usual ones stay."""
    if folder.name.startswith(f"{_name()}-"):
        with suppress(OSError):  # somebody uses it, or has removed it
            folder.rmdir()


def is_private(folder: Path) -> bool:
    """Whether `folder` is a folder, and no link to one, that this user can write to and nobody else can enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    # a container shows whom it does not know as one user, who may have the number of this one
    return is_own and os.access(folder, os.W_OK | os.X_OK)


def _usual(parent: Path, runtime: Path | None) -> Iterator[Path]:
    yield parent / _name()
    if runtime is not None and is_private(runtime):
        yield runtime / "lockstep"


def _name() -> str:
    return f"lockstep-{os.getuid()}"
