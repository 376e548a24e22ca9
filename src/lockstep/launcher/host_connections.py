"""The connections of a launcher to those of other hosts, in its loop: it accepts them, lets those
pass that prove that they know the job's key, knows which one counts of each host, receives, and
notices launchers that do not answer.

Nothing blocks here. What the messages mean, and what follows from the end of a connection, is the
matter of `links`, for a job whose hosts are fixed, and of `elastic_jobs.mesh`.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..job.connection import AT_ONCE, Connection, watch_unsent
from ..system.heartbeat import keep_alive
from ..system.strangers import Strangers
from .handshake import Handshake, HostHello
from .pulse import SilenceWatch

__all__ = ["HostConnection", "HostConnections"]


@dataclass(eq=False)
class HostConnection:
    """A connection to the launcher of another host.

    Attributes:
        connection: to it.
        handshake: of this side.
        host: the number of that host; -1 until it is known.
        heard: when something came last.
        is_broken: whether the connection has failed, so that its end does not say that all has
            come.
    """

    connection: Connection[Any, Any]
    handshake: Handshake
    host: int = -1
    heard: float = field(default_factory=time.monotonic)
    is_broken: bool = False


class HostConnections:
    """The connections to the launchers of other hosts.

    Args:
        key: the job's secret.
        selector: of the launcher's loop; the data of each key is a function to call when it is
            ready.
        kind: the type of all messages between launchers.
        limit_s: seconds within which the kernel of another host must answer.
        on_hello: called with the connection of who has dialled, and what it says of itself, once it
            has proved that it knows the key.
        on_message: called with a connection and each later message.
        on_end: called when a connection of a launcher has ended, or one of these functions raises
            OSError, with the error; EOFError if it was read to its end.

    Attributes:
        strangers: the connections of those who have not said who they are.
        of_host: the connection that counts of each host that is connected, by its number.
    """

    def __init__(
        self,
        key: str,
        selector: selectors.BaseSelector,
        kind: object,
        limit_s: float,
        on_hello: Callable[[HostConnection, HostHello], None],
        on_message: Callable[[HostConnection, Any], None],
        on_end: Callable[[HostConnection, Exception], None],
    ) -> None:
        self.strangers: Strangers[HostConnection] = Strangers(self.close)
        self.of_host: dict[int, HostConnection] = {}
        self._key = key
        self._selector = selector
        self._kind = kind
        self._limit_s = limit_s
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_end = on_end
        self._listener: socket.socket | None = None

    def listen(self, listener: socket.socket) -> None:
        """Accept the connections of launchers that dial `listener`."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def stop_listening(self) -> None:
        """Close the listener, and the connections of strangers."""
        self.strangers.close()
        if self._listener is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def add(self, end: socket.socket) -> HostConnection:
        """Take part in a handshake over a socket that is connected."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host_connection = self.adopt(Connection(end, self._kind))
        host_connection.connection.is_strange = True
        return host_connection

    def adopt(self, connection: Connection[Any, Any]) -> HostConnection:
        """Receive on a connection whose handshake is over."""
        connection.socket.setblocking(False)
        keep_alive(connection.socket, self._limit_s)
        host_connection = HostConnection(connection, Handshake(self._key))
        self._selector.register(
            connection.socket, selectors.EVENT_READ, lambda: self._receive(host_connection)
        )
        return host_connection

    def assign(self, host_connection: HostConnection, host: int) -> None:
        """Let a connection be the one that counts of a host."""
        host_connection.host = host
        host_connection.connection.is_strange = False
        self.of_host[host] = host_connection

    def counts(self, host_connection: HostConnection) -> bool:
        """Return whether a connection is the one that counts of its host."""
        return self.of_host.get(host_connection.host) is host_connection

    def send_to(self, host: int, message: object) -> None:
        """Send a message to a host; ignored if it is not connected."""
        host_connection = self.of_host.get(host)
        if host_connection is not None:
            self.send(host_connection, message)

    def send(self, host_connection: HostConnection, message: object) -> None:
        """Send a message; that the other side is gone, the loop finds out."""
        try:
            host_connection.connection.send(message)
        except OSError:
            host_connection.is_broken = True  # what has come before is still read
            return
        watch_unsent(self._selector, host_connection.connection)

    def ping(self, host_connection: HostConnection) -> None:
        """Let the other launcher know that this one runs; another thread may call this."""
        try:
            host_connection.connection.ping()
        except OSError:
            host_connection.is_broken = True

    def ping_all(self) -> None:
        """Let the launchers of all hosts know that this one runs; another thread may call this."""
        for host_connection in list(self.of_host.values()):
            self.ping(host_connection)

    @property
    def has_unsent(self) -> bool:
        """Whether something for a host is not sent yet."""
        return any(
            host_connection.connection.has_unsent for host_connection in self.of_host.values()
        )

    def look_for_silence(self, silence: SilenceWatch) -> Iterator[tuple[HostConnection, bool]]:
        """Yield the connections to launchers that have not answered for so long that it is to be
        said, each with whether that is too long.
        """
        silence.tick()
        for host_connection in list(self.of_host.values()):
            host = host_connection.host
            is_due = silence.is_due(host, host_connection.heard)
            is_over = silence.is_over(host, host_connection.heard)
            if is_due or is_over:
                yield host_connection, is_over

    def tick(self) -> None:
        """Close the connections that have taken too long to say whose they are."""
        self.strangers.tick()

    def close(self, host_connection: HostConnection) -> None:
        """Close a connection."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(host_connection.connection.socket)
        host_connection.connection.close()

    def _accept(self) -> None:
        if self._listener is not None:
            self.strangers.accept(self._listener, self._open)

    def _open(self, end: socket.socket) -> HostConnection:
        """Return the connection of a stranger."""
        host_connection = self.add(end)
        self.send(host_connection, host_connection.handshake.begin())
        return host_connection

    def _receive(self, host_connection: HostConnection) -> None:
        """Take what has come on a connection, or its end."""
        connection = host_connection.connection
        host_connection.heard = time.monotonic()
        try:
            for message in connection.receive_available(AT_ONCE):
                self._take(host_connection, message)
            connection.flush()  # after what has come: one that is gone takes nothing more
            watch_unsent(self._selector, connection)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            if host_connection in self.strangers:
                self.strangers.drop(host_connection)
            else:
                self._on_end(host_connection, error)

    def _take(self, host_connection: HostConnection, message: Any) -> None:
        if host_connection in self.strangers:
            hello = host_connection.handshake.check(message)
            self.strangers.identified(host_connection)
            self._on_hello(host_connection, hello)
        else:
            self._on_message(host_connection, message)
