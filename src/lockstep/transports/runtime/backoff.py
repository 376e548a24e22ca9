"""Operations as steps, and the back-off between them: a wait spins, yields the core, sleeps, and
ends with an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable

__all__ = [
    "CHECK_S",
    "NATIVE_SPINS",
    "SPINS",
    "UNCHECKED",
    "Awaited",
    "Backoff",
    "Check",
    "Steps",
    "chain",
]

# Returns the ranks that an operation waits for; called only when a wait takes long. The result is
# lazy, as a generator is: a check finds out which processes have ended first and iterates
# afterwards, since a rank may arrive and then end.
Awaited = Callable[[], Iterable[int]]

# An operation as a generator. Whenever it cannot proceed it yields: None at the beginning of a
# wait, and then the ranks that it waits for. It is resumed to try again.
Steps = Generator[Awaited | None, None, None]

# Called periodically during a wait, with the operation's name, the awaited ranks, the seconds since
# the operation began and its time limit in seconds; raises when the wait is over or hopeless.
Check = Callable[[str, Iterable[int], float, float], None]

CHECK_S = 0.05  # seconds between two checks for dead ranks and of the clock
# polls before the first system call; some 100 µs, more than a small collective takes in Python
SPINS = 300
# the same for the native extension, some 40 µs; then it begins to yield its core
NATIVE_SPINS = 1500
UNCHECKED = 256  # beginnings of waits between two looks at the clock
_YIELD_S = 200e-6  # then the core is yielded, for this long
_MAX_SLEEP_S = 1e-3  # then it sleeps for a sixteenth of what it has waited, up to this


class Backoff:
    """The back-off of one wait: spin briefly, then yield the core, then sleep for a fraction of the
    time waited.

    Args:
        what: the operation, for the error.
        timeout: seconds after which the wait is an error.
        check: called periodically; raises when the awaited ranks cannot arrive any more.
        oversubscribed: whether there are more ranks than cores; spinning would then only keep the
            awaited ranks from running.
    """

    def __init__(self, operation: str, timeout: float, check: Check, oversubscribed: bool) -> None:
        self._what = operation
        self._timeout = timeout
        self._check = check
        self._spins = self._max_spins = 0 if oversubscribed else SPINS
        self._began = self._next_check = self._waiting_since = 0.0
        self._beginnings = 0
        self._awaited: Awaited | None = None

    def pause(self, awaited: Awaited | None) -> None:
        """Let a moment pass; None restarts the back-off. Raises what `check` raises."""
        if awaited is None:
            self._spins = self._max_spins
            self._waiting_since = 0.0
            # An operation that always seems to make progress must end at its limit, too.
            self._beginnings += 1
            if self._beginnings % UNCHECKED == 0:
                self._check_at(time.monotonic())
            return
        self._awaited = awaited
        if self._spins > 0:
            self._spins -= 1
            return
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        self._check_at(now)
        waited = now - self._waiting_since
        if waited < _YIELD_S:
            os.sched_yield()
        else:
            time.sleep(min(_MAX_SLEEP_S, waited / 16))

    def _check_at(self, now: float) -> None:
        """Check the wait, unless the last check was a moment ago."""
        self._began = self._began or now
        self._next_check = self._next_check or now + CHECK_S
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            ranks = () if self._awaited is None else self._awaited()
            self._check(self._what, ranks, now - self._began, self._timeout)


def chain(parts: Iterable[Steps]) -> Steps:
    """Run several operations as one, one after the other."""
    for part in parts:
        yield from part
