"""The processes of the other ranks on this machine: whether they live, and whether they may run."""

from __future__ import annotations

import os
import time
from collections import Counter

from lockstep import Communicator
from lockstep.errors import RankLostError, TransportError
from lockstep.transports.shm.host import host_key
from lockstep.watch.health import Health

__all__ = ["Peers"]

# So often in a row a process must be seen to have ended or stopped: this one may just have woken up itself.
_ENDED, _STOPPED = 3, 10


class Peers:
    """See the module. Nothing is kept open between two waits.

    Args:
        comm: the ranks, each of which makes one of these now.
    """

    def __init__(self, comm: Communicator) -> None:
        here = host_key()
        places: list[tuple[str, int]] = comm.allgather_object((here, os.getpid()))
        self._pids = {rank: pid for rank, (host, pid) in enumerate(places) if host == here and rank != comm.rank}
        self._health: Health | None = None
        self._seen: Counter[tuple[str, int]] = Counter()

    def look(self) -> TransportError | None:
        """What is wrong with one of them, if it has been for a while; to be called again and again during a wait."""
        health = self._health = self._health or Health(self._pids)
        now = {("ended", rank) for rank in health.look()} | {
            ("stopped", rank) for rank in self._pids if health.is_stopped(rank)
        }
        self._seen = Counter({key: self._seen[key] + 1 for key in now})
        for (what, rank), times in sorted(self._seen.items()):
            if times >= (_ENDED if what == "ended" else _STOPPED):
                return self._error(what, rank)
        return None

    def ended(self, patience_s: float = 0.0) -> set[int]:
        """Which of them have ended, as soon as one has within so many seconds."""
        until = time.monotonic() + patience_s
        health = Health(self._pids)
        try:
            while not (gone := set(health.look())) and time.monotonic() < until:
                time.sleep(0.02)
        finally:
            health.close()
        return gone

    def lost(self, rank: int) -> TransportError:
        """The error that says that `rank`, of this machine, has ended."""
        return self._error("ended", rank)

    def rest(self) -> None:
        """The wait is over."""
        self._seen.clear()
        if self._health is not None:
            self._health.close()
            self._health = None

    def _error(self, what: str, rank: int) -> TransportError:
        process = f"rank {rank} (process {self._pids[rank]})"
        if what == "ended":
            return RankLostError(rank, f"{process} has ended while others waited for it")
        return TransportError(f"{process} is stopped, by SIGSTOP or Ctrl-Z, while others wait for it")
