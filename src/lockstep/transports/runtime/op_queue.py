"""Queues of operations: an operation runs at once in the calling thread, or in the background on a
progress thread.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ...errors import TransportError
from . import virtual_host
from .backoff import CHECK_S, UNCHECKED, Awaited, Backoff, Check, Steps
from .work import COMPLETED, CPUWork

# Between two rounds of the progress thread in which nothing proceeded: longer each time, so that it
# takes little time of a core from a long wait and adds little to a short one.
_MIN_SLEEP_S = 50e-6
_MAX_SLEEP_S = 1e-3
_IDLE_POLL_S = 2e-3  # how soon it finds work that it was not woken for
# how long it polls after the last operation before it exits, while there are groups
_IDLE_EXIT_S = 0.5


class Progressable(Protocol):
    """A queue that the progress thread drives."""

    @property
    def pending(self) -> bool:
        """Whether operations are left."""

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks of completed operations are to be run."""

    def run_callbacks(self) -> None:
        """Run them; they may take long."""

    def make_progress(self) -> bool:
        """Proceed without waiting; whether any progress was made."""


class ProgressThread:
    """One daemon thread for all groups of the process, which makes progress while their callers
    compute.

    It never spins: the other threads compute, often on the same core, and need the interpreter. It
    exists while it is needed.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._active: dict[Progressable, None] = {}  # in the order in which they were added
        self._groups: WeakSet[object] = WeakSet()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add_group(self, group: object) -> None:
        """Expect operations of `group` until `remove_group`."""
        with self._wake:
            self._groups.add(group)

    def remove_group(self, group: object) -> None:
        """Expect no more operations of `group`; without any group the thread exits."""
        with self._wake:
            self._groups.discard(group)
            if not self._groups:
                self._wake.notify()

    def add(self, queue: Progressable, wake: bool) -> None:
        """Drive `queue` until it is empty.

        Args:
            queue: to be driven.
            wake: wake the thread now. It costs the caller some 20 µs, as both want the interpreter;
                an operation that its caller most often waits for right away is better found a
                little later.
        """
        with self._wake:
            self._active[queue] = None
            self._require_thread()
            if wake:
                self._wake.notify()

    def stop(self) -> None:
        """End the thread; called before the interpreter exits, which it must not outlive."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
            thread = self._thread
            self._thread = None
        if thread is not None:
            thread.join(timeout=1.0)
        self._stopping = thread is not None and thread.is_alive()

    def _run(self) -> None:
        sleep_s = _MIN_SLEEP_S
        while True:
            with self._wake:
                if self._thread is not threading.current_thread():
                    return  # another thread took over while this one ran callbacks
                if not self._active:
                    self._wait_for_work()
                    sleep_s = _MIN_SLEEP_S
                if self._stopping or not self._active:
                    return
                queues = list(self._active)
            progressed = [queue.make_progress() for queue in queues]
            with self._wake:
                self._active = {queue: None for queue in self._active if queue.pending}
            self._run_callbacks([queue for queue in queues if queue.has_callbacks])
            if any(progressed):
                sleep_s = _MIN_SLEEP_S
            else:
                time.sleep(sleep_s)
                sleep_s = min(_MAX_SLEEP_S, sleep_s * 1.1)
            del queues  # so that a group that is destroyed while the thread is idle is freed

    def _wait_for_work(self) -> None:
        """Wait for work, polling now and then.

        Without any for a while, or without groups, the thread exits, until `add` starts it again.
        """
        since = time.monotonic()
        while not self._active and not self._stopping:
            if not self._groups or time.monotonic() - since > _IDLE_EXIT_S:
                self._thread = None
                return
            self._wake.wait(_IDLE_POLL_S)

    def _require_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-shm", daemon=True)
            self._thread.start()

    def _run_callbacks(self, queues: list[Progressable]) -> None:
        """Run the callbacks of `queues`, and let another thread drive the rest meanwhile.

        A callback may wait for an operation that has not run yet (PowerSGD's does).
        """
        if not queues:
            return
        with self._wake:
            self._thread = None
            if self._active:
                self._require_thread()
        for queue in queues:
            queue.run_callbacks()
        with self._wake:
            if self._thread is None and not self._stopping:
                self._thread = threading.current_thread()


