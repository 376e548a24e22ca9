"""The thread that carries on with operations while their callers compute."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Protocol
from weakref import WeakSet

__all__ = ["Progress", "progress"]

_SHORTEST_NAP_S = 50e-6
_LONGEST_NAP_S = 1e-3
_GLANCE_S = 2e-3  # how soon it finds what it was not woken for
_DROWSY_S = 0.5  # how long it glances after the last operation, before it ends; while there are groups


class Advancing(Protocol):
    """Something that can go on by itself."""

    @property
    def pending(self) -> bool:
        """Whether anything is left to do."""

    @property
    def has_news(self) -> bool:
        """Whether somebody is to be told that something has ended."""

    def tell(self) -> None:
        """Tell them; what they do then may take long."""

    def advance(self) -> bool:
        """Go on without waiting; whether it got on at all."""


class Progress:
    """One daemon thread for all groups of the process, there while it is needed.

    It never spins: the thread beside it computes, often on the same core, and needs the interpreter.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._active: dict[Advancing, None] = {}  # in the order of their coming
        self._groups: WeakSet[object] = WeakSet()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def join(self, group: object) -> None:
        """Expect operations of `group` until it leaves."""
        with self._wake:
            self._groups.add(group)

    def leave(self, group: object) -> None:
        """Expect none of `group` any more; when there is no other, the thread ends."""
        with self._wake:
            self._groups.discard(group)
            if not self._groups:
                self._wake.notify()

    def add(self, lane: Advancing, at_once: bool) -> None:
        """Carry on with `lane` until nothing is left in it.

        Args:
            lane: what to carry on with.
            at_once: wake the thread now. It costs the caller some 20 µs, as both want the interpreter; so an
                operation that its caller most often waits for right away is better found a little later.
        """
        with self._wake:
            self._active[lane] = None
            self._require_thread()
            if at_once:
                self._wake.notify()

    def stop(self) -> None:
        """End the thread; called before the interpreter goes, which it must not outlive."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=1.0)
        self._stopping = thread is not None and thread.is_alive()

    def _run(self) -> None:
        nap = _SHORTEST_NAP_S
        while True:
            with self._wake:
                if self._thread is not threading.current_thread():
                    return  # another took over while this one told somebody
                if not self._active:
                    self._rest()
                    nap = _SHORTEST_NAP_S
                if self._stopping or not self._active:
                    return
                lanes = list(self._active)
            moved = [lane.advance() for lane in lanes]
            self._drop()
            self._tell([lane for lane in lanes if lane.has_news])
            if any(moved):
                nap = _SHORTEST_NAP_S
            else:
                time.sleep(nap)
                nap = min(_LONGEST_NAP_S, nap * 1.1)
            del lanes  # so that a group that is destroyed while the thread rests is gone

    def _rest(self) -> None:
        """Wait for work, looking up now and then.

        Without any for a while, or when there are no groups, the thread ends, until `add` starts it.
        """
        since = time.monotonic()
        while not self._active and not self._stopping:
            if not self._groups or time.monotonic() - since > _DROWSY_S:
                self._thread = None
                return
            self._wake.wait(_GLANCE_S)

    def _require_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-shm", daemon=True)
            self._thread.start()

    def _tell(self, lanes: list[Advancing]) -> None:
        """Tell those who wait for news of `lanes`, and let another thread go on with the rest meanwhile.

        A callback may wait for an operation that is still to be carried out (PowerSGD's does).
        """
        if not lanes:
            return
        with self._wake:
            self._thread = None
            if self._active:
                self._require_thread()
        for lane in lanes:
            lane.tell()
        with self._wake:
            if self._thread is None and not self._stopping:
                self._thread = threading.current_thread()

    def _drop(self) -> None:
        with self._wake:
            self._active = {lane: None for lane in self._active if lane.pending}


progress = Progress()
atexit.register(progress.stop)


def _after_fork() -> None:
    """A forked child has the lists but not the thread, and its parent's operations are not its own."""
    progress.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
