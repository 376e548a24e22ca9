"""How long a wait spins, yields and sleeps, and when it ends with an error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable

__all__ = ["CHECK_S", "COMPILED_LOOKS", "SPINS", "Awaited", "Check", "Steps", "Waiter"]

# Tells which ranks are awaited; asked only when a wait takes long. What it gives looks when it is iterated over, as a
# generator does: a check finds out who has ended, and only then who has not come, since a rank may come and then end.
Awaited = Callable[[], Iterable[int]]

# An operation as steps: whenever it cannot go on it yields, None at the beginning of a wait and then whom it waits
# for, and is resumed to look again.
Steps = Generator[Awaited | None, None, None]

# Called now and then during a wait, with the operation's name, the awaited ranks, the seconds since the operation
# began and the seconds that it may take; raises when the wait is over or hopeless.
Check = Callable[[str, Iterable[int], float, float], None]

CHECK_S = 0.05  # seconds between two looks for dead ranks and at the clock
SPINS = 300  # looks before the first system call; some 100 µs, more than a small collective takes in Python
COMPILED_LOOKS = 1500  # the same for the compiled part, some 40 µs; then it begins to offer its core to others
_YIELD_S = 200e-6  # then the core is offered to others, for this long
_LONGEST_NAP_S = 1e-3


class Waiter:
    """The patience of one wait: spin briefly, then yield the core, then sleep for a small part of the time waited.

    Args:
        what: the operation, for the error.
        timeout: seconds after which the wait is an error.
        check: looks now and then whether the awaited ranks can still come.
        crowded: whether there are more ranks than cores; then spinning would only keep the awaited from running.
    """

    def __init__(self, what: str, timeout: float, check: Check, crowded: bool) -> None:
        self._what, self._timeout, self._check = what, timeout, check
        self._spins = self._most_spins = 0 if crowded else SPINS
        self._began = self._next_check = self._waiting_since = 0.0

    def pause(self, awaited: Awaited | None) -> None:
        """Let a moment pass; None begins to count anew. Raises what `check` does."""
        if awaited is None:
            self._spins, self._waiting_since = self._most_spins, 0.0
            return
        if self._spins > 0:
            self._spins -= 1
            return
        now = time.monotonic()
        if not self._waiting_since:
            self._waiting_since = now
            self._began = self._began or now
            self._next_check = self._next_check or now + CHECK_S
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            self._check(self._what, awaited(), now - self._began, self._timeout)
        waited = now - self._waiting_since
        if waited < _YIELD_S:
            os.sched_yield()
        else:
            time.sleep(min(_LONGEST_NAP_S, waited / 16))
