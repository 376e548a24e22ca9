"""Whether the processes of the other ranks still live."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

__all__ = ["Peers"]


class Peers:
    """Watches processes of this machine by their numbers; any thread may ask.

    A pidfd tells the end of exactly that process, a zombie included, whoever gets its number next (Linux 5.3); without
    pidfds the process table is asked.

    Args:
        pids: process number of each rank to watch.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self._descriptors: dict[int, int] = {}
        self._gone: set[int] = set()
        self._lock = threading.Lock()  # no descriptor is closed, and its number used again, while it is polled
        for rank, pid in pids.items():
            self._watch(rank, pid)

    def gone(self) -> set[int]:
        """The ranks whose processes have ended."""
        with self._lock:
            self._poll()
            watched = set(self._descriptors.values()) | self._gone
            return self._gone | {rank for rank, pid in self._pids.items() if rank not in watched and not _exists(pid)}

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[0])

    def _poll(self) -> None:
        poller = select.poll()
        for descriptor in self._descriptors:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(0):
            self._gone.add(self._descriptors.pop(descriptor))
            os.close(descriptor)

    def _watch(self, rank: int, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._descriptors[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            self._gone.add(rank)
        except OSError:  # an old kernel, or no descriptor left: the process table is asked instead
            return


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
