"""Connections between the processes of a job: messages over a socket, each after its length; an
empty one is a ping.
"""

from __future__ import annotations

import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["AT_ONCE", "Connection", "connect_to_launcher", "take_turn", "watch_unsent"]

In = TypeVar("In")
Out = TypeVar("Out")

_LENGTH = struct.Struct("!I")
_PING = _LENGTH.pack(0)
_MOST = 1 << 30  # bytes of a message; the largest are values that rank 0 has sent to all
_MOST_OF_STRANGERS = 1 << 16  # bytes of a message with which the other side identifies itself

AT_ONCE = 1 << 20
"""The bytes that are read of one connection before the others have their turn."""


class Connection(Generic[In, Out]):
    """One end of a connection. A thread of its own may send while another one receives.

    Args:
        end: the socket; non-blocking where `send` must not wait.
        incoming: the type of the messages that are received.

    Attributes:
        most: the largest message that is received, in bytes.
        pings: how many have come.
        is_strange: whether the other side has not shown who it is: of it no pings are taken, and no
            long messages.
    """

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self.socket = end
        self.most = _MOST
        self.pings = 0
        self.is_strange = False
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.socket.fileno()

    def send(self, message: Out) -> None:
        """Send a message, or keep what a non-blocking socket does not take yet, for `flush`.

        Raises:
            OSError: the other side is gone.
        """
        data = self._encoder.encode(message)
        with self._lock:
            self._unsent += _LENGTH.pack(len(data)) + data
            self._flush()

    def ping(self) -> None:
        """Show the other side that this process runs.

        Raises:
            OSError: the other side is gone.
        """
        with self._lock:
            if (
                not self._unsent
            ):  # who does not read what it was sent does not learn anything from more
                self._unsent += _PING
                self._flush()

    def flush(self) -> bool:
        """Send what was kept; returns whether all of it is sent."""
        with self._lock:
            self._flush()
            return not self._unsent

    @property
    def has_unsent(self) -> bool:
        """Whether something is kept that could not be sent yet."""
        return bool(self._unsent)

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def receive(self, deadline: float = math.inf) -> In | None:
        """Wait for the next message; returns None when the other side has closed the connection.

        Args:
            deadline: on the monotonic clock, for the whole message.

        Raises:
            OSError, msgspec.DecodeError: the connection is broken, or what has come is no message.
            TimeoutError: the deadline has passed.
        """
        while (message := self._next()) is None:
            if deadline < math.inf:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._received += data
        return message

    def receive_available(self, at_once: float = math.inf) -> Iterator[In]:
        """Yield the messages that have come.

        Args:
            at_once: the bytes after which the rest is left for the next call, as there is more on a
                connection whose other side sends as fast as it can.

        Raises:
            EOFError: the other side has closed the connection.
            OSError, msgspec.DecodeError: the connection is broken, or what has come is no message.
        """
        with suppress(BlockingIOError):
            while at_once > 0:
                data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
                at_once -= len(data)
                self._received += data
                while (message := self._next()) is not None:
                    yield message
                if not data:
                    raise EOFError

    @property
    def is_at_end(self) -> bool:
        """Whether the other side has closed the connection, and nothing is left to be received."""
        try:
            return not self.socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _next(self) -> In | None:
        while self._received.startswith(_PING):
            if self.is_strange:
                raise msgspec.DecodeError(
                    "expected a message that says who the other side is, got a ping"
                )
            del self._received[: _LENGTH.size]
            self.pings += 1
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        most = _MOST_OF_STRANGERS if self.is_strange else self.most
        if length > most:
            raise msgspec.DecodeError(
                f"expected a message of at most {most} bytes, got one of {length}"
            )
        if len(self._received) < _LENGTH.size + length:
            return None
        data = bytes(self._received[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        try:
            return self._decoder.decode(data)
        except RecursionError:
            raise msgspec.DecodeError("expected a message, got deeply nested data") from None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def connect_to_launcher(path: str, incoming: object) -> Connection[Any, Any]:
    """Connect to the launcher whose Unix socket is at `path`.

    Args:
        path: of the socket.
        incoming: the type of the messages that come from there.

    Raises:
        OSError: there is none.
    """
    end = socket.socket(socket.AF_UNIX)
    end.connect(path)
    return Connection(end, incoming)


def take_turn(
    selector: selectors.BaseSelector, seconds: float, on_wake: Callable[[], None] = lambda: None
) -> None:
    """Wait until something is ready, so long at most, and call the functions of all that is.

    Args:
        selector: the data of each key is a function to call when it is ready.
        seconds: the longest wait.
        on_wake: called after the wait, before these functions.
    """
    keys = [key for key, _ in selector.select(seconds)]
    on_wake()
    for key in keys:
        current = selector.get_map().get(key.fd)
        if (
            current is not None and current.fileobj is key.fileobj
        ):  # it may have been closed by an earlier one
            key.data()


def watch_unsent(selector: selectors.BaseSelector, connection: Connection[Any, Any]) -> None:
    """Let the selector tell when a connection takes more, as long as something is kept that could
    not be sent yet.
    """
    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
    with suppress(KeyError, ValueError):
        key = selector.get_key(connection.socket)
        if key.events != events:
            selector.modify(connection.socket, events, key.data)
