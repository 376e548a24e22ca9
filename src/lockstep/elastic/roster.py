"""The workers of one host in an elastic job: their processes, and the connections to them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from ..system.strangers import Strangers
from .connection import AT_ONCE, MOST_OF_STRANGERS, Connection, from_worker
from .membership import Down, Hello, Up

__all__ = ["SOCKET", "Roster"]

SOCKET = "membership"
"""The name of the launcher's socket in the job's private folder."""


@dataclass
class _Entry:
    process: BaseProcess
    connection: Connection[Up, Down] | None = None


class Roster:
    """The living workers of this host.

    Args:
        folder: a private directory for the socket.
        selector: of the launcher's loop; the data of each key is a function to call when it is ready.
        on_message: called with the number of a worker and each message that it sends.

    Attributes:
        path: of the socket.
        exit_codes: of the workers whose processes have ended, until somebody takes them out; negative for a signal.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector, on_message: Callable[[int, Up], None]) -> None:
        self.path = str(folder / SOCKET)
        self.exit_codes: dict[int, int] = {}
        self._on_message = on_message
        self._workers: dict[int, _Entry] = {}
        self._selector = selector
        self._strangers: Strangers[Connection[Up, Down]] = Strangers(self._close)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def add(self, number: int, process: BaseProcess) -> None:
        """Add a worker that was started."""
        self._workers[number] = _Entry(process)
        self._selector.register(process.sentinel, selectors.EVENT_READ, lambda: self._remove(number))

    def terminate(self, number: int) -> None:
        """Send SIGTERM to a worker, which then leaves after its step."""
        if number in self._workers:
            self._workers[number].process.terminate()

    def kill(self, number: int) -> None:
        """Send SIGKILL to a worker."""
        if number in self._workers:
            self._workers[number].process.kill()

    def join(self, seconds: float) -> None:
        """Wait until all workers have ended, at most so long for each."""
        for entry in self._workers.values():
            entry.process.join(seconds)

    def send(self, number: int, message: Down) -> None:
        """Send a message to a worker; ignored if it is gone or not connected."""
        entry = self._workers.get(number)
        if entry is not None and entry.connection is not None:
            self._send(entry.connection, message)

    def _send(self, connection: Connection[Up, Down], message: Down) -> None:
        with suppress(OSError):  # the worker is gone, which its process tells
            connection.send(message)
            if connection.has_unsent:
                self._listen(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _listen(self, connection: Connection[Up, Down], events: int) -> None:
        with suppress(KeyError, ValueError):
            self._selector.modify(connection.socket, events, self._selector.get_key(connection.socket).data)

    def tick(self) -> None:
        """Close the connections that have not said whose they are."""
        self._strangers.tick()

    def _accept(self) -> None:
        self._strangers.accept(self._listener, self._open)

    def _open(self, end: socket.socket) -> Connection[Up, Down]:
        connection = from_worker(end)
        connection.most, most = MOST_OF_STRANGERS, connection.most
        self._selector.register(end, selectors.EVENT_READ, lambda: self._receive(connection, most))
        return connection

    def _receive(self, connection: Connection[Up, Down], most: int) -> None:
        received, is_open = [], True
        try:
            if connection.has_unsent and connection.flush():
                self._listen(connection, selectors.EVENT_READ)
            for message in connection.receive_available(AT_ONCE):
                if connection in self._strangers and not isinstance(message, Hello):
                    raise OSError("a stranger")
                self._strangers.identified(connection)
                connection.most = most
                received.append(message)
        except (EOFError, OSError, msgspec.DecodeError):
            is_open = False
        if not (all(self._handle(connection, message) for message in received) and is_open):
            self._strangers.identified(connection)
            self._close(connection)

    def _handle(self, connection: Connection[Up, Down], message: Up) -> bool:
        """Handle a message; returns whether it came from a worker."""
        if isinstance(message, Hello):
            entry = self._workers.get(message.worker)
            if entry is None or entry.connection is not None:
                return False
            entry.connection = connection
        number = next((each for each, entry in self._workers.items() if entry.connection is connection), None)
        if number is not None:
            self._on_message(number, message)
        return number is not None

    def _remove(self, number: int) -> None:
        entry = self._workers.pop(number)
        self._selector.unregister(entry.process.sentinel)
        if entry.connection is not None:
            self._receive_rest(number, entry.connection)
            self._close(entry.connection)
        entry.process.join()
        code = entry.process.exitcode
        self.exit_codes[number] = -signal.SIGKILL if code is None else code
        entry.process.close()

    def _receive_rest(self, number: int, connection: Connection[Up, Down]) -> None:
        """Receive what a worker has sent before its end, such as the values that it has published."""
        with suppress(EOFError, OSError, msgspec.DecodeError):
            for message in connection.receive_available():
                self._on_message(number, message)

    def _close(self, connection: Connection[Up, Down]) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    def close(self) -> None:
        """Close the socket and all connections."""
        for entry in self._workers.values():
            with suppress(KeyError, ValueError):
                self._selector.unregister(entry.process.sentinel)
            if entry.connection is not None:
                self._close(entry.connection)
        self._strangers.close()
        self._selector.unregister(self._listener)
        self._listener.close()
        with suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108
