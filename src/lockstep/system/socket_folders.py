"""Temporary folders whose paths are short enough for sockets, however long TMPDIR is."""

from __future__ import annotations

import errno
import multiprocessing.util
import os
import tempfile
from pathlib import Path

__all__ = ["LONGEST", "prepare_multiprocessing", "short_base"]

# The path of a socket has 107 bytes (sun_path, unix(7)). The longest that is made below a temporary
# folder is that of multiprocessing, /pymp-XXXXXXXX/listener-XXXXXXXX, with 32; ours,
# /lockstep-XXXXXXXX/membership, has 29.
LONGEST = 107 - 32

_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")


def short_base() -> str | None:
    """Return the folder for temporary folders with sockets; None for the usual one, which is short
    enough.

    Raises:
        OSError: TMPDIR is too long, and no other folder can be written to.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST:
        return None
    for folder in _ELSEWHERE:
        if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder
    cure = f"export TMPDIR=/tmp, say: sockets are made in it, so that it may have {LONGEST} bytes"
    raise OSError(errno.ENAMETOOLONG, f"TMPDIR is too long; {cure}", usual)


def prepare_multiprocessing() -> None:
    """Let multiprocessing make its sockets in a folder with a short path; processes that it starts
    inherit it.

    Raises:
        OSError: there is no place for it; see `short_base`.
    """
    base = short_base()
    if base is None:
        return
    before = tempfile.tempdir
    tempfile.tempdir = base
    try:
        multiprocessing.util.get_temp_dir()  # makes it at the first call, and keeps it
    finally:
        tempfile.tempdir = before
