"""Log multiplexing: where the output of ranks goes, and how their lines and progress bars share one
terminal.

`OutputTarget` is what a worker redirects its standard streams to, `LogMultiplexer` prints the lines
of all ranks with their rank in front, and `RankLogFiles` writes them into one file per rank and
stream.
"""

from __future__ import annotations

import contextvars
import errno
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from typing_extensions import Self

from .. import messages
from ..activity import NOTEBOOK_MARK, display_in_notebook
from ..environment import find_world

__all__ = [
    "FileOutput",
    "InheritedOutput",
    "LineSplitter",
    "LogMultiplexer",
    "NotebookOutput",
    "OutputLine",
    "OutputTarget",
    "PipedOutput",
    "Pipes",
    "RankLogFiles",
    "inherit_output",
    "open_pipes",
    "pipe_output",
]


_MAX_LINE = 1 << 20  # bytes without a line end after which the text is passed on as a complete line


@dataclass(frozen=True)
class OutputLine:
    """A line, or the current state of a progress bar.

    Attributes:
        text: the text without line end.
        is_bar: whether it belongs to a line that is drawn repeatedly with carriage returns, as
            progress bars are.
        is_complete: whether the line is complete; a progress bar that is not will be drawn over.
    """

    text: bytes
    is_bar: bool
    is_complete: bool


WriteLine = Callable[[int, int, OutputLine], None]
"""Takes a line of a rank: the rank, 0 for standard output or 1 for standard error, and the line."""


class LineSplitter:
    """Splits one stream into `OutputLine`."""

    def __init__(self) -> None:
        self._line = b""
        self._is_bar = False
        self._return = b""  # a trailing carriage return: a progress bar's, or half of a line end

    def feed(self, data: bytes) -> Iterator[OutputLine]:
        """Return the lines that `data` completes, and the current state of a progress bar."""
        data = self._return + data
        self._return = b""
        if data.endswith(b"\r"):
            data = data[:-1]
            self._return = b"\r"
        *lines, rest = data.replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            self._draw(line)
            yield self._end()
        self._draw(rest)
        if len(self._line) > _MAX_LINE:
            yield self._end()
        elif self._is_bar and self._line:
            yield OutputLine(self._line, True, False)

    def end(self) -> Iterator[OutputLine]:
        """Return the incomplete line at the end of the stream."""
        if self._line:
            yield self._end()

    def _draw(self, text: bytes) -> None:
        first, *others = text.split(b"\r")
        self._line += first
        for other in others:
            self._is_bar = True
            self._line = other or self._line

    def _end(self) -> OutputLine:
        line = OutputLine(self._line, self._is_bar, True)
        self._line = b""
        self._is_bar = False
        return line


# of the terminal: cyan, yellow, magenta, green, blue, and lighter
_COLOURS = (
    36,
    33,
    35,
    32,
    34,
    96,
    93,
    95,
    92,
    94,
)
_CLEAR = b"\r\x1b[K"
_LOST = (
    b"lockstep: standard output: no space left on its device; the output of the ranks is lost "
    b"from here on. Free some "
    b"space, or write to another place.\n"
)
_BLOCKED_S = 1.0  # after which a write is not merely slow


