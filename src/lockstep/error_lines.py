"""Lines of Lockstep on standard error: each begins a line, also where a program draws a progress
bar.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

__all__ = ["show_warnings", "write_error_line"]

_CLEAR = "\r\x1b[K"  # of a terminal; tqdm draws its bar anew
_BLANK = "\r \n"  # of a pipe or a file; the launcher removes a bar that ends blank


def write_error_line(text: str) -> None:
    """Write a line to standard error, at once; below a bar of tqdm, or in place of it."""
    stream = sys.stderr
    if stream is not None:
        stream.write(f"{_end_of_bar(stream)}{text}\n")
        stream.flush()


def _end_of_bar(stream: Any) -> str:
    """Return what ends the line of a bar that tqdm has drawn; "" if there is none."""
    if not _has_bar():
        return ""
    return _CLEAR if stream.isatty() else _BLANK


def _has_bar() -> bool:
    # without importing tqdm: a program that has a bar has done that
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    with suppress(RuntimeError):  # another thread has begun or ended a bar meanwhile
        return any(not getattr(bar, "disable", True) for bar in list(bars))
    return True


class _WarningLines(logging.Handler):
    """Writes warnings where the program has set up no logging, as `logging.lastResort` does."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is None or self._has_others(logging.getLogger(record.name)):
            return
        try:
            write_error_line(self.format(record))
        except Exception:  # as every handler does: logging must not end a program
            self.handleError(record)

    def _has_others(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def show_warnings() -> None:
    """Let warnings of Lockstep begin a line, where the program has set up no logging."""
    logger = logging.getLogger("lockstep")
    if not any(isinstance(handler, _WarningLines) for handler in logger.handlers):
        logger.addHandler(_WarningLines(logging.WARNING))
