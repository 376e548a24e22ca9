"""Whether processes on other hosts live, as the kernels say: they keep idle connections alive while no process runs.

A heartbeat that a process sends stops when the process holds the interpreter for long, or gets no turn. Here each
process holds a TCP connection to the first one, on which nothing is sent. When a process ends, however it does, its
kernel closes the connection at once; when a host has gone, or the way to it, it answers no more of the other kernel's
probes, and the connection ends at the limit. A process that is merely busy, and a network that comes back in time,
leave the connection as it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Literal

__all__ = ["Heartbeat", "Hub", "Life", "Spoke", "address_towards", "keep_alive"]

Life = Literal["unknown", "lives", "left", "ended", "lost"]
"""Of a process: not connected (yet), alive, gone in good order, gone without a word, cut off together with its host."""

_PROCESS_ENDED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
_BYE = b"."
_TOKEN = 32  # characters by which each side shows that it has read what the other has published
_STRANGERS = 64  # connections that may be about to say who they are
_HELLO_S = 10.0  # in which they must
_CONNECT_S = 1.0  # for a connection to be made; later ones are taken up by `look`


def keep_alive(connection: socket.socket, limit_s: float) -> None:
    """Let the kernel end a connection whose other side has not answered it for `limit_s` seconds, of at least 1."""
    # probes are sent in whole seconds, and the connection ends at the first that finds the limit passed
    period_s = max(1, int(limit_s / 10))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {
        "TCP_KEEPIDLE": period_s,
        "TCP_KEEPINTVL": period_s,
        "TCP_KEEPCNT": max(1, int(limit_s / period_s) - 1),
        "TCP_USER_TIMEOUT": max(500, int((limit_s - period_s) * 1000)),  # Linux; also for data that is under way
    }
    for name, value in settings.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def address_towards(host: str) -> str:
    """This machine's address in the network in which `host` is.

    Raises:
        OSError: when `host` is unknown or there is no way to it.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the system looks up its routes
        address: str = probe.getsockname()[0]
    return address


@dataclass(eq=False)
class _Line:
    """A connection. Attributes: life, of the process at its other end; since, when that began; heard, what it said."""

    socket: socket.socket
    life: Life = "unknown"
    since: float = 0.0
    heard: bytes = b""
    member: int = -1

    def turn(self, life: Life) -> None:
        self.life, self.since = life, time.monotonic()

    def read(self) -> bool:
        """Take in what there is; whether the connection goes on."""
        try:
            while data := self.socket.recv(256):
                self.heard = (self.heard + data)[-256:]
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            self.turn("ended" if error.errno in _PROCESS_ENDED else "lost")
            return False
        self.turn("left" if self.heard.endswith(_BYE) else "ended")
        return False