class LogMultiplexer:
    """Writes the lines of all ranks, with the rank in front, to the launcher's standard output and
    standard error.

    One progress bar is shown, that of the first rank that draws one, below all lines. If the output
    is no terminal, only its final state is written.

    Args:
        descriptors: file descriptors of standard output and standard error.
        colours: whether the ranks are shown in different colours.
        prefixes: whether lines begin with their rank.
        live: whether to draw progress bars even if the output is no terminal; the process that
            reads it may have one.
    """

    def __init__(
        self, descriptors: Sequence[int], colours: bool, prefixes: bool = True, live: bool = False
    ) -> None:
        self._descriptors = descriptors
        self._colours = colours
        self._prefixes = prefixes
        self._live = live
        self._lock = threading.Lock()
        self._bar_rank: int | None = None
        self._bar = b""
        self._bar_to = descriptors[-1]
        self._writes_since = 0.0  # when the write in progress began; 0 if there is none
        self.is_broken = False

    @property
    def is_blocked(self) -> bool:
        """Whether a write waits for whoever reads the output, such as a pager."""
        since = self._writes_since
        return since > 0 and time.monotonic() - since > _BLOCKED_S

    def write(self, rank: int, stream: int, line: OutputLine) -> None:
        """Write a `line` of `rank` from its standard output (`stream` 0) or standard error (1)."""
        with self._lock:
            to = self._descriptors[stream]
            if line.is_bar:
                self._draw_bar(rank, to, line)
            else:
                self._write(
                    to, self._without_bar(to) + self._with_prefix(rank, to, line.text) + b"\n"
                )
                self._write(self._bar_to, self._bar)

    def write_message(self, text: str) -> None:
        """Write a message of the launcher to standard error."""
        with self._lock:
            to = self._descriptors[-1]
            self._write(to, self._without_bar(to) + text.encode() + b"\n")
            self._write(self._bar_to, self._bar)

    def close(self) -> None:
        """End the line of the progress bar."""
        with self._lock:
            if self._bar:
                self._write(self._bar_to, b"\n")
            self._bar = b""

    def _draw_bar(self, rank: int, to: int, line: OutputLine) -> None:
        if self._bar_rank is None:
            self._bar_rank = rank
        if rank != self._bar_rank:
            return
        terminal = self._is_drawn(to)
        text = self._with_prefix(rank, to, line.text)
        if line.is_complete:
            shown = text + b"\n" if line.text.strip() else b""  # blanks remove the bar
            self._write(to, (_CLEAR if terminal else b"") + shown)
            self._bar = b""
        elif terminal:
            self._bar = text
            self._bar_to = to
            self._write(to, _CLEAR + text)

    def _is_drawn(self, to: int) -> bool:
        return self._live or os.isatty(to)

    def _without_bar(self, to: int) -> bytes:
        return _CLEAR if self._bar and self._is_drawn(to) else b""

    def _with_prefix(self, rank: int, to: int, text: bytes) -> bytes:
        if not self._prefixes:
            return text
        if self._colours and self._is_drawn(to):
            return b"\x1b[%dm[%d]\x1b[0m %s" % (_COLOURS[rank % len(_COLOURS)], rank, text)
        return b"[%d] %s" % (rank, text)

    def _write(self, to: int, data: bytes) -> None:
        self._writes_since = time.monotonic()
        try:
            while data:
                data = data[os.write(to, data) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            with suppress(OSError):
                os.set_blocking(to, True)
                self._write(to, data)
        except OSError as error:
            if error.errno == errno.ENOSPC and not self.is_broken and to != self._descriptors[-1]:
                self.is_broken = True
                self._write(self._descriptors[-1], _LOST)
            self.is_broken = True
        finally:
            self._writes_since = 0.0


class NotebookOutput:
    """Shows the lines of all ranks in a notebook's cell, and their progress in one output that
    updates in place.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()  # it knows the cell
        self._handle: Any = None

    def write(self, rank: int, stream: int, line: OutputLine) -> None:
        """Write a line of a rank from its standard output (`stream` 0) or standard error (1)."""
        self._context.run(self._write, stream, line)

    def _write(self, stream: int, line: OutputLine) -> None:
        text = line.text.decode(errors="replace")
        if text.startswith(NOTEBOOK_MARK):
            with suppress(ValueError):  # else it is damaged
                self._show(messages.decode(text.removeprefix(NOTEBOOK_MARK), dict[str, str]))
        elif line.is_bar:
            self._show({"text/plain": text})
        else:
            print(text, file=(sys.stdout, sys.stderr)[stream], flush=True)

    def _show(self, bundle: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = display_in_notebook(bundle)
        else:
            self._handle.update(bundle, raw=True)


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
            before = next(each for each, (*own, _) in self._lines.items() if own == stream)
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


class RankLogFiles:
    """Writes the lines of each rank to DIR/rank.N/stdout and DIR/rank.N/stderr, and passes them on.

    Args:
        folder: created if it does not exist.
        write: called after that with the rank, 0 or 1 for the stream, and the line.
    """

    def __init__(self, folder: Path, write: WriteLine) -> None:
        self._folder = folder
        self._write_line = write
        self._files: dict[tuple[int, int], BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, rank: int, stream: int, line: OutputLine) -> None:
        """Write a line of a rank; of a progress bar only its final state is kept."""
        if line.is_complete:
            file = self._file(rank, stream)
            file.write(line.text + b"\n")
            file.flush()
        self._write_line(rank, stream, line)

    def _file(self, rank: int, stream: int) -> BinaryIO:
        if (rank, stream) not in self._files:
            path = self._folder / f"rank.{rank}"
            path.mkdir(exist_ok=True)
            # both, even if the rank never writes to one of them
            for number, name in enumerate(("stdout", "stderr")):
                self._files[rank, number] = self._stack.enter_context((path / name).open("wb"))
        return self._files[rank, stream]
