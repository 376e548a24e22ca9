"""Liveness of processes on other hosts, by TCP keep-alive: the kernels exchange the heartbeats, not
the processes.

A heartbeat that a process sends stops when the process holds the interpreter for long, or is not
scheduled. Here each process holds an idle TCP connection to the first one. When a process ends,
however it does, its kernel closes the connection at once; when a host or the network to it fails,
it no longer answers the keep-alive probes of the other kernel, and the connection ends at the
limit. A process that is merely busy, and a network that recovers in time, leave the connection as
it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from .strangers import Strangers

PeerState = Literal["unknown", "alive", "left", "ended", "lost"]
"""A process is not connected (yet), alive, disconnected cleanly, ended without that, or unreachable
with its host.
"""

# TCP_RTO_MAX_MS and TCP_THIN_LINEAR_TIMEOUTS of include/uapi/linux/tcp.h
_RETRANSMISSION = {44: 1000, 16: 1}
_PROCESS_ENDED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
_GOODBYE = b"."
_TOKEN = 32  # characters by which each side proves that it has read what the other published
_HELLO = 100  # the most characters with which a peer identifies itself
_READ = 4096  # bytes that are read of one connection in one turn, however fast they come
_TURNS = 8  # of one poll: many peers connect at the same time
_BACKLOG = 2048  # the same holds for connections that wait to be accepted
_CONNECT_S = 1.0  # for a connection to be made; later ones are noticed by `poll`


def keep_alive(connection: socket.socket, limit_s: float) -> None:
    """Make the kernel end a connection whose peer has not answered it for `limit_s` seconds, of at
    least 1.
    """
    # probes are sent in whole seconds, and the connection ends at the first that finds the limit
    # passed
    period_s = max(1, int(limit_s / 10))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {
        "TCP_KEEPIDLE": period_s,
        "TCP_KEEPINTVL": period_s,
        "TCP_KEEPCNT": max(1, int(limit_s / period_s) - 1),
        # Linux; also for data in flight
        "TCP_USER_TIMEOUT": max(500, int((limit_s - period_s) * 1000)),
    }
    for name, value in settings.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    retransmit_often(connection)


def retransmit_often(connection: socket.socket) -> None:
    """Let the kernel send again at least once a second what is not acknowledged, where it can
    (Linux 6.15).

    By default it waits twice as long each time, up to two minutes: a network that has been cut for
    6 s may then be whole for 6 s more before anybody tries it. Older kernels try six times without
    doubling, while little is in flight.
    """
    if sys.platform == "linux":
        for option, value in _RETRANSMISSION.items():
            with suppress(OSError):  # an older kernel
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def address_towards(host: str) -> str:
    """Return this host's address in the network of `host`.

    Raises:
        OSError: `host` is unknown or there is no route to it.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the system looks up its routes
        address: str = probe.getsockname()[0]
    return address


def address_in_a_network(interfaces: str = "") -> str:
    """Return an IPv4 address by which other hosts may reach this one.

    Args:
        interfaces: the names of the network interfaces that may be used, separated by commas; ""
            for the one on the way to far hosts, or else any.

    Raises:
        OSError: this host is in no such network.
    """
    import psutil

    if not interfaces:
        with suppress(OSError):
            return address_towards("192.0.2.1")  # an address of no host (RFC 5737)
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses if not interfaces or name in interfaces.split(",") else ():
            if address.family is socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    among = f" among {interfaces}" if interfaces else ""
    raise OSError(f"no network interface with an address{among}")


@dataclass(eq=False)
class _Connection:
    """A connection to a peer. Attributes: state, of the peer; since, when it began; received, the
    last bytes.
    """

    socket: socket.socket
    state: PeerState = "unknown"
    since: float = 0.0
    received: bytes = b""

    def set_state(self, state: PeerState) -> None:
        self.state = state
        self.since = time.monotonic()

    def read(self) -> bool:
        """Read the available data, and return whether the connection is still open."""
        try:
            data = self.socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            self.set_state("ended" if error.errno in _PROCESS_ENDED else "lost")
            return False
        if data:
            self.received = (self.received + data)[-256:]
            return True
        self.set_state("left" if self.received.endswith(_GOODBYE) else "ended")
        return False


