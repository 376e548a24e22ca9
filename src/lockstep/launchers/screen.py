"""Where the ranks' lines come together: the launcher's own standard output and standard error."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from .lines import Piece

__all__ = ["Screen"]

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # of the terminal: cyan, yellow, magenta, green, blue, and lighter
_CLEAR = b"\r\x1b[K"


class Screen:
    """Writes lines with their rank in front.

    A progress bar is shown once, for the rank that first draws one, and below all lines; where there is no terminal to
    draw on, as it looks at its end.

    Args:
        descriptors: of standard output and standard error.
        colours: whether ranks have colours.
        prefixes: whether lines are marked with their rank.
        live: whether to draw as on a terminal where there is none; who reads it may have one.
    """

    def __init__(self, descriptors: Sequence[int], colours: bool, prefixes: bool = True, live: bool = False) -> None:
        self._descriptors = descriptors
        self._colours, self._prefixes, self._live = colours, prefixes, live
        self._lock = threading.Lock()
        self._bar_rank: int | None = None
        self._bar, self._bar_to = b"", descriptors[-1]
        self.is_broken = False

    def show(self, rank: int, stream: int, piece: Piece) -> None:
        """Show a `piece` that `rank` wrote to its standard output (`stream` 0) or standard error (1)."""
        with self._lock:
            to = self._descriptors[stream]
            if piece.is_bar:
                self._show_bar(rank, to, piece)
            else:
                self._write(to, self._without_bar(to) + self._marked(rank, to, piece.text) + b"\n")
                self._write(self._bar_to, self._bar)

    def tell(self, text: str) -> None:
        """Show the launcher's own words on standard error."""
        with self._lock:
            to = self._descriptors[-1]
            self._write(to, self._without_bar(to) + text.encode() + b"\n")
            self._write(self._bar_to, self._bar)

    def close(self) -> None:
        """End what is drawn."""
        with self._lock:
            if self._bar:
                self._write(self._bar_to, b"\n")
            self._bar = b""

    def _show_bar(self, rank: int, to: int, piece: Piece) -> None:
        if self._bar_rank is None:
            self._bar_rank = rank
        if rank != self._bar_rank:
            return
        terminal = self._draws(to)
        line = self._marked(rank, to, piece.text)
        if piece.ended:
            self._write(to, (_CLEAR if terminal else b"") + line + b"\n")
            self._bar = b""
        elif terminal:
            self._bar, self._bar_to = line, to
            self._write(to, _CLEAR + line)

    def _draws(self, to: int) -> bool:
        return self._live or os.isatty(to)

    def _without_bar(self, to: int) -> bytes:
        return _CLEAR if self._bar and self._draws(to) else b""

    def _marked(self, rank: int, to: int, text: bytes) -> bytes:
        if not self._prefixes:
            return text
        if self._colours and self._draws(to):
            return b"\x1b[%dm[%d]\x1b[0m %s" % (_COLOURS[rank % len(_COLOURS)], rank, text)
        return b"[%d] %s" % (rank, text)

    def _write(self, to: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(to, data) :]
        except BlockingIOError:  # somebody has made the terminal non-blocking
            with suppress(OSError):
                os.set_blocking(to, True)
                self._write(to, data)
        except OSError:
            self.is_broken = True
