"""A log file of all of a rank's collectives, one line of JSON each, for timelines of whole runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .layout import RING, StateWords
from .reader import Record, RecorderReader

_FORMAT = 1
_NAMES = {field.name for field in fields(Record)}


class LogFile:
    """A log that is being written, in whole lines, so that it can be read even if this process is
    killed.

    Args:
        folder: an existing folder.
        rank: this rank.
        header: the other values of the header, see `read_log_header`.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: Path, rank: int, **header: Any) -> None:
        self.path = folder / f"rank-{rank}.records"
        self._file = self.path.open("wb", buffering=0)
        self._write([json.dumps({"lockstep_records": _FORMAT, "rank": rank, **header})])

    @property
    def closed(self) -> bool:
        """Whether it is closed, because of an error too."""
        return self._file.closed

    def write(self, records: Iterable[Record]) -> None:
        """Append records.

        Raises:
            OSError: the file cannot be written (a full disk, for example); it is closed, after a
                complete record.
        """
        self._write([json.dumps(asdict(record)) for record in records])

    def _write(self, lines: Sequence[str]) -> None:
        data = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RecordLog:
    """Copies the records of a flight recorder to a file.

    Args:
        folder: is created if it does not exist.
        reader: of this rank's own flight recorder.
    """

    def __init__(self, folder: Path, reader: RecorderReader) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._reader = reader
        self._next = 1
        header = {
            name: getattr(reader, name)
            for name in ("world_size", "host", "pid", "unix_offset", "program")
        }
        self._file = LogFile(folder, reader.rank, **header)

    @property
    def behind(self) -> bool:
        """Whether unwritten records would soon be overwritten in the ring buffer."""
        return self._reader.state_word(StateWords().records) - self._next > RING // 2

    def flush(self, at_end: bool = False) -> None:
        """Write the new records up to the first unfinished one, which is written when it ends or
        must be overwritten.

        Args:
            at_end: also write unfinished records.

        Raises:
            OSError: the file cannot be written (a full disk, for example); it ends with a complete
                record.
        """
        count = self._reader.state_word(StateWords().records)
        records = []
        self._next = max(self._next, count + 1 - RING)
        while self._next <= count:
            raw = self._reader.raw(self._next)
            if raw is not None and not raw.left and not at_end and count - self._next < RING // 2:
                break
            if raw is not None:
                records.append(self._reader.record(raw))
            self._next += 1
        self._file.write(records)

    def close(self) -> None:
        """Write the remaining records and close the file.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._file.closed:
            self.flush(at_end=True)
            self._file.close()


def read_log_header(path: Path) -> dict[str, Any]:
    """Return the header of the log `path`: rank, world_size, host, pid, unix_offset (see
    `RankState`) and program.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a log of a flight recorder.
    """
    with path.open(encoding="utf-8") as file:
        return _header(path, file.readline())


def read_log(path: Path) -> Iterator[Record]:
    """Yield the records in the log `path`, up to the last complete one.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a log of a flight recorder.
    """
    with path.open(encoding="utf-8") as file:
        _header(path, file.readline())
        for line in file:
            try:
                values = json.loads(line)
                record = Record(**{name: value for name, value in values.items() if name in _NAMES})
            except (ValueError, TypeError, AttributeError):
                return  # the rank was killed while it wrote this line
            yield record


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
        known = header["lockstep_records"] == _FORMAT
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not a log of Lockstep's flight recorder") from None
    if not known:
        raise ValueError(f"{path} was written by another version of Lockstep")
    return dict(header)