progress_thread = ProgressThread()
atexit.register(progress_thread.stop)


def _after_fork() -> None:
    """Discard all operations in a forked child, which has no such thread: they are its parent's."""
    progress_thread.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)


_LOCK_TIMEOUT_S = 0.1  # whoever aborts a queue must not hang on a thread that hangs in it


class _Operation:
    """One queued operation.

    Args:
        what: its name, for errors.
        steps: what is left of it.
        work: completed when it ends.
        timeout: seconds that it may take from now; None where only a wait for it is limited (a
            message may be expected for as long as one likes).
    """

    def __init__(self, operation: str, steps: Steps, work: CPUWork, timeout: float | None) -> None:
        self.what = operation
        self.steps = steps
        self.work = work
        self._timeout = timeout
        self._began = time.monotonic()
        self._next_check = self._began + CHECK_S
        self._beginnings = 0

    def check_periodically(self, awaited: Awaited | None, check: Check) -> None:
        """Raise, every `CHECK_S`, what `check` raises when waiting for `awaited` is hopeless."""
        if awaited is None:  # it has made progress, or seems to
            self._beginnings += 1
            if self._beginnings % UNCHECKED:
                return
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        check(
            self.what,
            awaited() if awaited else (),
            now - self._began,
            math.inf if self._timeout is None else self._timeout,
        )


