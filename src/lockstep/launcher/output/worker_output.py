"""Where a worker's standard streams go: those of the launcher, pipes that the launcher reads, or
files.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from ...environment import find_world
from .output_lines import LineSplitter, WriteLine

_READ_BYTES = 1 << 16


class OutputTarget(Protocol):
    """Where a worker's output goes; the launcher sends it to each worker, which calls `redirect` at
    its start.
    """

    def redirect(self, local_rank: int) -> None:
        """Redirect this process's file descriptors 1 and 2 to the target."""


@dataclass(frozen=True)
class InheritedOutput:
    """The launcher's own streams. Attributes: connections, by the number of the descriptor."""

    connections: dict[int, Connection]

    def redirect(self, local_rank: int) -> None:
        """Redirect this process's file descriptors 1 and 2 to the target."""
        for descriptor, connection in self.connections.items():
            # the fork server has the streams of the first launch
            os.dup2(connection.fileno(), descriptor)
            connection.close()


@dataclass(frozen=True)
class PipedOutput:
    """Named pipes that the launcher reads. Attributes: folder, a private directory."""

    folder: Path

    def path(self, local_rank: int, stream: int) -> Path:
        """Return the pipe for standard output (`stream` 0) or standard error (1)."""
        return self.folder / f"{'out' if stream == 0 else 'err'}-{local_rank}"

    def redirect(self, local_rank: int) -> None:
        """Redirect this process's file descriptors 1 and 2 to the target."""
        for stream in (0, 1):
            descriptor = os.open(self.path(local_rank, stream), os.O_WRONLY)
            os.dup2(descriptor, stream + 1)
            os.close(descriptor)


@dataclass(frozen=True)
class FileOutput:
    """One file per rank for both streams. Attributes: folder, an existing directory."""

    folder: Path

    def redirect(self, local_rank: int) -> None:
        """Redirect this process's file descriptors 1 and 2 to the target."""
        path = self.folder / f"rank-{find_world().rank}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)


@contextmanager
def inherit_output() -> Iterator[InheritedOutput]:
    """Return this process's current standard output and standard error, in a form that
    multiprocessing can pass on.
    """
    with ExitStack() as stack:
        yield InheritedOutput(
            {
                number: stack.enter_context(Connection(os.dup(number), readable=False))
                for number in (1, 2)
            }
        )


@contextmanager
def pipe_output(
    folder: Path, local_ranks: Sequence[int], write: WriteLine
) -> Iterator[PipedOutput]:
    """Open pipes that a thread reads during the body, and to their end after it.

    Args:
        folder: a private directory for the pipes.
        local_ranks: the local ranks that write to them.
        write: called in that thread with the local rank, 0 or 1 for the stream, and the line.
    """
    with open_pipes(folder, write) as pipes:
        for local_rank in local_ranks:
            pipes.add(local_rank)
        yield PipedOutput(folder)


@contextmanager
def open_pipes(folder: Path, write: WriteLine) -> Iterator[Pipes]:
    """As `pipe_output`, for workers that are started later."""
    reader = _PipeReader(write)
    thread = threading.Thread(target=reader.run, name="lockstep output", daemon=True)
    thread.start()
    try:
        yield Pipes(PipedOutput(folder), reader)
    finally:
        reader.stop()
        thread.join()
        reader.close()


class Pipes:
    """The pipes of workers that are started and end while others run."""

    def __init__(self, output: PipedOutput, reader: _PipeReader) -> None:
        self._output = output
        self._reader = reader

    def add(self, local_rank: int) -> None:
        """Open the pipes of a worker that is about to be started."""
        for stream in (0, 1):
            path = self._output.path(local_rank, stream)
            os.mkfifo(path, 0o600)
            # opened for writing too: otherwise the pipe is at its end whenever no other process has
            # it open
            self._reader.add(os.open(path, os.O_RDWR | os.O_NONBLOCK), local_rank, stream)

    def release(self, local_rank: int) -> None:
        """Let the pipes of a worker that has ended close when no process that it has left behind
        has them open.
        """
        for stream in (0, 1):
            path = self._output.path(local_rank, stream)
            # this one is open for reading only
            self._reader.replace(os.open(path, os.O_RDONLY | os.O_NONBLOCK), local_rank, stream)
            path.unlink()


class _PipeReader:
    """Reads pipes as soon as they have data."""

    def __init__(self, write: WriteLine) -> None:
        self._write_line = write
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, tuple[int, int, LineSplitter]] = {}
        self._replaced: deque[tuple[int, int, int]] = deque()
        self._wake_from, self._wake_to = os.pipe()
        self._selector.register(self._wake_from, selectors.EVENT_READ)

    def add(self, descriptor: int, local_rank: int, stream: int) -> None:
        self._lines[descriptor] = (local_rank, stream, LineSplitter())
        self._selector.register(descriptor, selectors.EVENT_READ)

    def replace(self, descriptor: int, local_rank: int, stream: int) -> None:
        """Read a stream through another descriptor from now on."""
        self._replaced.append((descriptor, local_rank, stream))
        os.write(self._wake_to, b"+")  # the thread does it, which may be reading the one before

    def run(self) -> None:
        stopping = False
        while not stopping:
            for (
                key,
                _,
            ) in self._selector.select():  # `add` may register more meanwhile, from another thread
                if key.fd == self._wake_from:
                    stopping = b"." in os.read(self._wake_from, _READ_BYTES)
                    self._replace()
                elif key.fd in self._lines:
                    self._read(key.fd)
        self._finish()

    def stop(self) -> None:
        """Read the remaining data and stop. The writers must have ended."""
        os.write(self._wake_to, b".")

    def _replace(self) -> None:
        while self._replaced:
            descriptor, *stream = self._replaced.popleft()
            before = next(
                descriptor_
                for descriptor_, (*its_stream, _) in self._lines.items()
                if its_stream == stream
            )
            self._lines[descriptor] = self._lines.pop(before)
            self._selector.unregister(before)
            os.close(before)
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        local_rank, stream, lines = self._lines[descriptor]
        for line in lines.feed(data) if data else lines.end():
            self._write_line(local_rank, stream, line)
        if not data:
            self._selector.unregister(descriptor)
            del self._lines[descriptor]
            os.close(descriptor)
        return bool(data)

    def _finish(self) -> None:
        for descriptor, (local_rank, stream, lines) in list(self._lines.items()):
            while self._read(descriptor):
                pass
            for line in lines.end() if descriptor in self._lines else ():
                self._write_line(local_rank, stream, line)

    def close(self) -> None:
        """Close all that is open; the thread has ended."""
        self._selector.close()
        for descriptor in (
            *self._lines,
            *(replaced[0] for replaced in self._replaced),
            self._wake_from,
            self._wake_to,
        ):
            os.close(descriptor)
