"""Where a worker's standard output and standard error go: to the launcher's own, through its hands, or into a file."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from ..environment import find_world
from .lines import Lines, Piece

__all__ = ["FileStreams", "InheritedStreams", "PipedStreams", "Streams", "inherited", "piped"]

_PIECE = 1 << 16


class Streams(Protocol):
    """What the launcher sends to its workers, and each of them enters when it begins."""

    def enter(self, local_rank: int) -> None:
        """Let this process's file descriptors 1 and 2 lead there."""


@dataclass(frozen=True)
class InheritedStreams:
    """The launcher's own. Attributes: connections, by the number of the descriptor."""

    connections: dict[int, Connection]

    def enter(self, local_rank: int) -> None:
        """Let this process's file descriptors 1 and 2 lead there."""
        for descriptor, connection in self.connections.items():
            # the fork server's own are those of the first launch
            os.dup2(connection.fileno(), descriptor)
            connection.close()


@dataclass(frozen=True)
class PipedStreams:
    """Named pipes, which the launcher reads. Attributes: folder, a private one."""

    folder: Path

    def path(self, local_rank: int, stream: int) -> Path:
        """Of the pipe for standard output (`stream` 0) or standard error (1)."""
        return self.folder / f"{'out' if stream == 0 else 'err'}-{local_rank}"

    def enter(self, local_rank: int) -> None:
        """Let this process's file descriptors 1 and 2 lead there."""
        for stream in (0, 1):
            descriptor = os.open(self.path(local_rank, stream), os.O_WRONLY)
            os.dup2(descriptor, stream + 1)
            os.close(descriptor)


@dataclass(frozen=True)
class FileStreams:
    """A file for each rank, which holds both. Attributes: folder, which is there already."""

    folder: Path

    def enter(self, local_rank: int) -> None:
        """Let this process's file descriptors 1 and 2 lead there."""
        path = self.folder / f"rank-{find_world().rank}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)


@contextmanager
def inherited() -> Iterator[InheritedStreams]:
    """Standard output and standard error as they are now, in the form that multiprocessing can pass on."""
    with ExitStack() as stack:
        yield InheritedStreams(
            {number: stack.enter_context(Connection(os.dup(number), readable=False)) for number in (1, 2)}
        )


@contextmanager
def piped(folder: Path, local_ranks: Sequence[int], show: Callable[[int, int, Piece], None]) -> Iterator[PipedStreams]:
    """Pipes that are read beside the body, and to their end after it.

    Args:
        folder: a private one, in which they are made.
        local_ranks: who writes.
        show: called in a thread of its own with each piece: local rank, 0 or 1 for the stream, and the piece.
    """
    streams = PipedStreams(folder)
    reader = _Reader(show)
    with ExitStack() as stack:
        for local_rank in local_ranks:
            for stream in (0, 1):
                path = streams.path(local_rank, stream)
                os.mkfifo(path, 0o600)
                # for reading and writing: a pipe that nobody else writes to at the moment is then no pipe at its end
                descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                stack.callback(os.close, descriptor)
                reader.add(descriptor, local_rank, stream)
        thread = threading.Thread(target=reader.run, name="lockstep output", daemon=True)
        thread.start()
        try:
            yield streams
        finally:
            reader.stop()
            thread.join()


class _Reader:
    """Reads pipes as soon as there is something in them."""

    def __init__(self, show: Callable[[int, int, Piece], None]) -> None:
        self._show = show
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, tuple[int, int, Lines]] = {}
        self._wake_from, self._wake_to = os.pipe()
        self._selector.register(self._wake_from, selectors.EVENT_READ)

    def add(self, descriptor: int, local_rank: int, stream: int) -> None:
        self._lines[descriptor] = (local_rank, stream, Lines())
        self._selector.register(descriptor, selectors.EVENT_READ)

    def run(self) -> None:
        stopping = False
        while not stopping:
            for key, _ in self._selector.select():
                if key.fd == self._wake_from:
                    stopping = True
                else:
                    self._read(key.fd)
        self._finish()

    def stop(self) -> None:
        """Let it read what is there, and end. The writers must have ended."""
        os.write(self._wake_to, b".")

    def _read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return False
        local_rank, stream, lines = self._lines[descriptor]
        for piece in lines.feed(data):
            self._show(local_rank, stream, piece)
        return True

    def _finish(self) -> None:
        for descriptor, (local_rank, stream, lines) in self._lines.items():
            while self._read(descriptor):
                pass
            for piece in lines.end():
                self._show(local_rank, stream, piece)
        self._selector.close()
        os.close(self._wake_from)
        os.close(self._wake_to)
