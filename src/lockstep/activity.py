"""Shows on standard error what a command is doing while it has nothing else to show."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, ClassVar

from typing_extensions import Self

from . import environment

__all__ = ["NOTEBOOK_MARK", "Activity", "display_in_notebook", "in_notebook"]

NOTEBOOK_MARK = "\x1b]lockstep;"
"""Begins a line of a worker that is not text: the JSON of what the launcher is to display in a
notebook.
"""

_FIRST_S = 1.5  # what takes no longer is not shown
_LINE_INTERVAL_S = 10.0  # of a log: each time is another line that stays
_REFRESH_INTERVAL_S = 0.5  # of a terminal


class Activity:
    """Shows `text` and for how long it has gone on, from 1.5 s on until the block ends.

    On a terminal that is one line, which disappears at the end; elsewhere one line after 1.5 s, and
    another every 10 s. Of nested blocks the innermost is shown. LOCKSTEP_PROGRESS=off turns it off.

    Args:
        text: such as "lockstep train: loading PyTorch".
        shown: False for a block of which nothing is shown, as with --quiet.
    """

    _blocks: ClassVar[list[Activity]] = []  # the innermost is the last

    def __init__(self, text: str, shown: bool = True) -> None:
        self.text = text
        self._shown = shown and environment.shows_progress() and sys.stderr is not None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._shown:
            self._blocks.append(self)
            self._thread = threading.Thread(target=self._run, name="lockstep activity", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self in self._blocks:
            self._blocks.remove(self)

    def _run(self) -> None:
        began = time.monotonic()
        # While a module is imported, another thread runs late.
        if self._ended.wait(_FIRST_S):
            return
        with suppress(OSError, ValueError):  # standard error is closed
            stream = sys.stderr
            on_terminal = os.isatty(stream.fileno())
            written = False
            while True:
                if self._blocks[-1] is self:
                    line = f"{self.text} ... {time.monotonic() - began:.0f} s"
                    stream.write(f"\r\x1b[K{line}" if on_terminal else f"{line}\n")
                    stream.flush()
                    written = True
                if self._ended.wait(_REFRESH_INTERVAL_S if on_terminal else _LINE_INTERVAL_S):
                    break
            if on_terminal and written:
                stream.write("\r\x1b[K")
                stream.flush()


def display_in_notebook(bundle: dict[str, str]) -> Any:
    """Display texts by MIME type in the cell of a notebook; returns IPython's handle, whose
    `update` replaces them.
    """
    import IPython.display

    display: Any = IPython.display.display
    return display(bundle, raw=True, display_id=True)


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, which shows what `IPython.display`
    displays.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None
