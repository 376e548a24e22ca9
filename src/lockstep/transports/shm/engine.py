"""Runs operations: at once in the calling thread, or one after another beside it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from ...errors import TransportError
from .progress import progress
from .waiting import CHECK_S, Awaited, Check, Steps, Waiter
from .work import ShmWork, done

__all__ = ["Lane"]

_PATIENCE_S = 0.1


class _Operation:
    """One that has been started.

    Args:
        what: its name, for errors.
        steps: what is left of it.
        work: told when it ends.
        timeout: seconds that it may take from now; None where only a wait for it is limited (a message may be
            expected for as long as one likes).
    """

    def __init__(self, what: str, steps: Steps, work: ShmWork, timeout: float | None) -> None:
        self.what, self.steps, self.work, self._timeout = what, steps, work, timeout
        self._began = time.monotonic()
        self._next_check = self._began + CHECK_S

    def look(self, awaited: Awaited, check: Check) -> None:
        """Now and then, see whether the wait for `awaited` is still worth it."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        check(self.what, awaited(), now - self._began, math.inf if self._timeout is None else self._timeout)


class Lane:
    """Operations of which one goes on only when the one before has ended.

    Whoever has time drives them: the thread that waits for one, and otherwise the process's progress thread.

    Args:
        check: looks during waits whether they are still worth it.
        fail: called with what has broken an operation halfway, after which none behind it can be right; None where
            they are independent of each other.
        crowded: whether waits had better not spin, as there are more ranks than cores.
        linger: waits a moment instead, when somebody begins to wait for an operation.
    """

    def __init__(
        self,
        check: Check,
        fail: Callable[[BaseException], None] | None,
        crowded: bool,
        linger: Callable[[], None] | None = None,
    ) -> None:
        self._check, self._fail, self._crowded = check, fail, crowded or linger is not None
        self._linger = linger
        self._lock = threading.Lock()
        self._owner = 0  # the thread that is in a synchronous operation
        self._queue: deque[_Operation] = deque()
        self._news: deque[Callable[[], None]] = deque()  # what tells those who asked that an operation has ended

    def run(
        self, what: str, begin: Callable[[], Steps | None], limit: Callable[[], float], has_spun: bool = False
    ) -> ShmWork:
        """Carry out an operation here and now, after whatever is queued.

        Args:
            what: its name, for errors.
            begin: starts it, and gives the steps that are left, or None.
            limit: seconds that it may take; asked when it has to wait.
            has_spun: whether it has waited a moment by itself when its steps wait.
        """
        if not self._lock.acquire(blocking=False):
            self._wait_for_lock(what)
        try:
            if not self._queue:
                self._owner = threading.get_ident()
                self._run(what, begin, limit, has_spun)
                return done
        finally:
            self._owner = 0
            self._lock.release()
        work = self.start(what, _begun(begin), limit(), [])
        work.wait()
        return work

    def _wait_for_lock(self, what: str) -> None:
        """Let another thread end its step, or its synchronous operation."""
        if self._owner == threading.get_ident():  # in a signal handler, or a finaliser that the collector runs
            raise TransportError(f"{what} was called while this thread is in a collective of the same group")
        self._lock.acquire()

    def _run(self, what: str, begin: Callable[[], Steps | None], limit: Callable[[], float], has_spun: bool) -> None:
        waiter = None
        try:
            for awaited in begin() or ():
                if waiter is None:
                    waiter = Waiter(what, limit(), self._check, self._crowded or has_spun)
                waiter.pause(awaited)
        except BaseException as error:
            if self._fail is not None:
                self._fail(error)
            raise

    def start(
        self, what: str, steps: Steps, timeout: float | None, result: list[torch.Tensor], wait_s: float = 0.0
    ) -> ShmWork:
        """Queue `steps`; they go as far as they can at once, then on beside the caller.

        Args:
            what: name of the operation, for errors.
            steps: the operation.
            timeout: seconds that it may take from now; None for no limit but a wait's.
            result: what its future gives.
            wait_s: limit of a wait that is given none, in seconds; `timeout` when 0.
        """
        limit = wait_s or timeout or 0.0
        work = ShmWork(result, lambda waiting, seconds: self._drive(what, waiting, seconds or limit))
        if not self._lock.acquire(blocking=False):
            self._wait_for_lock(what)
        try:
            self._queue.append(_Operation(what, steps, work, timeout))
            if len(self._queue) == 1 and self._linger is None:  # who lingers has looked just now
                self._advance()
            under_way = bool(self._queue)
        finally:
            self._lock.release()
            self.tell()
        if under_way:
            progress.add(self, at_once=timeout is not None)  # a collective; most messages are waited for at once
        return work

    def attempt(self, action: Callable[[], bool]) -> bool:
        """Do `action`, which does not wait, if nothing is queued; whether it was done and said that it could."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._queue and action()
        finally:
            self._lock.release()

    @property
    def has_news(self) -> bool:
        """Whether somebody is to be told that an operation has ended."""
        return bool(self._news)

    @property
    def pending(self) -> bool:
        """Whether any operation is left."""
        return bool(self._queue)

    def advance(self) -> bool:
        """Go on as far as possible, but do not tell anybody; whether it got on at all. For the progress thread."""
        moved = False
        if self._lock.acquire(blocking=False):
            try:
                while self._queue and self._advance() is None:
                    moved = True
            finally:
                self._lock.release()
        return moved

    def stop(self, error: BaseException) -> None:
        """End every operation that is under way with `error`."""
        if self._lock.acquire(timeout=_PATIENCE_S):  # a thread in a synchronous call holds it, and ends by itself
            try:
                self._end(error, len(self._queue))
            finally:
                self._lock.release()
                self.tell()

    def _drive(self, what: str, work: ShmWork, timeout: float) -> None:
        waiter = Waiter(what, timeout, self._check, self._crowded)
        awaited: Awaited | None = None
        if self._linger is not None:
            self._linger()
        while not work.is_completed():
            if not self._lock.acquire(timeout=CHECK_S):  # gives the interpreter to the thread that is at work on it
                continue
            try:
                awaited = self._advance()
            finally:
                self._lock.release()
                self.tell()
            if not work.is_completed():
                waiter.pause(awaited)

    def _end(self, error: BaseException, how_many: int) -> None:
        for _ in range(how_many):
            operation = self._queue.popleft()
            operation.steps.close()
            self._note(operation.work.finish(error))

    def tell(self) -> None:
        """Run the callbacks of operations that have ended; without the lock, as they may begin and await others."""
        while self._news:
            try:
                news = self._news.popleft()
            except IndexError:  # another thread was quicker
                return
            news()

    def _note(self, news: Callable[[], None] | None) -> None:
        if news is not None:
            self._news.append(news)

    def _advance(self) -> Awaited | None:
        """One step of the first operation; whom it waits for, or None when it has moved on."""
        if not self._queue:
            return None
        operation = self._queue[0]
        try:
            awaited = next(operation.steps)
            if awaited is not None:
                operation.look(awaited, self._check)
            return awaited
        except StopIteration:
            self._queue.popleft()
            self._note(operation.work.finish())
        except BaseException as error:
            self._end(error, 1 if self._fail is None else len(self._queue))
            if self._fail is not None:
                self._fail(error)
            if not isinstance(error, Exception):  # Ctrl-C is for the program, whoever waits for the operation
                raise
        return None


def _begun(begin: Callable[[], Steps | None]) -> Steps:
    steps = begin()
    if steps is not None:
        yield from steps
