"""Whether the processes of other ranks live, and whether they may run."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Health", "is_stopped"]


class Health:
    """Watches processes of this machine.

    A pidfd tells the end of exactly that process, whoever gets its number next (Linux 5.3).

    Args:
        pids: of each rank to watch.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self.gone: set[int] = set()
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()  # no descriptor is closed, and its number used again, while it is polled
        for rank, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self.gone.add(rank)
            except (OSError, AttributeError):  # an old kernel: the process table is asked instead
                continue
            else:
                self._descriptors[descriptor] = rank

    def look(self) -> set[int]:
        """The ranks whose processes have ended."""
        with self._lock:
            poller = select.poll()
            for descriptor in self._descriptors:
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(0):
                self.gone.add(self._descriptors.pop(descriptor))
                os.close(descriptor)
            watched = {*self._descriptors.values(), *self.gone}
        if len(watched) < len(self._pids):
            self.gone |= {rank for rank, pid in self._pids.items() if rank not in watched and not _state(pid)}
        return self.gone

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of `rank` has been stopped, and not by a debugger."""
        return rank in self._pids and is_stopped(self._pids[rank])

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[0])


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal. One that is traced (state t) is a debugger's affair."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
