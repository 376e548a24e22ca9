"""Logs this rank's operations in a file, in the format of Lockstep's flight recorder."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from lockstep.flight_recorder import LogFile, Record
from lockstep.watchdog.call_sites import describe, is_internal

from .request import Request


class OperationLog:
    """Writes a record for every completed operation.

    Args:
        folder: an existing folder, for the logs of all ranks of this host.
        rank: this rank.
        size: the number of ranks.
        mark_cycles: whether to log the start of each cycle too, in a second file.
    """

    def __init__(self, folder: Path, rank: int, size: int, mark_cycles: bool = False) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._count = 0
        self._call_sites: dict[Request, tuple[str, str]] = {}
        self._file = LogFile(
            folder,
            rank,
            world_size=size,
            host=socket.gethostname(),
            pid=os.getpid(),
            unix_offset=time.time() - time.monotonic(),
            program=" ".join(sys.argv)[:256],
        )
        self.path = self._file.path
        self._cycles = (
            self.path.with_suffix(".cycles").open("w", buffering=1) if mark_cycles else None
        )

    def submitted(self, request: Request) -> None:
        """Log that the program submits `request` now; to be called by the method that the program
        calls.
        """
        self._call_sites[request] = _call_site(sys._getframe(2))

    def cycle_started(self) -> None:
        """Log that a cycle starts on this rank."""
        with self._lock:
            if self._cycles is not None and not self._cycles.closed:
                self._cycles.write(f"{time.monotonic()}\n")

    def completed(self, request: Request, number: int, group: str) -> None:
        """Log that `request` has completed, unless it was submitted before the log was opened.

        Args:
            request: the request.
            number: the number of the operation in its set of ranks.
            group: the name of that set; "" for all ranks.
        """
        call_site = self._call_sites.pop(request, None)
        if call_site is None:
            return
        signature = ", ".join(
            f"{label} {value}"
            for label, value in request.signature
            if not (label.endswith("_factor") and value == 1.0)  # the default
        )
        what = f"{request.kind} {request.name}" + (f" ({signature})" if signature else "")
        with self._lock:
            self._count += 1
            times = request.submitted_at, time.monotonic()
            if not self._file.closed:
                self._file.write(
                    [Record(self._count, what, *call_site, group, number, None, False, *times)]
                )

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._file.close()
            if self._cycles is not None:
                self._cycles.close()


def _call_site(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost line of the user's code at or above `frame`, and its text; "" for none,
    as in a backward.
    """
    while frame is not None:
        if not is_internal(frame.f_code.co_filename):
            return describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return "", ""


active: OperationLog | None = None
"""The log of this process; None while no timeline is active."""
