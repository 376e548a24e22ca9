"""The thread that carries on with operations while their callers compute."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Protocol

__all__ = ["Progress", "progress"]

_SHORTEST_NAP_S = 50e-6
_LONGEST_NAP_S = 1e-3
_GLANCE_S = 2e-3  # how soon it finds what it was not woken for
_DROWSY_S = 0.5  # how long it glances after the last operation, before it sleeps until it is woken


class Advancing(Protocol):
    """Something that can go on by itself."""

    @property
    def pending(self) -> bool:
        """Whether anything is left to do."""

    def advance(self) -> bool:
        """Go on without waiting; whether anything is left to do."""


class Progress:
    """One daemon thread for all groups of the process, started when first needed.

    It never spins: the thread beside it computes, often on the same core, and needs the interpreter.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._active: list[Advancing] = []
        self._thread: threading.Thread | None = None
        self._stopping = self._asleep = False

    def add(self, lane: Advancing, at_once: bool) -> None:
        """Carry on with `lane` until nothing is left in it.

        Args:
            lane: what to carry on with.
            at_once: wake the thread now. It costs the caller some 20 µs, as both want the interpreter; so an
                operation that its caller most often waits for right away is better found a little later.
        """
        with self._wake:
            if lane not in self._active:
                self._active.append(lane)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-shm", daemon=True)
                self._thread.start()
            if at_once or self._asleep:
                self._wake.notify()

    def stop(self) -> None:
        """End the thread; called before the interpreter goes, which it must not outlive."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=1.0)
        self._stopping = False

    def _run(self) -> None:
        nap = _SHORTEST_NAP_S
        while True:
            with self._wake:
                if not self._active:
                    self._rest()
                    nap = _SHORTEST_NAP_S
                if self._stopping:
                    return
                lanes = list(self._active)
            ended = [lane for lane in lanes if not lane.advance()]
            if ended:
                nap = _SHORTEST_NAP_S
                self._drop(ended)
            else:
                time.sleep(nap)
                nap = min(_LONGEST_NAP_S, nap * 1.1)

    def _rest(self) -> None:
        """Wait for work: with one eye open for a while, then asleep."""
        since = time.monotonic()
        while not self._active and not self._stopping:
            self._asleep = time.monotonic() - since > _DROWSY_S
            self._wake.wait(None if self._asleep else _GLANCE_S)
        self._asleep = False

    def _drop(self, lanes: list[Advancing]) -> None:
        with self._wake:
            # asked again under the lock: an operation may have been queued since
            self._active = [lane for lane in self._active if lane not in lanes or lane.pending]


progress = Progress()
atexit.register(progress.stop)


def _after_fork() -> None:
    """A forked child has the lists but not the thread, and its parent's operations are not its own."""
    progress.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
