"""Where the recordings of this user's jobs lie."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["base", "rank_file"]

_SHM = Path("/dev/shm")


def base() -> Path:
    """The folder with a folder for each job; in memory where the system has such a place. It may not be there yet."""
    parent = _SHM if _SHM.is_dir() else Path(tempfile.gettempdir())
    return parent / f"lockstep-{os.getuid()}"


def rank_file(folder: Path, rank: int) -> Path:
    """The recording of `rank` in a job's folder."""
    return folder / f"rank-{rank}"
