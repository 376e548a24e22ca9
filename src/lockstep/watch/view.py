"""What the parts of the watch see of the session that they belong to; see session.py."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from ..errors import TransportError
from ..recorder import Raw, Recorder, Recording
from .captures import Captures
from .finding import Finding
from .health import Health
from .limits import Limits
from .meeting import Met
from .places import Places
from .signs import Signs

__all__ = ["Session"]


class Session(Protocol):
    """See `session.Session`. Members are `member.Member`."""

    rank: int
    folder: Path
    met: Met
    limits: Limits
    recorder: Recorder
    own: Recording
    peers: dict[int, Recording]
    recordings: dict[int, Recording]
    health: Health
    signs: Signs
    places: Places
    lock: threading.RLock
    members: list[Any]
    error: TransportError | None
    delivered: threading.Event
    home: threading.Thread
    inside: set[int]
    uneven: int
    looked: float
    is_ending: bool
    has_failed: bool
    logs: bool
    doorbell: Any
    captures: Captures
    far: Any
    current: Any

    def look(self) -> bool:
        """Take up a report that somebody has made; whether there is one."""

    def fail(self, finding: Finding, raises: bool = False) -> None:
        """Make a report, unless there is one, and take it up."""

    def check(self) -> None:
        """Raise what has gone wrong, if anything has."""

    def explain(self, error: BaseException, ranks: Collection[int] | None = None) -> None:
        """Raise what an error comes from, if that is the end of the others and is known within a moment."""

    def hand_over(self) -> None:
        """Note that the thread of the program gets the error."""

    def say(self, text: str) -> None:
        """Tell whoever looks at the screen."""

    def begin(self, thread: int) -> None:
        """Note that a thread is in a blocking call."""

    def blocking(self, number: int, ranks: Collection[int]) -> Any:
        """Around a wait for the collective of that record."""

    def look_who_is_alone(self) -> None:
        """Note whether a rank, here or elsewhere, does what others are meant to wait for."""

    def since_alone(self, waited_s: float) -> float:
        """So many seconds of a wait as have passed since then: no limit counts the others."""

    def waits_in(self) -> Raw | None:
        """The record of the blocking call that this rank is in."""

    def started(self, raw: Raw) -> Any:
        """The collective or message of that record."""

    def has_told(self, kind: str, own: Raw, theirs: Raw) -> bool:
        """Whether that kind of difference is no error, and somebody knows already of these two lines, or this loop."""

    def compare(self, member: Any, own: Raw, other: Any, theirs: Raw, kind: str, raises: bool) -> None:
        """Two records of one collective differ: one of `judge.KINDS`."""
