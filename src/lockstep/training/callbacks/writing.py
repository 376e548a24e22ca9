"""Lets a run go on whose log or picture cannot be written: the training is worth more than they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Writing"]

_log = logging.getLogger(__name__)


class Writing:
    """The writing of one callback. That it fails, for want of space or permission say, is said once."""

    def __init__(self) -> None:
        self._failed = False

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Around what writes to `path`; an OSError in there becomes a warning in the log, the first time."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                reason = error.strerror or error
                _log.warning("%s cannot be written: %s. The training goes on without it.", path, reason)
            self._failed = True
