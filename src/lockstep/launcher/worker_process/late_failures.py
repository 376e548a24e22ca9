"""Reports of programs that have failed, and whose threads or `atexit` functions then take long to
end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LATE_S = 5.0
"""Seconds that a failed program may take to end before its failure is reported; the usual end takes
milliseconds.
"""

Reporter = Callable[[BaseException], None]

_reporters: list[Reporter] = []  # at most one, that of this worker


def set_reporter(reporter: Reporter) -> None:
    """Let `reporter` be called, in a thread, with the error of a program that takes long to end."""
    _reporters[:] = [reporter]


@contextmanager
def reporting(error: BaseException) -> Iterator[None]:
    """Report `error` if the body, in which the failed program ends, takes longer than `LATE_S`."""
    timers = [threading.Timer(LATE_S, reporter, (error,)) for reporter in _reporters]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
