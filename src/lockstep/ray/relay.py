"""Output of workers on its way through Ray: kept in an actor on each node, and shown by the driver
with the ranks.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from .. import environment
from ..activity import in_notebook
from ..environment.variable_table import DISPLAY
from ..launcher.options import JobOptions
from ..launcher.output.log_multiplexer import LogMultiplexer, NotebookOutput
from ..launcher.output.output_lines import OutputLine
from ..launcher.remote_hosts.remote_command import remote_environment

Item = tuple[int, int, OutputLine] | str
"""A line of a rank, with 0 for standard output or 1 for standard error; or a message of the
launcher there.
"""

_MOST_KEPT = 1 << 16  # items; the oldest are dropped if the driver does not take them


class RelayedLog(LogMultiplexer):
    """Keeps what is written until the driver asks for it."""

    def __init__(self) -> None:
        super().__init__((1, 2), colours=False)
        self._items: deque[Item] = deque(maxlen=_MOST_KEPT)
        self._changed = threading.Condition()
        self._is_closed = False

    def write(self, rank: int, stream: int, line: OutputLine) -> None:
        """Keep a line of a rank; of a progress bar that is not complete only the last state."""
        with self._changed:
            last = self._items[-1] if self._items else ""
            if (
                not isinstance(last, str)
                and last[:2] == (rank, stream)
                and last[2].is_bar
                and not last[2].is_complete
            ):
                self._items.pop()
            self._items.append((rank, stream, line))
            self._changed.notify_all()

    def write_message(self, text: str) -> None:
        """Keep a message of the launcher."""
        with self._changed:
            self._items.append(text)
            self._changed.notify_all()

    def close(self) -> None:
        """Let `take` wait no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, seconds: float) -> list[Item]:
        """Return what there is; waits for so long until there is something."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, seconds)
            taken = list(self._items)
            self._items.clear()
            return taken


class Screen:
    """Shows what the actors have kept: in a notebook's cell, or on this process's standard
    streams.
    """

    def __init__(self) -> None:
        self._notebook = NotebookOutput() if in_notebook() else None
        self._log = LogMultiplexer((1, 2), colours=environment.wants_colours())

    def show(self, items: Iterable[Item]) -> None:
        """Show lines and messages."""
        for item in items:
            if isinstance(item, str):
                self._log.write_message(item)
            elif self._notebook is not None:
                self._notebook.write(*item)
            else:
                self._log.write(*item)

    def close(self) -> None:
        """End the line of the progress bar."""
        self._log.close()


def forwarded_variables(threads: int) -> dict[str, str]:
    """Return the variables of this process that the actors get: those that `lockstep run -H` sends
    to other hosts.
    """
    variables: dict[str, Any] = remote_environment(
        JobOptions(("function",)), environment.variables()
    )
    variables["OMP_NUM_THREADS"] = str(threads)
    if in_notebook():
        variables[DISPLAY.name] = "notebook"
    elif os.isatty(1):
        variables[DISPLAY.name] = str(shutil.get_terminal_size().columns)
    return variables
