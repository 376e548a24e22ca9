"""How long others have been late or stopped, by a clock that stands still while this process itself does not run."""

from __future__ import annotations

import time
from collections.abc import Hashable

__all__ = ["Patience"]

_MOST_S = 0.5  # what counts of the time between two looks


class Patience:
    """Durations as seen in looks that come one soon after the other.

    A whole job may be stopped for an hour and go on, or get no turn on a machine that is overloaded: what passes
    between two looks of this process says nothing of the others.
    """

    def __init__(self) -> None:
        self._last, self._now, self._looks = time.monotonic(), 0.0, 0
        self._seen: dict[Hashable, tuple[float, int]] = {}  # since when, and in which look it was seen last

    def look(self) -> float:
        """Begin another look; the seconds since the one before, by everybody's clock."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._now += min(passed, _MOST_S)
        self._looks += 1
        for what in [what for what, (_, last) in self._seen.items() if last < self._looks - 1]:
            del self._seen[what]
        return passed

    def seconds(self, what: Hashable) -> float:
        """For how long `what` has been seen in every look, this one included."""
        since, _ = self._seen.get(what, (self._now, 0))
        self._seen[what] = since, self._looks
        return self._now - since
