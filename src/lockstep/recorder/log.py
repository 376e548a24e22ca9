"""All of a rank's collectives in a file, a line of JSON each, for a look at the whole run afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .layout import RING, State
from .reader import Record, Recording

__all__ = ["Log", "log_header", "read_log"]

_FORMAT = 1
_NAMES = {field.name for field in fields(Record)}


class Log:
    """Writes what a recording gets into a file.

    Args:
        folder: made if it is not there.
        recording: this rank's own, opened for reading.
    """

    def __init__(self, folder: Path, recording: Recording) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._recording, self._next = recording, 1
        self._file = (folder / f"rank-{recording.rank}.records").open("wb", buffering=0)
        header = {"lockstep_records": _FORMAT}
        for name in ("rank", "world_size", "host", "pid", "unix_offset", "program"):
            header[name] = getattr(recording, name)
        self._write([json.dumps(header)])

    @property
    def behind(self) -> bool:
        """Whether records would soon be lost."""
        return self._recording.word(State().records) - self._next > RING // 2

    def flush(self, at_end: bool = False) -> None:
        """Write what is new; one that has not ended is waited for, as long as it is kept, unless this is the end.

        Raises:
            OSError: the disk is full, say; the file ends with the last whole record before that.
        """
        count, lines = self._recording.word(State().records), []
        self._next = max(self._next, count + 1 - RING)
        while self._next <= count:
            raw = self._recording.raw(self._next)
            if raw is not None and not raw.left and not at_end and count - self._next < RING // 2:
                break
            if raw is not None:
                lines.append(json.dumps(asdict(self._recording.record(raw))))
            self._next += 1
        self._write(lines)

    def _write(self, lines: Sequence[str]) -> None:
        data = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.close()
            raise

    def close(self) -> None:
        """Write the rest.

        Raises:
            OSError: it cannot be written.
        """
        if not self._file.closed:
            self.flush(at_end=True)
            self._file.close()


def log_header(path: Path) -> dict[str, Any]:
    """Who has written the file `path`: rank, world_size, host, pid, unix_offset (see `RankState`) and program.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with path.open(encoding="utf-8") as file:
        return _header(path, file.readline())


def read_log(path: Path) -> Iterator[Record]:
    """The records in the file `path`, up to the last whole one.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with path.open(encoding="utf-8") as file:
        _header(path, file.readline())
        for line in file:
            try:
                values = json.loads(line)
                record = Record(**{name: value for name, value in values.items() if name in _NAMES})
            except (ValueError, TypeError, AttributeError):
                return  # the rank was killed while it wrote
            yield record


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
        known = header["lockstep_records"] == _FORMAT
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no file of records of Lockstep's") from None
    if not known:
        raise ValueError(f"{path} was written by another version of Lockstep")
    return dict(header)
