"""The order in which a group's calls start: one that waits for its pre-flight check holds up those
behind it.

All ranks have to start the operations of a group, and the checks between them, in the same order.
An asynchronous call that is not to start before its check has ended must not hold up the program
either: it starts later, in the thread in which the check has ended, and so do the calls behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class DeferredWork(dist.Work):
    """The `Work` of a call that starts later."""

    def __init__(self) -> None:
        super().__init__()
        self._has_begun = threading.Event()
        self._inner: Any = None
        self._check: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended: torch.futures.Future[None] | None = None  # made by `get_future`
        self._future: torch.futures.Future[Any] | None = None
        self._guarded: torch.futures.Future[Any] | None = None  # of the operation

    def begin(self, inner: Any, check: Any) -> None:
        """Take over the work of the call, which has started, and its check; None if that has ended
        well.
        """
        self._inner = inner
        self._check = check
        self._has_begun.set()

    def fail(self, error: BaseException) -> None:
        """Note that the call will not start."""
        self._error = error
        self._has_begun.set()

    def complete_future(self) -> None:
        """Complete the future that was asked for before the call had started, if any, when the
        operation completes.

        What waits for it may run here.
        """
        with self._lock:
            ended = self._ended if self._guarded is None else None
            if ended is None or not self._has_begun.is_set():
                return
            if self._error is None:
                operation_ended = self._inner.get_future()
                self._guarded = (
                    operation_ended if self._check is None else self._check.guard(operation_ended)
                )
            else:
                self._guarded = torch.futures.Future()
                self._guarded.set_result(None)
        self._guarded.add_done_callback(lambda _: ended.set_result(None))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call has started, and its operation has completed.

        Raises:
            RuntimeError: it has not within `timeout`; or as the backend's own work, or the check.
        """
        if not self._has_begun.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("a collective timed out: its pre-flight check has not ended")
        if self._error is not None:
            raise self._error
        if self._check is not None:
            self._check.wait()
        return bool(self._inner.wait(timeout) if timeout else self._inner.wait())

    def is_completed(self) -> bool:
        """Return whether the operation has completed or failed, or will not start."""
        if not self._has_begun.is_set():
            return False
        if self._error is not None:
            return True
        return bool(self._inner.is_completed() and (self._check is None or self._check.is_done()))

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self.is_completed() and self._error is None and bool(self._inner.is_success())

    def exception(self) -> BaseException | None:
        """Return the error of the operation, if it failed."""
        if self._error is not None or self._inner is None:
            return self._error
        error: BaseException | None = self._inner.exception()
        return error

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the output tensors."""
        self.wait()
        tensors: list[torch.Tensor] = self._inner.result()
        return tensors

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: the tensors are on the CPU."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result, or with the error of the operation."""
        with self._lock:
            if self._future is None:
                self._ended = torch.futures.Future()
                # an error that is raised in a callback reaches C++ as an error; one that is set
                # does not
                self._future = self._ended.then(lambda _: self._result_or_error())
        self.complete_future()
        return self._future

    def _result_or_error(self) -> Any:
        assert self._guarded is not None
        value = self._guarded.value()
        if self._error is not None:
            raise self._error
        return value


_POLL_S = 0.05


@dataclass
class _Call:
    """A call that has not started; see `CallOrder.add` for `check` and `start`.

    Attributes:
        work: what the program has got.
    """

    check: Callable[[], torch.futures.Future[Any]] | None
    start: Callable[[], tuple[Any, Any]]
    work: DeferredWork = field(default_factory=DeferredWork)


class CallOrder:
    """The calls of one group that have not started, in their order.

    Args:
        interrupt: called during waits; raises when they are over.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._calls: deque[_Call] = deque()
        self._begun: list[DeferredWork] = []  # works whose futures may have to be completed
        self._changed = threading.Condition(threading.RLock())

    @property
    def is_free(self) -> bool:
        """Whether all calls have started."""
        return not self._calls

    def wait(self) -> None:
        """Return when all calls have started. Raises what `interrupt` raises."""
        if self.is_free:
            return
        with self._changed:
            while self._calls:
                self._changed.wait(_POLL_S)
                self._interrupt()

    def add(
        self,
        check: Callable[[], torch.futures.Future[Any]] | None,
        start: Callable[[], tuple[Any, Any]],
    ) -> DeferredWork:
        """Start a call after those before it.

        Args:
            check: starts the check that the call is to wait for, and returns the future of its end,
                which has an error if the call must not start. None where it need not wait.
            start: starts the call; returns its work, and the check that goes on beside it or None.
        """
        call = _Call(check, start)
        awaited = None
        with self._changed:
            self._calls.append(call)
            if len(self._calls) == 1:
                awaited = self._start_calls()
        self._go_on_after(awaited)
        return call.work

    def _go_on_after(self, awaited: torch.futures.Future[Any] | None) -> None:
        """Go on when the check of the first call has ended; without the lock, as what waits for a
        call may run here.
        """
        begun = self._begun
        self._begun = []
        for work in begun:
            work.complete_future()
        if awaited is not None:
            awaited.add_done_callback(self._go_on)

    def _go_on(self, checked: torch.futures.Future[Any]) -> None:
        """Start the first call, whose check has ended, and those behind it."""
        with self._changed:
            try:
                checked.value()
            except Exception as error:
                self._fail(error)
                awaited = None
            else:
                self._start_first()
                awaited = self._start_calls()
        self._go_on_after(awaited)

    def _start_calls(self) -> torch.futures.Future[Any] | None:
        """Start calls up to the first that waits for its check, and return the future of that; with
        the lock held.
        """
        while self._calls:
            begin_check = self._calls[0].check
            if begin_check is None:
                self._start_first()
                continue
            try:
                return begin_check()
            except Exception as error:
                self._fail(error)
        return None

    def _start_first(self) -> None:
        call = self._calls[0]
        try:
            call.work.begin(*call.start())
        except Exception as error:  # the backend has rejected its arguments
            call.work.fail(error)
        self._begun.append(call.work)
        self._calls.popleft()  # only now: who finds no call here starts the next one
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Start none of the calls."""
        for call in self._calls:
            call.work.fail(error)
            self._begun.append(call.work)
        self._calls.clear()
        self._changed.notify_all()
