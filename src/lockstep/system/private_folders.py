"""Private folders of this user in directories that every user can write to, such as /tmp."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def make_folder(parent: Path, runtime: Path | None) -> Path:
    """Create the folder with the usual name, or one with a random name if another user has taken
    that.

    Args:
        parent: a directory that all users can write to, such as /tmp.
        runtime: this user's runtime directory, if there is one.

    Raises:
        OSError: neither can be created.
    """
    return make_usual_folder(parent, runtime) or make_random_folder(parent, secrets.token_hex(6))


def make_usual_folder(parent: Path, runtime: Path | None) -> Path | None:
    """Return the first private folder with a usual name, created if it does not exist; None if
    there is none.

    Another user can create the one in `parent` first, as its name can be guessed, but not the one
    in `runtime`.
    """
    for folder in _usual_folders(parent, runtime):
        with suppress(OSError):  # it exists, or cannot be created
            folder.mkdir(mode=0o700)
        if is_private(folder):
            return folder
    return None


def make_random_folder(parent: Path, token: str) -> Path:
    """Create the private folder named after `token`, an unguessable text, if it does not exist
    already.

    Raises:
        OSError: it cannot be created, or is not private.
    """
    folder = parent / f"{_name()}-{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is not a private folder of this user")
    return folder


def find_folders(parent: Path, runtime: Path | None) -> list[Path]:
    """Return all existing private folders, with usual and with random names."""
    folders = [*_usual_folders(parent, runtime)]
    with suppress(OSError):
        folders += parent.glob(f"{_name()}-*")
    return [folder for folder in folders if is_private(folder)]


def remove_if_random(folder: Path) -> None:
    """Remove `folder` if it has a random name and is empty; those with usual names stay."""
    if folder.name.startswith(f"{_name()}-"):
        with suppress(OSError):  # it is in use, or removed already
            folder.rmdir()


def is_private(folder: Path) -> bool:
    """Return whether `folder` is a directory, not a link to one, that only this user can enter and
    write to.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_own = (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )
    # a container maps unknown users to one number, which may be that of this user
    return is_own and os.access(folder, os.W_OK | os.X_OK)


def _usual_folders(parent: Path, runtime: Path | None) -> Iterator[Path]:
    yield parent / _name()
    if runtime is not None and is_private(runtime):
        yield runtime / "lockstep"


def _name() -> str:
    return f"lockstep-{os.getuid()}"
