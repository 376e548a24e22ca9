"""What others could get at: sockets that listen, and folders that they have made before this user
could.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

__all__ = ["SQUATS", "listens_at", "squat"]

SQUATS = ("another user's", "open to others", "a link", "a file")
"""What may stand in the place of a folder whose name can be guessed."""

_STRANGER = 12345


def squat(folder: Path, kind: str) -> None:
    """Put something of a `kind` in the place of `folder`, which is not there."""
    if kind == "a file":
        folder.touch(mode=0o600)
    elif kind == "a link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o700 if kind == "another user's" else 0o777)
    if kind == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, _STRANGER, _STRANGER)


def listens_at(port: int) -> set[str]:
    """The addresses at which this process listens at `port`."""
    found = psutil.Process().net_connections("tcp")
    return {
        each.laddr.ip
        for each in found
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
