"""The messages between a worker and the launcher of its host."""

from __future__ import annotations

from typing import Literal

from ..messages import Integer, List, Tagged

__all__ = [
    "Failure",
    "Finished",
    "FromAnyWorker",
    "Hello",
    "Note",
    "Peers",
    "Release",
    "ToAnyWorker",
]


class Hello(Tagged, frozen=True):
    """The first message of a worker: which one it is."""

    worker: Integer


class Failure(Tagged, frozen=True):
    """A worker ends early, because of an exception or a signal.

    Attributes:
        rank: its number on its host; where failures of several hosts are combined, its rank.
        time: nanoseconds since the epoch, when the exception was caught.
        kind: class name of the exception.
        reason: its message.
        traceback: its traceback as text.
        exit_code: the process's exit code.
        dead_peers: the workers of its host that had ended by then, so that this failure probably
            follows from theirs; its launcher fills it in.
        signal_number: the signal on which the worker shut down cleanly; 0 if it failed.
        checkpoint: the checkpoint that it saved before it stopped.
        pickled: the exception, pickled, in Base64, if it is one of Lockstep's; else "".
        in_collective: whether it was raised in communication with other ranks, as happens after one
            of them exits.
        repeats_watchdog: whether it only repeats the watchdog's report on all ranks.
        call_site: where the user's program was, e.g. ``train.py:31 in main``; "" if that is not
            known.
    """

    rank: Integer
    time: Integer
    kind: str
    reason: str
    traceback: str = ""
    exit_code: Integer = 1
    dead_peers: List[Integer] = ()
    signal_number: Integer = 0
    checkpoint: str | None = None
    pickled: str = ""
    in_collective: bool = False
    repeats_watchdog: bool = False
    call_site: str = ""

    @property
    def stopped(self) -> bool:
        """Whether the worker shut down cleanly on a signal."""
        return self.signal_number > 0


class Finished(Tagged, frozen=True):
    """The work of a worker is done, so that the end of its process is no failure."""


class Note(Tagged, frozen=True):
    """What a worker tells its launcher.

    Attributes:
        what: "needs time": to save, after a signal; "checkpoint": it has saved one.
        text: the path of the checkpoint.
    """

    what: Literal["needs time", "checkpoint"]
    text: str = ""


class Peers(Tagged, frozen=True):
    """The processes of all workers of this host, which each of them needs if the launcher is
    killed.
    """

    pids: List[Integer]


class Release(Tagged, frozen=True):
    """A worker that has failed need not wait any longer for the others to report the same error."""


FromAnyWorker = Hello | Failure | Finished | Note
"""From any worker to its launcher."""

ToAnyWorker = Peers | Release
"""From a launcher to any of its workers."""
