"""Turns Ctrl-C and SIGTERM into a wish to stop after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ..environment import ask_for_time, under_launcher

__all__ = ["StopSignals"]


class StopSignals:
    """While entered, remembers the first SIGINT or SIGTERM instead of dying from it.

    Alone, the second one acts as it would have without this, for those who cannot wait. Under Lockstep's launcher
    repeats are ignored: whoever signals every process reaches a worker twice, and it is the launcher that loses
    patience and kills.

    A signal that is ignored stays ignored (as in a job under nohup), and one that is handled by something other than
    Python, which Python could not put back, is left to it. Outside the main thread, where Python allows no signal
    handlers, nothing is done. A signal that was remembered, and that no exception tells of at the end, is raised
    again then: the program around the training may have more to do, and shall hear of it as well.
    """

    HANDLED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.HANDLED:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if kind is None and self.received is not None:
            signal.raise_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and not under_launcher():
            self._restore()
            signal.raise_signal(number)
        if self.received is None:
            ask_for_time()
        self.received = self.received or number

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
