"""What the host that leads an elastic job has heard from the others: their messages, until it
handles them, and whom they do not reach.

The connections on which they come are in `mesh`; `elastic_host` handles them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from .host_messages import Ended, FromWorker, HostMessages

_CUT_OFF_S = (
    5.0  # after which this host itself would have noticed that one of the two does not answer
)
_REFUSED_S = 10.0
_MOST_REFUSED_S = 600.0


class Inbox:
    """What the hosts send to who leads, in order; it is kept while it is open which host that
    is.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[HostMessages]] = {}
        self._marks: dict[int, int] = {}

    def add(self, host: int, message: HostMessages) -> None:
        """Add a message from a host."""
        self._queues.setdefault(host, deque()).append(message)

    def mark(self, host: int) -> None:
        """Note that a report of this host has come, which knows of all that it has sent so far."""
        self._marks[host] = len(self._queues.get(host, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._queues.clear()

    def take(self) -> Iterator[tuple[int, HostMessages]]:
        """Yield and remove all messages."""
        self._marks.clear()
        for host, queue in self._queues.items():
            while queue:
                yield host, queue.popleft()

    def drop_reported(self) -> list[tuple[int, Ended]]:
        """Remove what workers have sent before their hosts' reports, which say it already; returns
        what has ended.
        """
        ended = []
        for host, marked in self._marks.items():
            queue = self._queues.get(host, deque())
            reported = [queue.popleft() for _ in range(min(marked, len(queue)))]
            queue.extendleft(
                message
                for message in reversed(reported)
                if not isinstance(message, FromWorker | Ended)
            )
            ended += [(host, message) for message in reported if isinstance(message, Ended)]
        return ended


class UnreachableHosts:
    """Which hosts say that they do not reach each other, and which are left out for that reason."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # until when, and for how long

    def note(self, host: int, others: Iterable[int]) -> None:
        """Note which others a host does not reach now."""
        now = time.monotonic()
        before = self._since
        self._since = {pair: since for pair, since in before.items() if pair[0] != host}
        for pair in ((host, other) for other in others):
            self._since[pair] = before.get(pair, now)

    def forget(self) -> None:
        """Another host leads from here on, which is told anew."""
        self._since.clear()

    def overdue(self, hosts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first two of the `hosts`, in order of seniority, for which that has lasted too
        long, or none.
        """
        now = time.monotonic()
        for pair, since in self._since.items():
            if set(pair) <= set(hosts) and now - since >= _CUT_OFF_S:
                senior, junior = sorted(pair, key=hosts.index)
                return [(senior, junior)]
        return []

    def refuse(self, address: str) -> None:
        """Do not let the host at an address in again for some time, longer each time."""
        _, seconds = self._refused.get(address, (0.0, _REFUSED_S / 2))
        seconds = min(2 * seconds, _MOST_REFUSED_S)
        self._refused[address] = (time.monotonic() + seconds, seconds)

    def is_refused(self, address: str) -> bool:
        """Return whether that time is not over."""
        return time.monotonic() < self._refused.get(address, (0.0, 0.0))[0]
