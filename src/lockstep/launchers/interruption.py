"""Signals that ask a run to end, collected while it lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["collected_signals"]


@contextmanager
def collected_signals(received: list[int]) -> Iterator[None]:
    """Within the body, SIGINT and SIGTERM are appended to `received`; afterwards the old handlers are back.

    Ignored signals stay ignored. Outside the main thread, where Python handles no signals, the list stays empty.
    """

    def collect(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    before[number] = signal.signal(number, collect)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
