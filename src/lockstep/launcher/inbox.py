"""What the hosts of an elastic job have sent to the one that leads, until that one handles it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .elastic_job import Ended, FromWorker, HostMessages

__all__ = ["Inbox"]


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
