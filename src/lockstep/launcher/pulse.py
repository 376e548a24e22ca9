"""The pulse of a launcher: a sign that its loop runs, by which its workers and the other hosts know
that it answers.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from typing_extensions import Self

from .. import environment
from ..watchdog.diagnosis import ObservationClock

_BEAT_S = 0.5
_TURN_S = (
    5.0  # in which the loop must have turned: it may wait for a disk, or for many processes to end
)
_DEFAULT_LIMIT_S = 120.0

_LATE_S = 1.0  # after which a beat is so late that this process may have been stopped

ELASTIC_LIMIT_S = 10.0
"""Seconds after which an elastic job goes on without a host whose launcher does not answer; it may
join again.
"""


@dataclass(frozen=True)
class Patience:
    """How long a launcher that does not answer is waited for.

    Attributes:
        warning_s: seconds after which that is said.
        limit_s: seconds after which its host is out; infinite for a job on one host, whose launcher
            may be stopped for the night (Ctrl-Z), unless a limit is set.
    """

    warning_s: float
    limit_s: float

    @staticmethod
    def of(several_hosts: bool, default_s: float = _DEFAULT_LIMIT_S) -> Patience:
        """Return what LOCKSTEP_LAUNCHER_TIMEOUT and LOCKSTEP_HEARTBEAT_TIMEOUT say.

        Args:
            several_hosts: whether the job is on several.
            default_s: the limit there.
        """
        limit_s = environment.launcher_timeout() or (default_s if several_hosts else math.inf)
        return Patience(min(environment.heartbeat_timeout(), limit_s / 2), limit_s)


class Pulse:
    """A launcher's sign of life, in a thread: it beats as long as the loop turns, or waits for a
    reader of its output.

    Args:
        on_beat: called in the thread at each beat: tells the workers, or other launchers.
        is_blocked: returns whether this process waits for whoever reads its output, which is no
            fault of its own.
    """

    def __init__(
        self, on_beat: Callable[[], None], is_blocked: Callable[[], bool] = lambda: False
    ) -> None:
        self._on_beat = on_beat
        self._is_blocked = is_blocked
        self._turned = self._beaten = time.monotonic()
        self._longest = 0.0
        self._late_at = -math.inf  # when a beat was so the last time
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep pulse", daemon=True)

    def __enter__(self) -> Self:
        self.turn()
        self._beaten = self._turned
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(_BEAT_S)

    def turn(self) -> None:
        """Note that the loop turns; it does so again within a few seconds."""
        self._turned = time.monotonic()

    @property
    def longest_lapse_s(self) -> float:
        """The longest time between two beats, that since the last one included."""
        return max(self._longest, time.monotonic() - self._beaten)

    def take_lapse_s(self) -> float:
        """Return the longest time between two beats since the last call."""
        lapse = self.longest_lapse_s
        self._longest = 0.0
        self._beaten = time.monotonic()
        return lapse

    def beats(self) -> bool:
        """Return whether the loop turns; if this process may have been stopped, since it goes
        on.

        The loop of a launcher may have to find out first whether the others are without it.
        """
        turns = self._turned >= self._late_at and time.monotonic() - self._turned < _TURN_S
        return turns or self._is_blocked()

    def _run(self) -> None:
        woke = time.monotonic()
        while not self._stopping.wait(_BEAT_S):
            before = woke
            woke = time.monotonic()
            if woke - before >= _LATE_S:
                self._late_at = woke
            if self.beats():
                now = time.monotonic()
                self._longest = max(self._longest, now - self._beaten)
                self._beaten = now
                self._on_beat()


class SilenceWatch:
    """Notices when a value does not change any more: a pulse that was seen. Call `check` about once
    a second.

    Only time in which this process has run counts.

    Args:
        patience: the limits.
    """

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._clock = ObservationClock()
        self._said: dict[Hashable, Hashable] = {}

    def tick(self) -> None:
        """Begin another look at all values."""
        self._clock.tick()

    def is_over(self, name: Hashable, pulse: Hashable) -> bool:
        """Return whether the pulse `name` has been the same for the whole limit."""
        return self._clock.observed_s((name, pulse)) >= self.patience.limit_s

    def is_due(self, name: Hashable, pulse: Hashable) -> bool:
        """Return whether it is to be said that it has been the same for long; once for each
        silence.
        """
        if (
            self._clock.observed_s((name, pulse)) < self.patience.warning_s
            or self._said.get(name) == pulse
        ):
            return False
        self._said[name] = pulse
        return True


def write_to_launcher(pid: int, text: str) -> None:
    """Write a line to the standard error of a launcher that does not read what its workers write;
    never waits.
    """
    for path in (f"/proc/{pid}/fd/2", "/proc/self/fd/2"):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_NOCTTY)
        except OSError:  # a socket, or not Linux
            continue
        try:
            os.write(descriptor, f"{text}\n".encode())
            return
        except OSError:  # it is full
            continue
        finally:
            os.close(descriptor)
