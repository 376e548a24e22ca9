"""How the lines and progress bars of all ranks share one terminal, or the output of a notebook."""

from __future__ import annotations

import contextvars
import errno
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ... import messages
from ...activity import NOTEBOOK_MARK, display_in_notebook
from .output_lines import OutputLine

__all__ = ["LogMultiplexer", "NotebookOutput"]

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
