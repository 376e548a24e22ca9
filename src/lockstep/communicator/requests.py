"""What a verb that has been started gives its caller, to wait for or to ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Request", "Watched", "wait_all"]

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Request(Generic[Result]):
    """A verb under way. Its tensors must not be touched before it has ended.

    Args:
        works: what must have ended; c10d's works, or what has their `wait` and `is_completed`. None is left out.
        finish: gives the result, when they have.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], Result]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Result] | None = finish
        self._result: list[Result] = []

    @staticmethod
    def ended(result: T) -> Request[T]:
        """One that has ended already."""
        return Request([], lambda: result)

    def wait(self) -> Result:
        """Return the result, once there is one; again at once when called again."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            self._result.append(self._finish())
            self._finish = None  # lets go of the tensors that it holds
        return self._result[0]

    def test(self) -> bool:
        """Whether `wait` would return at once."""
        return not [work for work in self._works if not work.is_completed()]  # asks each, so that each goes on


class Watched:
    """A work that tells its end only to one who waits: when asked, a thread begins to wait for it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when it has ended."""
        if self._thread is None:
            self._work.wait()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="lockstep request", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error


def wait_all(requests: Iterable[Request[T]]) -> list[T]:
    """The results of all requests, in their order, when all have ended."""
    return [request.wait() for request in requests]
