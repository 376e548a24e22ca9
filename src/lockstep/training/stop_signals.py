"""Signals that end a training: they are recorded, and end it after the step in progress."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ..environment import under_launcher
from ..interruption import Requests, leave_closed_terminal
from ..job.client import ask_for_time


class StopSignals:
    """A context manager that records the first SIGINT, SIGTERM or SIGHUP instead of letting it end
    the process.

    Without a launcher, a second signal has its usual effect, except one that is repeated at once
    (`Requests`). Under Lockstep's launcher repeated signals are ignored: a signal to every process
    of the job reaches a worker twice, and the launcher kills workers that do not stop.

    A signal that is ignored stays ignored (as in a job under nohup), and a handler that was not
    installed from Python, which Python could not restore, is kept. Outside the main thread, where
    Python allows no signal handlers, this does nothing. If the block ends without an exception, a
    recorded signal is raised again at its end, for the program around the training.
    """

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None
        self._requests = Requests()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.HANDLED:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        if self._before:
            # now: Python calls a handler when C code returns, which may take a whole step
            ask_for_time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if kind is None and self.received is not None:
            signal.raise_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        is_new = self._requests.is_new(number)
        # A second Ctrl-C ends the program at once. Under the launcher a signal to every process of
        # the job reaches a worker twice, and the launcher kills workers that do not stop.
        if self.received is not None and is_new and not under_launcher():
            self._restore()
            signal.raise_signal(number)
        self.received = self.received or number

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
