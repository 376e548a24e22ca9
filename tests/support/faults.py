"""Ranks that fail on purpose, and how the others take it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lockstep.transports.runtime import backoff

__all__ = ["SOON_S", "Ended", "attempt", "attempt_to_start", "interrupted_nap", "kill"]

# A dead rank is found at the next look, every 50 ms; this is for hosts that are very busy. The
# groups' own time limit is 60 s.
SOON_S = 10.0


@dataclass
class Ended:
    """How an operation has ended on one rank.

    Attributes:
        kind: the class name of its error; "" when it has ended well.
        text: what the error says.
        names: the ranks that it names; -1 when its class names none.
        seconds: how long it took.
    """

    kind: str
    text: str
    names: tuple[int, ...]
    seconds: float


def attempt(operation: Callable[[], object]) -> Ended:
    """Call `operation`, whatever comes of it."""
    begin = time.monotonic()
    try:
        operation()
    except (Exception, KeyboardInterrupt) as error:
        names = getattr(error, "ranks", (getattr(error, "rank", -1),))
        return Ended(type(error).__name__, str(error), names, time.monotonic() - begin)
    return Ended("", "", (), time.monotonic() - begin)


def attempt_to_start(**options: Any) -> Ended:
    """Call ``init_process_group("shm", ...)``, whatever comes of it; this process can then make
    other groups.
    """
    ended = attempt(lambda: dist.init_process_group("shm", **options))
    if ended.kind:
        # torch has counted the attempt, on this rank, and would look for the others under another
        # name next time
        dist.distributed_c10d._world.group_count = 0
    return ended


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def interrupted_nap() -> Iterator[None]:
    """Ctrl-C at the first nap of a wait."""

    def nap(seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)

    real, backoff.time = backoff.time, SimpleNamespace(monotonic=time.monotonic, sleep=nap)  # type: ignore[assignment]
    try:
        yield
    finally:
        backoff.time = real
