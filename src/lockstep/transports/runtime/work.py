"""The `c10d.Work` of an operation that the CPU does: to wait for, to poll, or as a future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .virtual_host import WorkTime

# between asking for a future and the end of the operation; held for a moment only
_lock = threading.Lock()


class CPUWork(dist.Work):
    """One operation, pending or completed.

    Args:
        result: the tensors that its future gives.
        wait: drives the operation until it has completed or the given seconds are over; None when
            it has completed.
        device: of its tensors; a wait for its future is one of the stream there. None for the CPU.
    """

    def __init__(
        self,
        result: list[torch.Tensor],
        wait: Callable[[CPUWork, float | None], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._result = result
        self._wait = wait
        self._devices: list[int | str | torch.device] | None = (
            None if device is None or device.type == "cpu" else [device]
        )
        self._error: BaseException | None = None
        self._completed = wait is None
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._done_callbacks: list[Callable[[CPUWork], None]] = []
        # the rank a received message is from, once it is there
        self.get_source: Callable[[], int | None] = _unknown
        self.time: WorkTime | None = None  # of a virtual host
        # called when a wait for it fails
        self.on_wait_error: Callable[[BaseException], None] | None = None

    @staticmethod
    def all_of(works: Sequence[CPUWork]) -> CPUWork:
        """Return one work that has completed when all `works` have."""

        left = set(works)

        def wait(together: CPUWork, timeout: float | None) -> None:
            deadline = time.monotonic() + timeout if timeout else None
            for work in works:
                work.wait(
                    timedelta(seconds=max(1e-3, deadline - time.monotonic())) if deadline else None
                )

        def one_completed(work: CPUWork) -> None:
            with _lock:
                left.discard(work)
                last = not left
            if work.exception() is not None or last:
                run_callbacks = together.finish(work.exception())
                if run_callbacks is not None:
                    run_callbacks()

        together = CPUWork(
            [tensor for work in works for tensor in work.result()], wait if left else None
        )
        for work in list(left):
            work.add_done_callback(one_completed)
        return together

    def finish(self, error: BaseException | None = None) -> Callable[[], None] | None:
        """Mark the operation as completed, successfully or with `error`.

        Returns:
            A function that runs the callbacks, if there are any; to be called without holding any
            lock, because callbacks may take long and communicate.
        """
        with _lock:
            if self._completed:
                return None
            self._error = error
            self._completed = True
            self._wait = None
            self.on_wait_error = None
            signal = self._signal
            callbacks = self._done_callbacks
            self._done_callbacks = []
        return (
            partial(self._run_callbacks, signal, callbacks)
            if signal is not None or callbacks
            else None
        )

    def _run_callbacks(
        self,
        signal: torch.futures.Future[None] | None,
        callbacks: Sequence[Callable[[CPUWork], None]],
    ) -> None:
        for callback in callbacks:
            callback(self)
        if signal is not None:
            signal.set_result(None)

    def add_done_callback(self, callback: Callable[[CPUWork], None]) -> None:
        """Call `callback` once the operation has completed, at once if it has."""
        with _lock:
            if not self._completed:
                self._done_callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has completed.

        Args:
            timeout: time limit of the wait; the group's when None or zero.

        Raises:
            RankLostError, StallError, TransportError: the operation failed.
        """
        if self.time is not None:
            self.time.begin_wait()
        wait = self._wait
        if wait is not None:
            try:
                wait(self, timeout.total_seconds() if timeout else None)
            except BaseException as error:
                if self.on_wait_error is not None:
                    self.on_wait_error(error)
                raise
        if self._error is not None:
            # each wait begins its own; a shared one would grow and keep frames
            raise self._error.with_traceback(None)
        if self.time is not None:
            self.time.end_wait()
        return True

    def block_current_stream(self) -> None:
        """Do the same as `wait`: there are no streams on the CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has completed, successfully or not."""
        return self._completed

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self._completed and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that the operation completed with, if any."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation filled."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank that a receive from any rank got its message from."""
        source = self.get_source()
        return -1 if source is None else source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Do nothing: CPU tensors are ready when the operation has completed."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that gives the result, or raises the error of the operation."""
        with _lock:
            if self._future is None:
                self._signal = torch.futures.Future(devices=self._devices)
                # an error raised in a callback reaches C++ as an error; one set with set_exception
                # does not
                self._future = self._signal.then(self._result_or_error)
                completed = self._completed
            else:
                completed = False
        if completed and self._signal is not None:
            self._signal.set_result(None)
        return self._future

    def _result_or_error(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result


def _unknown() -> None:
    return None


COMPLETED = CPUWork([])  # every synchronous call that succeeds returns it
