"""An asynchronous operation of a watched group: c10d's `Work`, whose errors say what has gone wrong."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .agreement import Asked
from .member import Member, Started

__all__ = ["WatchedWork"]


class WatchedWork(dist.Work):
    """Hands on what `inner` says.

    Args:
        inner: the backend's own.
        member: of the group.
        started: the operation's record.
        asked: whether the ranks of other machines have called the same, where there are any.
        device: of its tensors, in a group whose waits may return before an operation has ended; else None.
    """

    def __init__(
        self,
        inner: Any,
        member: Member,
        started: Started,
        asked: Asked | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        # no step asks a device
        self._may_be_asked = member.ends_by_future or (device is not None and device.type == "cpu")
        self._inner, self._member, self._started, self._asked = inner, member, started, asked

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has ended.

        Raises:
            DesyncError, RankLostError, StallError: it never will.
        """
        session = self._member.session
        if timeout:
            self._member.allow(timeout.total_seconds())
        if session.error is None and self._may_be_asked and self.is_completed():
            answer = self._wait_for_ended()
        else:
            with session.blocking(self._started.number, self._member.ranks):
                if self._asked is not None:
                    self._asked.check()
                answer = self._inner.wait(timeout) if timeout else self._inner.wait()
        self._member.waited(self._started, self._inner, self._device)
        return answer

    def _wait_for_ended(self) -> bool:
        try:
            if self._asked is not None:
                self._asked.check()
            answer: bool = self._inner.wait()
        except BaseException as error:
            self._member.session.explain(error, self._member.ranks)
            raise
        return answer

    def block_current_stream(self) -> None:
        """Let the current stream wait for it; as `wait` where there are none."""
        self._inner.block_current_stream()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ended: bool = self._inner.is_completed() and (self._asked is None or self._asked.is_done())
        return ended

    def is_success(self) -> bool:
        """Whether it has ended well."""
        well: bool = self._inner.is_success()
        return well

    def exception(self) -> BaseException | None:
        """What it ended with, if not well."""
        error: BaseException | None = self._inner.exception()
        return error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it filled."""
        tensors: list[torch.Tensor] = self._inner.result()
        return tensors

    def source_rank(self) -> int:
        """Whom a receive from any rank got its message from."""
        rank: int = self._inner._source_rank()
        return rank

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait as the backend does."""
        self._inner.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that gives the result, or raises what ended the operation."""
        future: torch.futures.Future[Any] = self._inner.get_future()
        if self._asked is not None:
            future = self._asked.before(future)
        session = self._member.session
        if session.logs and self._member.ends_by_future:
            recorder, number = session.recorder, self._started.number
            future.add_done_callback(lambda _: recorder.leave(number, time.monotonic()))
        return future
