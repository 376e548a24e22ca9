"""Requests: the handles of started operations, to wait for or to poll."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from .. import devices
from ..errors import ConfigError

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class _Waitable(Protocol):
    def wait(self) -> object: ...


# What `synchronize()` waits for, in order of creation. Held weakly: without a reference, the result
# is of no use.
_PENDING: weakref.WeakValueDictionary[int, _Waitable] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register_pending(waitable: _Waitable) -> int:
    """Let `synchronize()` wait for it, as long as it is referenced; returns a number by which it
    can be removed.
    """
    number = next(_NUMBERS)
    _PENDING[number] = waitable
    return number


class Request(Generic[Result]):
    """A started operation. Its tensors must not be touched before it has completed.

    Args:
        works: must have completed; c10d's works, or objects with their `wait` and `is_completed`.
            None is skipped.
        finish: returns the result, when they have.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], Result]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Result] | None = finish
        self._result: list[Result] = []
        self._number = register_pending(self) if self._works else None

    @staticmethod
    def completed(result: T) -> Request[T]:
        """Return a request that has completed already."""
        return Request([], lambda: result)

    def wait(self) -> Result:
        """Return the result, once there is one; further calls return it at once."""
        if self._number is not None:
            _PENDING.pop(self._number, None)  # a failure is raised here
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            self._result.append(self._finish())
            self._finish = None  # drops its references to tensors
        return self._result[0]

    def test(self) -> bool:
        """Return whether `wait` would return at once."""
        # polls each, so that each makes progress
        return not [work for work in self._works if not work.is_completed()]


class PolledWork:
    """A work that completes only in `wait`: when it is polled, a thread begins to wait for it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when it has completed."""
        if self._thread is None:
            self._work.wait()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether the operation has completed, successfully or not."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._wait_in_thread, name="lockstep request", daemon=True
            )
            self._thread.start()
        return not self._thread.is_alive()

    def _wait_in_thread(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error


def wait_all(requests: Iterable[Request[T]]) -> list[T]:
    """Wait for requests; the first failure among them is raised.

    Args:
        requests: of a communicator.

    Returns:
        Their results, in their order.

    Raises:
        ConfigError: for an argument that is not a list of requests.
    """
    return [request.wait() for request in _checked(requests)]


def synchronize() -> None:
    """Wait for everything that has been queued in this process.

    That is every request that the program still references; the steps that a `Trainer` has queued,
    with their losses; and all work that torch has queued on accelerators. The first failure among
    them is raised.

    On the CPU torch computes synchronously, so that only requests are left to wait for.
    """
    for number in sorted(_PENDING.keys()):
        waitable = _PENDING.get(number)
        if waitable is not None:
            waitable.wait()
    devices.synchronize_used()


def _checked(requests: Iterable[Request[T]]) -> list[Request[T]]:
    checked = list(requests) if isinstance(requests, Iterable) else [requests]
    others = [type(request).__name__ for request in checked if not hasattr(request, "wait")]
    if others or not isinstance(requests, Iterable):
        got = others[0] if others else type(requests).__name__
        raise ConfigError("requests", "a list of requests, as iallreduce returns", found=got)
    return checked
