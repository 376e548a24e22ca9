"""What is kept in the folder of a job beside the flight records, for other processes of this host:
each note is a struct in a file of its own, of which readers see the old one or the new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from .. import messages

Note = TypeVar("Note", bound=msgspec.Struct)


def write(path: Path, note: msgspec.Struct) -> None:
    """Write or replace a note; these folders are in memory, so that nothing is flushed.

    Raises:
        OSError: the folder is gone, or there is no space.
    """
    draft = path.with_name(f".{path.name}")
    draft.write_text(messages.encode(note))
    draft.replace(path)


def read(path: Path, kind: type[Note]) -> Note | None:
    """Return a note; None if there is none, or it was not written by `write`."""
    try:
        return messages.decode(path.read_text(), kind)
    except (OSError, ValueError, RecursionError):
        return None
