"""Lines and progress bars of a rank's output, and the files that keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Self

__all__ = ["LineSplitter", "OutputLine", "RankLogFiles", "WriteLine"]

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
