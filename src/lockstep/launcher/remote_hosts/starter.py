"""The starter, as the launcher of a host sees it: the `lockstep run -H` that has started it over
ssh.

It shows the output and forwards signals, and is no part of the job; `ssh` is its side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from ...errors import LockstepError
from ...job.connection import Connection, connect_over_standard_streams
from ...job.messages import (
    Failure,
    HostDescription,
    JobEnd,
    MeetingPoint,
    Output,
    Request,
    Say,
    ToAgent,
)
from ..output.log_multiplexer import LogMultiplexer
from ..output.output_lines import OutputLine


class Starter:
    """The connection to the starter. Make it before anything reads or writes the standard streams.

    Args:
        prefixes: whether lines begin with their rank, if the starter is lost and they go to a file.

    Attributes:
        log: sends it what workers and this launcher write.
    """

    def __init__(self, prefixes: bool) -> None:
        self._connection: Connection[Any, Any] = connect_over_standard_streams(ToAgent)
        self.log = _StarterLog(self.send, prefixes)

    def send(self, message: object) -> bool:
        """Send a message; returns whether the starter is still there."""
        try:
            self._connection.send(message)
        except OSError:
            return False
        return True

    def meet(
        self, description: HostDescription, listen: Callable[[str], int]
    ) -> MeetingPoint | None:
        """Say that this host is ready, and wait until it is to take part; None if the starter ends
        before.

        Args:
            description: of this host.
            listen: called with an address if the others are to reach this host there; returns the
                port.
        """
        self.send(description)
        while True:
            match self._receive():
                case MeetingPoint(address, 0):
                    try:
                        port = listen(address)
                    except LockstepError as error:
                        self.end(error)
                    self.send(MeetingPoint("", port))
                case MeetingPoint() as meeting_point:
                    return meeting_point
                case None:
                    return None

    def follow(self, take: Callable[[Request], None], lost: Callable[[], None]) -> None:
        """Let a thread call `take` with all that the starter asks, and `lost` when it is gone."""

        def run() -> None:
            while (message := self._receive()) is not None:
                if isinstance(message, Request):
                    take(message)
            lost()

        threading.Thread(target=run, name="lockstep starter", daemon=True).start()

    def end(self, error: BaseException, failure: Failure | None = None) -> NoReturn:
        """Tell the starter the error of this host, which it shows, and end this process with its
        exit code.
        """
        if failure is not None:
            self.send(failure)
        elif str(error):
            self.send(JobEnd(str(error)))
        raise SystemExit(error.exit_code if isinstance(error, LockstepError) else 130) from None

    def _receive(self) -> Any:
        """Return the next message; None after the last."""
        try:
            return self._connection.receive()
        except (OSError, msgspec.DecodeError):
            return None


class _StarterLog(LogMultiplexer):
    """Sends what is written to the starter, which has the terminal; after `keep`, writes to the
    standard streams.

    Args:
        send: sends a message; returns whether the starter is still there.
        prefixes: whether lines begin with their rank in the streams.
    """

    def __init__(self, send: Callable[[object], bool], prefixes: bool) -> None:
        super().__init__((1, 2), colours=False, prefixes=prefixes)
        self._send_message = send
        self._is_kept = False

    def keep(self) -> None:
        """Write to this process's standard streams from now on."""
        self._is_kept = True

    def write(self, rank: int, stream: int, line: OutputLine) -> None:
        """Send a line of `rank` from its standard output (`stream` 0) or standard error (1)."""
        if self._is_kept:
            super().write(rank, stream, line)
            return
        with self._lock:
            if line.is_bar and self._bar_rank is None:
                self._bar_rank = rank  # the only one whose bar is shown
            if not line.is_bar or rank == self._bar_rank:
                self._send(
                    Output(rank, 1 if stream else 0, line.text, line.is_bar, line.is_complete)
                )

    def write_message(self, text: str) -> None:
        """Send a message of this launcher."""
        if self._is_kept:
            super().write_message(text)
            return
        with self._lock:
            self._send(Say(text))

    def _send(self, message: object) -> None:
        if self.is_broken:
            return
        self._writes_since = time.monotonic()  # the starter may wait for whoever reads its output
        self.is_broken = not self._send_message(message)
        self._writes_since = 0.0
