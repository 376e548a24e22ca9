"""Tolerance of write errors: a run continues if a log or a plot cannot be written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)


class WriteGuard:
    """Turns write errors of one callback, such as a full disk, into a single warning."""

    def __init__(self) -> None:
        self._failed = False

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Return a context manager for writing to `path` that logs the first OSError as a
        warning.
        """
        try:
            yield
        except OSError as error:
            if not self._failed:
                reason = error.strerror or error
                _log.warning(
                    "%s cannot be written: %s. The training continues without it.", path, reason
                )
            self._failed = True
