"""Keeps records of this rank's operations in a file, as Lockstep's recorder keeps those of its collectives."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from lockstep.recorder import Record
from lockstep.watch.places import describe, is_internal

from .request import Request

__all__ = ["Operations", "current"]


class Operations:
    """Writes a record for every operation that has ended.

    Args:
        folder: of the records of all ranks of this machine; it is there.
        rank: this rank.
        size: the number of ranks.
        mark_cycles: whether to note when each round of the ranks begins, in a file beside the records.
    """

    def __init__(self, folder: Path, rank: int, size: int, mark_cycles: bool = False) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._count = 0
        self._begun: dict[Request, tuple[str, str]] = {}
        self.path = folder / f"rank-{rank}.records"
        self._file = self.path.open("w", encoding="utf-8", buffering=1)  # what a rank that is killed has done is there
        self._cycles = self.path.with_suffix(".cycles").open("w", buffering=1) if mark_cycles else None
        offset = time.time() - time.monotonic()
        header = {"lockstep_records": 1, "rank": rank, "world_size": size, "host": socket.gethostname()}
        self._write({**header, "pid": os.getpid(), "unix_offset": offset, "program": " ".join(sys.argv)[:256]})

    def begun(self, request: Request) -> None:
        """Note that the program asks for an operation now."""
        self._begun[request] = _place(sys._getframe(2))

    def round_begins(self) -> None:
        """Note that this rank is about to tell the others what it has asked for."""
        with self._lock:
            if self._cycles is not None and not self._cycles.closed:
                self._cycles.write(f"{time.monotonic()}\n")

    def ended(self, request: Request, number: int, group: str) -> None:
        """Note that an operation has ended; those that began before the records did are left out.

        Args:
            request: of which it was the answer.
            number: of the operation among those of its ranks.
            group: the name of these; "" for all.
        """
        place = self._begun.pop(request, None)
        if place is None:
            return
        form = ", ".join(f"{label} {value}" for label, value in request.form if not _is_usual(label, value))
        what = f"{request.kind} {request.name}" + (f" ({form})" if form else "")
        with self._lock:
            self._count += 1
            record = Record(self._count, what, *place, group, number, None, False, request.asked, time.monotonic())
            self._write(asdict(record))

    def close(self) -> None:
        """Write the rest."""
        with self._lock:
            self._file.close()
            if self._cycles is not None:
                self._cycles.close()

    def _write(self, line: dict[str, object]) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(line) + "\n")


def _is_usual(label: str, value: object) -> bool:
    return label.endswith("_factor") and value == 1.0


def _place(frame: FrameType | None) -> tuple[str, str]:
    """The first line of the user's, outwards from `frame`, and its text; "" where there is none, as in a backward."""
    while frame is not None:
        if not is_internal(frame.f_code.co_filename):
            return describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return "", ""


current: Operations | None = None
"""The records of this process, while it keeps any."""
