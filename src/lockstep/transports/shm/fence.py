"""Order between writing data and announcing it, and between seeing the announcement and reading the data."""

from __future__ import annotations

import platform
import threading

__all__ = ["fence"]

# Data is written, then a counter; a reader sees the counter, then reads the data. Neither pair may be swapped.
#
# x86-64 never makes two stores of a core visible in another order, nor does it let a load overtake an earlier load
# (Intel SDM vol. 3, 9.2.2; AMD64 APM vol. 2, 7.2), and no compiler sees both sides, since each is a call of its own
# into torch or the interpreter: nothing has to be done.
#
# ARM, POWER and RISC-V may do both. Taking a lock is an acquire and giving it back a release: what comes after the
# first stays after it, what comes before the second stays before it. One lock is not enough, because earlier and later
# accesses may both move inside it and there pass each other; a release followed by an acquire may not be swapped
# (C++20 31.4, ARMv8 RCsc: LDAR never passes an earlier STLR), so of two cycles the first holds back what came before
# and the second what comes after. A counter is one aligned 64-bit word, which all of them write in one piece.

_lock = threading.Lock()


def _full_fence() -> None:
    with _lock:
        pass
    with _lock:
        pass


def _nothing() -> None:
    return


fence = _nothing if platform.machine().lower() in ("x86_64", "amd64", "i686", "i386") else _full_fence
