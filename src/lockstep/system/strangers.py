"""Connections of strangers: accepted by a listening socket, and not yet identified as those of a
peer.

Whoever reaches a port can open connections to it, send anything at any pace, or nothing. None of
that may hold up the process that listens, take all of its descriptors, or keep its peers out.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

LIMIT_S = 10.0
"""Seconds after its acceptance in which a connection must identify itself, however much it sends.
"""

MOST = 64
"""The most connections that have not identified themselves."""

# that are accepted in one turn: their first data are read before others make them too many
_AT_ONCE = 32
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Strangers(Generic[T]):
    """The connections that have not identified themselves. Whoever is too many, or takes too long,
    is closed.

    Handle the data that have come before `tick`: who has sent what it had to in time is then no
    stranger any more.

    Args:
        close: called for each connection that is dropped here.
        limit_s: seconds that each of them may take from its acceptance.
        most: the most of them; beyond it the oldest of the address that has the most of them is
            dropped, so that a flood from one address does not drop those of others.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        close: Callable[[T], None],
        limit_s: float = LIMIT_S,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._close = close
        self._limit_s = limit_s
        self._most = most
        self._clock = clock
        self._held: dict[T, tuple[float, str]] = {}  # since when, and the address; the oldest first
        # given up for a moment when there are no more: else nobody could be accepted, and so be
        # refused
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def __contains__(self, connection: T) -> bool:
        return connection in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._held))

    def accept(self, listener: socket.socket, on_accept: Callable[[socket.socket], T]) -> None:
        """Accept some of the connections that wait at a non-blocking `listener`.

        Args:
            listener: of which connections are accepted.
            on_accept: called with each new socket; returns its connection.
        """
        for _ in range(_AT_ONCE):
            try:
                end, address = listener.accept()
            except OSError as error:  # none waits, or it has been closed by now
                if error.errno in _NO_DESCRIPTOR:
                    self._turn_away(listener)
                return
            try:
                end.setblocking(False)
                connection = on_accept(end)
            except OSError:  # it has been closed by now
                end.close()
                continue
            self._held[connection] = self._clock(), address[0] if isinstance(address, tuple) else ""
            if len(self._held) > self._most:
                self.drop(self._oldest())

    def identified(self, connection: T) -> None:
        """Note that a connection is that of a peer."""
        self._held.pop(connection, None)

    def drop(self, connection: T) -> None:
        """Close a connection."""
        if self._held.pop(connection, None) is not None:
            self._close(connection)

    def tick(self) -> None:
        """Close the connections that have taken too long."""
        now = self._clock()
        for connection in [
            stranger for stranger, (since, _) in self._held.items() if now - since > self._limit_s
        ]:
            self.drop(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._held):
            self.drop(connection)
        self.forget()

    def forget(self) -> None:
        """Forget all connections, which have been closed; this object is of no use afterwards."""
        self._held.clear()
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1

    def _oldest(self) -> T:
        """Return the oldest connection of the address that has the most of them."""
        counts = Counter(address for _, address in self._held.values())
        most = max(counts.values())
        return next(
            connection for connection, (_, address) in self._held.items() if counts[address] == most
        )

    def _turn_away(self, listener: socket.socket) -> None:
        """Make room for the next connection, or refuse it: it would be told of again and again, and
        never accepted.
        """
        if self._held:
            self.drop(self._oldest())
            return
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with suppress(OSError):
            listener.accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
