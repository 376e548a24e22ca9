"""What an asynchronous operation gives its caller: c10d's `Work`, to wait for, to ask, or as a future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ShmWork", "done"]

_lock = threading.Lock()  # between asking for a future and the end of the operation; held for a moment only


class ShmWork(dist.Work):
    """One operation, under way or ended.

    Args:
        result: the tensors that its future gives.
        wait: drives the operation until it has ended or the given seconds are over; None when it has ended.
    """

    def __init__(self, result: list[torch.Tensor], wait: Callable[[ShmWork, float | None], None] | None = None) -> None:
        super().__init__()
        self._result, self._wait = result, wait
        self._error: BaseException | None = None
        self._ended = wait is None
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._listeners: list[Callable[[ShmWork], None]] = []
        self.sender: Callable[[], int | None] = _unknown  # whom a received message is from, once it is there
        self.give_up: Callable[[BaseException], None] | None = None  # called when a wait for it ends with an error

    @staticmethod
    def all_of(works: Sequence[ShmWork]) -> ShmWork:
        """One that has ended when all `works` have."""

        left = set(works)

        def wait(together: ShmWork, timeout: float | None) -> None:
            deadline = time.monotonic() + timeout if timeout else None
            for work in works:
                work.wait(timedelta(seconds=max(1e-3, deadline - time.monotonic())) if deadline else None)

        def ended(work: ShmWork) -> None:
            with _lock:
                left.discard(work)
                last = not left
            if work.exception() is not None or last:
                tell = together.finish(work.exception())
                if tell is not None:
                    tell()

        together = ShmWork([tensor for work in works for tensor in work.result()], wait if left else None)
        for work in list(left):
            work.when_ended(ended)
        return together

    def finish(self, error: BaseException | None = None) -> Callable[[], None] | None:
        """Note that the operation has ended, well or with `error`.

        Returns:
            What tells those who asked to be told, if any did; to be called without any lock, because it runs
            callbacks of the caller's, which may take long and communicate.
        """
        with _lock:
            if self._ended:
                return None
            self._error, self._ended, self._wait, self.give_up = error, True, None, None
            signal, listeners, self._listeners = self._signal, self._listeners, []
        return partial(self._tell, signal, listeners) if signal is not None or listeners else None

    def _tell(self, signal: torch.futures.Future[None] | None, listeners: Sequence[Callable[[ShmWork], None]]) -> None:
        for listener in listeners:
            listener(self)
        if signal is not None:
            signal.set_result(None)

    def when_ended(self, listener: Callable[[ShmWork], None]) -> None:
        """Call `listener` once the operation has ended, at once if it has."""
        with _lock:
            if not self._ended:
                self._listeners.append(listener)
                return
        listener(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has ended.

        Args:
            timeout: give up after it; the group's when None or zero.

        Raises:
            RankLostError, StallError, TransportError: what ended it.
        """
        wait = self._wait
        if wait is not None:
            try:
                wait(self, timeout.total_seconds() if timeout else None)
            except BaseException as error:
                if self.give_up is not None:
                    self.give_up(error)
                raise
        if self._error is not None:
            raise self._error.with_traceback(None)  # each wait begins its own; a shared one would grow and keep frames
        return True

    def block_current_stream(self) -> None:
        """`wait`: there are no streams on the CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        """What it ended with, if not well."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it filled."""
        return self._result

    def source_rank(self) -> int:
        """Whom a receive from any rank got its message from."""
        source = self.sender()
        return -1 if source is None else source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Nothing: CPU tensors are ready when the operation has ended."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that gives the result, or raises what ended the operation."""
        with _lock:
            if self._future is None:
                self._signal = torch.futures.Future()
                # an error raised in a callback reaches C++ as an error; one set with set_exception does not
                self._future = self._signal.then(self._outcome)
                ended = self._ended
            else:
                ended = False
        if ended and self._signal is not None:
            self._signal.set_result(None)
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result


def _unknown() -> None:
    return None


done = ShmWork([])  # every synchronous call that went well returns it
