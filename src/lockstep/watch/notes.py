"""Words of a rank's watcher to whoever looks at the launcher's screen."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .plain import plain

__all__ = ["Notes", "say"]

_LONGEST = 2000  # characters of JSON, which ASCII alone makes bytes; 4 KiB written at once are not mixed with others
_MOST = 1 << 20  # bytes of notes that are shown


def say(folder: Path | None, text: str) -> None:
    """Leave `text` for the launcher that reads the notes in `folder`, or write it to standard error without one."""
    if folder is None:
        sys.stderr.write(f"lockstep: {text}\n")
        sys.stderr.flush()
        return
    while len(line := json.dumps({"text": text}) + "\n") > _LONGEST:
        text = text[: len(text) * 3 // 4]
    descriptor = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class Notes:
    """Reads what has been said in a folder, each note once."""

    def __init__(self, folder: Path) -> None:
        self._path, self._read = folder / "notes", 0

    def new(self) -> list[str]:
        """What has been said since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(_MOST)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [text for line in whole.splitlines() if (text := _text(line))]


def _text(line: bytes) -> str:
    try:
        return "\n".join(map(plain, json.loads(line)["text"].split("\n")))
    except (ValueError, TypeError, KeyError, AttributeError):  # not written by `say`
        return ""
