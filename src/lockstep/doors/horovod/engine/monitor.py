"""Sees to it that every wait ends: finds out who will not come, and says who has not come yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lockstep import Communicator
from lockstep.environment import debug_rank, variables
from lockstep.errors import LockstepError, RankLostError, StallError, TransportError
from lockstep.watch.blame import is_of_transport

from .notices import Notices
from .peers import Peers
from .request import Request
from .stalls import Late, Limits, late_ones
from .table import JOIN

__all__ = ["Monitor"]

_log = logging.getLogger("lockstep.horovod")

_TICK_S = 0.1
# A wait that is worth looking at; a round takes less than a thousandth of it.
_LONG_S = 1.0
# So many ticks lie between two looks into the store.
_RARELY = 5
# In which the system says that a process whose connections have ended has ended too.
_ENDING_S = 1.0


class Monitor:
    """Looks ten times a second at what is under way.

    Args:
        comm: the ranks, each of which makes one of these now.
        pending: gives the requests of this rank that are under way.
        unknown: gives the ranks of which it is not known that they have asked for the operation of a key.
        give_up: ends all requests with an error.
    """

    def __init__(
        self,
        comm: Communicator,
        pending: Callable[[], list[Request]],
        unknown: Callable[[bytes], list[int]],
        give_up: Callable[[TransportError], None],
    ) -> None:
        self._rank, self._size, self._limits = comm.rank, comm.size, Limits.read(variables())
        self._pending, self._unknown, self._give_up = pending, unknown, give_up
        self._peers, self._notices = Peers(comm), Notices(comm)
        self._long_s = min(_LONG_S, self._limits.warn_s / 2, self._limits.end_s / 2)
        self._ticks = 0  # of the wait
        self._said: set[Request] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep horovod monitor", daemon=True)
        if debug_rank() is None:  # who is stopped in a debugger may be
            self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._peers.rest()
        self._notices.close()

    def blame(self, text: str) -> None:
        """Let the others know why this rank ends its waits, before it does."""
        self._notices.blame(text)

    def explain(self, error: BaseException) -> BaseException:
        """What an error of a round comes from: what a rank that has given up says, or the end of one.

        An error of this rank's own is told to the others.
        """
        if not isinstance(error, Exception) or (isinstance(error, LockstepError) and error.report_json):
            return error
        if not is_of_transport(error):
            self._notices.blame(f"rank {self._rank}: {type(error).__name__}: {error}")
            return error
        lost = error.rank if isinstance(error, RankLostError) else None
        if lost in self._peers.ended():
            return error
        found: TransportError | None = None
        if reason := self._notices.reason():
            found = TransportError(reason)
        elif lost is None and (gone := self._peers.ended(_ENDING_S)):
            found = self._peers.lost(min(gone))
        if found is None:
            return error
        found.__cause__ = error
        return found

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            try:
                self._look()
            except (OSError, ValueError, RuntimeError):  # of a machine that is short of something; the next look tells
                continue

    def _look(self) -> None:
        now = time.monotonic()
        late = [request for request in self._pending() if now - request.asked >= self._long_s]
        if not late:
            self._rest()
            return
        error = self._peers.look()
        if error is not None:
            self._end(error)
            return
        if self._ticks % _RARELY == 0:
            self._notices.say(request.key for request in late)
            if reason := self._notices.reason():
                self._give_up(TransportError(reason))
                return
        self._ticks += 1
        self._check(late, now)

    def _rest(self) -> None:
        if self._ticks:
            self._ticks = 0
            self._said.clear()
            self._notices.say(())
        self._peers.rest()

    def _check(self, late: Sequence[Request], now: float) -> None:
        waits = [request for request in late if request.kind != "join"]
        over = [request for request in waits if now - request.asked >= self._limits.end_s]
        if over:
            (first, *_) = self._sorted(over, now)
            text = f"{first}. HOROVOD_STALL_SHUTDOWN_TIME_SECONDS makes this an error after {self._limits.end_s:g} s"
            self._end(StallError(text, first.missing))
            return
        slow = [request for request in waits if now - request.asked >= self._limits.warn_s]
        new = [request for request in slow if request not in self._said]
        if new:
            self._said.update(new)
            for each in self._sorted(new, now):
                if self._rank == min(each.there):  # one line for all of them
                    _log.warning("%s. It may be busy, have ended, or call other operations.", each)

    def _sorted(self, requests: Sequence[Request], now: float) -> list[Late]:
        told = self._notices.waiting()
        told[self._rank] = {request.key for request in self._pending()}
        asked = {}
        for request in requests:
            unknown = self._unknown(request.key)
            there = [r for r in range(self._size) if r not in unknown or request.key in told.get(r, ())]
            asked[request.key] = sorted({*there, self._rank})
        return late_ones(requests, now, asked, self._size, [r for r in told if JOIN[0] in told[r]])

    def _end(self, error: TransportError) -> None:
        said = self._notices.blame(str(error))
        self._give_up(error if said == str(error) else TransportError(said))