class Heartbeat:
    """The states of peers by their connections to this process; see `HeartbeatServer` and
    `HeartbeatClient`.

    Nothing blocks here except the constructor of `HeartbeatClient`. Call `poll` repeatedly, from
    any thread.

    Args:
        limit_s: seconds within which the kernel of another host must answer.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._lock = Lock()

    def poll(self) -> None:
        """Update the states of all peers."""
        with self._lock:
            for _ in range(_TURNS):
                if not (self._selector.get_map() and self._handle_events()):
                    break
            self._tick()

    def _handle_events(self) -> bool:
        """Handle what the selector has to tell; returns whether that was anything."""
        keys = [key for key, _ in self._selector.select(0)]
        for key in keys:
            current = self._selector.get_map().get(key.fd)
            # else an earlier one of these has closed it
            if current is not None and current.fileobj is key.fileobj:
                self._on_event(key)
        return bool(keys)

    def _tick(self) -> None:
        """Do what is due."""

    def state(self, peer: int) -> PeerState:
        """Return the last known state of a peer."""
        connection = self._connections.get(peer)
        return "unknown" if connection is None else connection.state

    def seconds_in_state(self, peer: int) -> float:
        """Return for how long the peer has been in its state."""
        connection = self._connections.get(peer)
        return 0.0 if connection is None else time.monotonic() - connection.since

    def close(self) -> None:
        """Disconnect cleanly: the peers see the state "left"."""
        with self._lock:
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.socket.send(_GOODBYE)
            self._close_all()

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child: the connections are its parent's, and end with
        the parent.
        """
        self._close_all()

    def _close_all(self) -> None:
        if self._selector.get_map() is not None:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _on_event(self, key: selectors.SelectorKey) -> None:
        raise NotImplementedError

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()


class HeartbeatServer(Heartbeat):
    """The first process, to which all others connect.

    Args:
        limit_s: see `Heartbeat`.

    Attributes:
        token: the secret that clients must know.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.token = secrets.token_hex(_TOKEN)
        self._ports: dict[str, int] = {}  # of the listeners, by their address
        self._strangers: Strangers[_Connection] = Strangers(self._drop)

    def listen_for(self, address: str) -> str:
        """Listen for the process at `address`, only in its network, and return "host port" for it.

        Raises:
            OSError: there is no route to it.
        """
        host = address_towards(address)
        with self._lock:
            if host not in self._ports:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
                self._ports[host] = listener.getsockname()[1]
            return f"{host} {self._ports[host]}"

    def _on_event(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._strangers.accept(key.fileobj, self._open)  # type: ignore[arg-type]
            return
        connection = key.data
        is_open = key.data.read()
        if connection in self._strangers:
            self._identify(connection, is_open)
        elif not is_open:
            self._drop(connection)

    def _open(self, end: socket.socket) -> _Connection:
        keep_alive(end, self.limit_s)
        connection = _Connection(end, since=time.monotonic())
        self._selector.register(end, selectors.EVENT_READ, connection)
        return connection

    def _tick(self) -> None:
        self._strangers.tick()

    def _close_all(self) -> None:
        super()._close_all()
        self._strangers.forget()

    def _identify(self, connection: _Connection, is_open: bool) -> None:
        """Register a peer that has sent its token and number, even if it has ended by now; drop any
        other.
        """
        hello, end, rest = connection.received.partition(b"\n")
        if is_open and not end and len(hello) < _HELLO:
            return
        token, _, number = hello.decode("ascii", "replace").partition(" ")
        known = bool(end) and number.isdecimal()
        known = known and secrets.compare_digest(token.encode(), self.token[:_TOKEN].encode())
        if not known:
            self._strangers.drop(connection)
            return
        self._strangers.identified(connection)
        self._connections[int(number)] = connection
        connection.received = rest
        if is_open:
            with suppress(OSError):
                connection.socket.send(self.token[_TOKEN:].encode())
            connection.set_state("alive")
        else:
            self._drop(connection)


class HeartbeatClient(Heartbeat):
    """Any other process, connected to the first.

    Args:
        endpoint: the result of `HeartbeatServer.listen_for` for this process.
        token: the server's.
        peer: number of this process.
        limit_s: see `Heartbeat`.
        server: number of the first process.

    Attributes:
        has_failed: whether the server cannot be reached.
    """

    def __init__(
        self, endpoint: str, token: str, peer: int, limit_s: float, server: int = 0
    ) -> None:
        super().__init__(limit_s)
        host, _, port = endpoint.partition(" ")
        self._hello = f"{token[:_TOKEN]} {peer}\n".encode()
        self._answer = token[_TOKEN:].encode()
        self.has_failed = False
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setblocking(False)
        keep_alive(connection, limit_s)
        self._connection = self._connections[server] = _Connection(
            connection, since=time.monotonic()
        )
        with suppress(OSError):  # it is raised again when the error of the socket is read
            connection.connect_ex((host, int(port)))
        self._selector.register(connection, selectors.EVENT_WRITE, self._connection)
        # so that the server knows of it, even if this process ends next
        self._selector.select(_CONNECT_S)
        self.poll()

    def _on_event(self, key: selectors.SelectorKey) -> None:
        connection = self._connection
        if key.events == selectors.EVENT_WRITE:
            self._send_hello()
            return
        is_open = connection.read()
        answered = connection.received.startswith(self._answer)
        if not is_open:
            self._drop(connection)
        if not answered and not is_open:  # another program listens there
            connection.set_state("unknown")
            self.has_failed = True
        elif answered and connection.state == "unknown":
            connection.set_state("alive")

    def _send_hello(self) -> None:
        connection = self._connection
        try:
            error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            connection.socket.send(self._hello)
        except OSError:
            self.has_failed = True
            self._drop(connection)
            return
        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
