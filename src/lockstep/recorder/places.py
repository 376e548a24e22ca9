"""Where the recordings of this user's jobs lie."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["parent", "rank_file"]

_SHM = Path("/dev/shm")


def parent() -> Path:
    """Where this user's folder lies, with a folder for each job; in memory where the system has such a place."""
    return _SHM if _SHM.is_dir() else Path(tempfile.gettempdir())


def rank_file(folder: Path, rank: int) -> Path:
    """The recording of `rank` in a job's folder."""
    return folder / f"rank-{rank}"