class OpQueue:
    """Operations that run strictly one after another.

    They are driven by the thread that waits for one of them, and otherwise by the process's
    progress thread.

    Args:
        check: called periodically during waits; raises when they are hopeless.
        fail: called with the error that ended an operation halfway, after which none behind it can
            be right; None where operations are independent of each other.
        oversubscribed: whether waits should not spin, as there are more ranks than cores.
        spin: spins a moment instead, when a thread begins to wait for an operation.
    """

    def __init__(
        self,
        check: Check,
        fail: Callable[[BaseException], None] | None,
        oversubscribed: bool,
        spin: Callable[[], None] | None = None,
    ) -> None:
        self._check = check
        self._fail = fail
        self._oversubscribed = oversubscribed or spin is not None
        self._spin = spin
        self._lock = threading.Lock()
        self._owner = 0  # the thread that is in a synchronous operation
        self._operations: deque[_Operation] = deque()
        self._callbacks: deque[Callable[[], None]] = deque()  # of completed operations

    def run(
        self,
        operation: str,
        begin: Callable[..., Steps | None],
        arguments: tuple[Any, ...],
        get_timeout: Callable[[], float],
        has_spun: bool = False,
    ) -> CPUWork:
        """Run an operation synchronously, after those that are queued.

        A small collective takes less time than a few calls of Python: nothing is made here that is
        not needed.

        Args:
            operation: its name, for errors.
            begin: starts it, and returns the steps that are left, or None.
            arguments: of `begin`.
            get_timeout: seconds that it may take; called when it has to wait.
            has_spun: whether it has spun already when its steps wait.
        """
        if not self._lock.acquire(False):
            self._wait_for_lock(operation)
        try:
            if not self._operations:
                self._owner = threading.get_ident()
                try:
                    rest = begin(*arguments)
                    if rest is not None:
                        has_spun = self._oversubscribed or has_spun
                        backoff = Backoff(operation, get_timeout(), self._check, has_spun)
                        for awaited in rest:
                            backoff.pause(awaited)
                except BaseException as error:
                    if self._fail is not None:
                        self._fail(error)
                    raise
                return COMPLETED
        finally:
            self._owner = 0
            self._lock.release()
        work = self.enqueue(operation, _begun(begin, arguments), get_timeout(), [])
        work.wait()
        return work

    def _wait_for_lock(self, operation: str) -> None:
        """Let another thread end its step, or its synchronous operation."""
        # in a signal handler, or a finaliser that the collector runs
        if self._owner == threading.get_ident():
            raise TransportError(
                f"{operation} was called while this thread is in a collective of the same group"
            )
        self._lock.acquire()

    def enqueue(
        self,
        operation: str,
        steps: Steps,
        timeout: float | None,
        result: list[torch.Tensor],
        wait_s: float = 0.0,
    ) -> CPUWork:
        """Queue `steps`; they proceed as far as they can at once, then in the background.

        Args:
            operation: name of the operation, for errors.
            steps: the operation.
            timeout: seconds that it may take from now; None for no limit but a wait's.
            result: what its future gives.
            wait_s: limit of a wait that is given none, in seconds; `timeout` when 0.
        """
        limit = wait_s or timeout or 0.0
        steps, time_of_work = virtual_host.current().timed(self, steps)
        work = CPUWork(
            result, lambda waiting, seconds: self._drive(operation, waiting, seconds or limit)
        )
        if not self._lock.acquire(blocking=False):
            self._wait_for_lock(operation)
        try:
            self._operations.append(_Operation(operation, steps, work, timeout))
            # with `spin`, the caller has polled just now
            if len(self._operations) == 1 and self._spin is None:
                self._step()
            pending = bool(self._operations)
        finally:
            self._lock.release()
            self.run_callbacks()
        if pending:
            # a collective; most messages are waited for at once
            progress_thread.add(self, wake=timeout is not None)
        if time_of_work is not None:
            work.time = time_of_work
            time_of_work.note_queued(work)
        return work

    def attempt(self, action: Callable[[], bool]) -> bool:
        """Do `action`, which does not wait, if nothing is queued; whether it was done and returned
        True.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._operations and action()
        finally:
            self._lock.release()

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks of completed operations are to be run."""
        return bool(self._callbacks)

    @property
    def pending(self) -> bool:
        """Whether any operation is left."""
        return bool(self._operations)

    def make_progress(self) -> bool:
        """Proceed as far as possible, but run no callbacks; whether any progress was made. For the
        progress thread.
        """
        progressed = False
        if self._lock.acquire(blocking=False):
            try:
                while self._operations and self._step() is None:
                    progressed = True
            finally:
                self._lock.release()
        return progressed

    def abort(self, error: BaseException) -> None:
        """End every pending operation with `error`."""
        # a thread in a synchronous call holds it, and ends by itself
        if self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self._abort(error, len(self._operations))
            finally:
                self._lock.release()
                self.run_callbacks()

    def _drive(self, operation: str, work: CPUWork, timeout: float) -> None:
        backoff = Backoff(operation, timeout, self._check, self._oversubscribed)
        awaited: Awaited | None = None
        if self._spin is not None:
            self._spin()
        while not work.is_completed():
            # releases the interpreter to the thread that works on it
            if not self._lock.acquire(timeout=CHECK_S):
                continue
            try:
                awaited = self._step()
            finally:
                self._lock.release()
                self.run_callbacks()
            if not work.is_completed():
                backoff.pause(awaited)

    def _abort(self, error: BaseException, count: int) -> None:
        for _ in range(count):
            operation = self._operations.popleft()
            operation.steps.close()
            self._keep_callbacks(operation.work.finish(error))

    def run_callbacks(self) -> None:
        """Run the callbacks of completed operations; without the lock, as they may start and await
        other operations.
        """
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was quicker
                return
            callback()

    def _keep_callbacks(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            self._callbacks.append(callback)

    def _step(self) -> Awaited | None:
        """Do one step of the first operation; return the ranks that it waits for, or None when it
        has made progress.
        """
        if not self._operations:
            return None
        operation = self._operations[0]
        try:
            awaited = next(operation.steps)
            operation.check_periodically(awaited, self._check)
            return awaited
        except StopIteration:
            self._operations.popleft()
            self._keep_callbacks(operation.work.finish())
        except BaseException as error:
            self._abort(error, 1 if self._fail is None else len(self._operations))
            if self._fail is not None:
                self._fail(error)
            # Ctrl-C is for the program, whoever waits for the operation
            if not isinstance(error, Exception):
                raise
        return None


def _begun(begin: Callable[..., Steps | None], arguments: tuple[Any, ...]) -> Steps:
    steps = begin(*arguments)
    if steps is not None:
        yield from steps