class Heartbeat:
    """What is known of others by their connections to this process; see `Hub` and `Spoke`.

    Nothing here waits but the making of a `Spoke`: `look` is to be called again and again, by any thread.

    Args:
        limit_s: seconds in which the kernel of another host must answer.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, _Line] = {}
        self._lock = Lock()

    def look(self) -> None:
        """Take note of what has become of the connections."""
        with self._lock:
            for key, _ in self._selector.select(0) if self._selector.get_map() else ():
                self._on_event(key)

    def life(self, member: int) -> Life:
        """What is known of that process."""
        line = self._lines.get(member)
        return "unknown" if line is None else line.life

    def seconds(self, member: int) -> float:
        """For how long that has been known."""
        line = self._lines.get(member)
        return 0.0 if line is None else time.monotonic() - line.since

    def close(self) -> None:
        """End in good order, which the others are told."""
        with self._lock:
            for line in self._lines.values():
                with suppress(OSError):
                    line.socket.send(_BYE)
            self._close_all()

    def abandon(self) -> None:
        """In a forked child: the connections are its parent's, and shall end with that."""
        self._close_all()

    def _close_all(self) -> None:
        if self._selector.get_map() is not None:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _on_event(self, key: selectors.SelectorKey) -> None:
        raise NotImplementedError

    def _end(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()


class Hub(Heartbeat):
    """The first process, to which the others connect.

    Args:
        limit_s: see `Heartbeat`.

    Attributes:
        token: what the others must know.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.token = secrets.token_hex(_TOKEN)
        self._doors: dict[str, int] = {}  # ports by own address
        self._strangers: list[_Line] = []

    def open_towards(self, address: str) -> str:
        """Listen to the one at `address`, and no wider than in the network in which that is; "host port" for it.

        Raises:
            OSError: there is no way to it.
        """
        own = address_towards(address)
        with self._lock:
            if own not in self._doors:
                door = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
                door.setblocking(False)
                self._selector.register(door, selectors.EVENT_READ)
                self._doors[own] = door.getsockname()[1]
            return f"{own} {self._doors[own]}"

    def _on_event(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._accept(key.fileobj)  # type: ignore[arg-type]
            return
        line, goes_on = key.data, key.data.read()
        if line in self._strangers:
            self._greet(line, goes_on)
        elif not goes_on:
            self._end(line)

    def _accept(self, door: socket.socket) -> None:
        with suppress(OSError):  # it has hung up meanwhile, or there are no descriptors left
            while True:
                line = _Line(door.accept()[0])
                line.socket.setblocking(False)
                keep_alive(line.socket, self.limit_s)
                line.turn("unknown")
                self._selector.register(line.socket, selectors.EVENT_READ, line)
                self._strangers.append(line)
                late = [each for each in self._strangers if time.monotonic() - each.since > _HELLO_S]
                for each in {*late, *self._strangers[:-_STRANGERS]}:
                    self._end(each)
                    self._strangers.remove(each)

    def _greet(self, line: _Line, goes_on: bool) -> None:
        """Take up one that has said who it is, even if it is gone by now, and send the others away."""
        hello, end, rest = line.heard.partition(b"\n")
        if goes_on and not end and len(hello) < 100:
            return
        self._strangers.remove(line)
        word, _, number = hello.decode("ascii", "replace").partition(" ")
        known = bool(end) and secrets.compare_digest(word.encode(), self.token[:_TOKEN].encode()) and number.isdecimal()
        if known:
            self._lines[int(number)] = line
            line.heard = rest
        if known and goes_on:
            with suppress(OSError):
                line.socket.send(self.token[_TOKEN:].encode())
            line.turn("lives")
        else:
            self._end(line)


class Spoke(Heartbeat):
    """One of the others, which is connected to the first.

    Args:
        where: what `Hub.open_towards` gave for this one.
        token: the hub's.
        member: number of this one.
        limit_s: see `Heartbeat`.
        hub: number of the first.
    """

    def __init__(self, where: str, token: str, member: int, limit_s: float, hub: int = 0) -> None:
        super().__init__(limit_s)
        host, _, port = where.partition(" ")
        self._hello = f"{token[:_TOKEN]} {member}\n".encode()
        self._answer = token[_TOKEN:].encode()
        self.has_failed = False  # there is no way to the hub
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setblocking(False)
        keep_alive(connection, limit_s)
        self._line = self._lines[hub] = _Line(connection, since=time.monotonic())
        with suppress(OSError):  # which comes again when it is asked for its error
            connection.connect_ex((host, int(port)))
        self._selector.register(connection, selectors.EVENT_WRITE, self._line)
        self._selector.select(_CONNECT_S)  # so that the hub learns of it, whatever becomes of this process next
        self.look()

    def _on_event(self, key: selectors.SelectorKey) -> None:
        line = self._line
        if key.events == selectors.EVENT_WRITE:
            self._say_hello()
            return
        goes_on = line.read()
        answered = line.heard.startswith(self._answer)
        if not goes_on:
            self._end(line)
        if not answered and not goes_on:  # that was somebody else
            line.turn("unknown")
            self.has_failed = True
        elif answered and line.life == "unknown":
            line.turn("lives")

    def _say_hello(self) -> None:
        line = self._line
        try:
            error = line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            line.socket.send(self._hello)
        except OSError:
            self.has_failed = True
            self._end(line)
            return
        self._selector.modify(line.socket, selectors.EVENT_READ, line)
