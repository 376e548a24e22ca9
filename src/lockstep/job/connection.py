"""Connections between the processes of a job: messages, each after its length; an empty one is a
ping.

They travel over sockets, or over the pipes of an ssh session (`Pipes`).
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

In = TypeVar("In")
Out = TypeVar("Out")
_Socket = socket.socket

_LENGTH = struct.Struct("!I")
_PING = _LENGTH.pack(0)
_MOST = 1 << 30  # bytes of a message; the largest are values that rank 0 has sent to all
_MOST_OF_STRANGERS = 1 << 16  # bytes of a message with which the other side identifies itself

AT_ONCE = 1 << 20
"""The bytes that are read of one connection before the others have their turn."""

START = b"\x1elockstep: messages follow\n"
"""The line after which the standard output of a launcher that was started over ssh holds messages.

Before it, a login shell may write. The launcher also writes it to its standard error, for the same
reason.
"""


class Pipes:
    """Two descriptors, to read from and to write to, as the end of a `Connection` on which nothing
    waits in vain.

    Args:
        source: the descriptor that is read.
        target: the one that is written.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target

    def fileno(self) -> int:
        """Return the descriptor that is read."""
        return self._source

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Wait for data, and return at most `size` bytes; b"" at the end."""
        if flags:
            raise ValueError(f"expected no flags for pipes, got {flags}")
        return os.read(self._source, size)

    def send(self, data: bytes | bytearray) -> int:
        """Write some of the data, and return how many bytes."""
        return os.write(self._target, data)

    def settimeout(self, seconds: float) -> None:
        """Refuse a time limit, which pipes have none of."""
        raise ValueError(f"expected no time limit for pipes, got {seconds:g} s")

    def close(self) -> None:
        """Close both."""
        os.close(self._source)
        os.close(self._target)


class Connection(Generic[In, Out]):
    """One end of a connection. A thread of its own may send while another one receives.

    Args:
        end: the socket, non-blocking where `send` must not wait; or the pipes.
        incoming: the type of the messages that are received.

    Attributes:
        most: the largest message that is received, in bytes.
        pings: how many have come.
        is_strange: whether the other side has not shown who it is: of it no pings are taken, and no
            long messages.
    """

    def __init__(self, end: socket.socket | Pipes, incoming: object) -> None:
        self._end = end
        self.most = _MOST
        self.pings = 0
        self.is_strange = False
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def socket(self) -> _Socket:
        """The socket; a connection over pipes has none."""
        if isinstance(self._end, Pipes):
            raise TypeError("expected a connection over a socket, got one over pipes")
        return self._end

    def fileno(self) -> int:
        """Return the descriptor from which messages are received."""
        return self._end.fileno()

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
            # who does not read what it was sent does not learn anything from more
            if not self._unsent:
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
                del self._unsent[: self._end.send(self._unsent)]

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
                self._end.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._end.recv(1 << 16)
            if not data:
                return None
            self._received += data
        return message

    def skip_to_start(self) -> Iterator[bytes]:
        """Yield what comes before the line `START`, or before the end of the connection; waits for
        it.
        """
        while START not in self._received:
            data = b""
            with suppress(ConnectionError):  # the other side has ended, and has not read all
                data = self._end.recv(1 << 16)
            if not data:
                yield bytes(self._received)
                self._received.clear()
                return
            self._received += data
            before = len(self._received) - len(START)  # of which no byte can belong to the line
            if before > 0 and START not in self._received:
                yield bytes(self._received[:before])
                del self._received[:before]
        before = self._received.index(START)
        yield bytes(self._received[:before])
        del self._received[: before + len(START)]

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
                data = self._end.recv(1 << 16, socket.MSG_DONTWAIT)
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
            return not self._end.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
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
        """Close the socket, or the pipes."""
        self._end.close()


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


def connect_over_standard_streams(incoming: object) -> Connection[Any, Any]:
    """Return the connection to whoever has started this process over ssh: its standard input and
    output.

    From here on both streams are others, which this process and those that it starts may use:
    standard input is empty, and what is written to standard output goes to standard error.

    Args:
        incoming: the type of the messages that come from there.
    """
    pipes = Pipes(os.dup(0), os.dup(1))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for descriptor in (1, 2):
        os.write(descriptor, START)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return Connection(pipes, incoming)


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
        # it may have been closed by an earlier one
        if current is not None and current.fileobj is key.fileobj:
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
