"""What a rank writes, taken apart into lines, and into the progress bars that are drawn over and over (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Lines", "Piece"]

_LONGEST = 1 << 20  # bytes without an end of line after which they are passed on as if there were one


@dataclass(frozen=True)
class Piece:
    """Something to show.

    Attributes:
        text: without an end of line.
        is_bar: whether it belongs to a line that is drawn anew, as progress bars are.
        ended: whether the line is complete; a bar that is not will be drawn over.
    """

    text: bytes
    is_bar: bool
    ended: bool


class Lines:
    """Takes one stream apart as it comes."""

    def __init__(self) -> None:
        self._line, self._is_bar = b"", False
        self._return = b""  # a carriage return that came last: a bar's, or half of an end of line

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The lines that `data` completes, and a bar as it looks now."""
        data, self._return = self._return + data, b""
        if data.endswith(b"\r"):
            data, self._return = data[:-1], b"\r"
        *lines, rest = data.replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            self._draw(line)
            yield self._end()
        self._draw(rest)
        if len(self._line) > _LONGEST:
            yield self._end()
        elif self._is_bar and self._line:
            yield Piece(self._line, True, False)

    def end(self) -> Iterator[Piece]:
        """What is left when the stream ends."""
        if self._line:
            yield self._end()

    def _draw(self, text: bytes) -> None:
        first, *others = text.split(b"\r")
        self._line += first
        for other in others:
            self._is_bar = True
            self._line = other or self._line

    def _end(self) -> Piece:
        piece = Piece(self._line, self._is_bar, True)
        self._line, self._is_bar = b"", False
        return piece
