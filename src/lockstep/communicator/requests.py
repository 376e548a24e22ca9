"""What a verb that has been started gives its caller, to wait for or to ask."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

import torch

from ..errors import ConfigError

__all__ = ["Request", "Watched", "outstanding", "wait_all"]

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class _Waitable(Protocol):
    def wait(self) -> object: ...


# What `wait_all()` waits for, by its age. Held weakly: what nobody holds any more has nobody to give its result to.
_OUTSTANDING: weakref.WeakValueDictionary[int, _Waitable] = weakref.WeakValueDictionary()
_AGES = itertools.count()


def outstanding(waitable: _Waitable) -> int:
    """Let `wait_all()` wait for it, as long as it is there; returns a number by which it can be taken out again."""
    age = next(_AGES)
    _OUTSTANDING[age] = waitable
    return age


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
        self._age = outstanding(self) if self._works else None

    @staticmethod
    def ended(result: T) -> Request[T]:
        """One that has ended already."""
        return Request([], lambda: result)

    def wait(self) -> Result:
        """Return the result, once there is one; again at once when called again."""
        if self._age is not None:
            _OUTSTANDING.pop(self._age, None)  # a failure is raised here
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


@overload
def wait_all(requests: Iterable[Request[T]]) -> list[T]: ...
@overload
def wait_all(requests: None = None) -> None: ...
def wait_all(requests: Iterable[Request[T]] | None = None) -> list[T] | None:
    """Wait for requests, or without any for everything that has been queued in this process.

    That is every request that the program still holds; the steps that a `Trainer` has queued, with their losses; and
    all work that torch has given to accelerators. The first failure among them is raised.

    On the CPU torch computes while it is called, so that only requests are left to wait for.

    Args:
        requests: of the communicator's verbs.

    Returns:
        The results of the requests, in their order; without requests None.

    Raises:
        ConfigError: for what is no list of requests.
    """
    if requests is not None:
        return [request.wait() for request in _checked(requests)]
    for age in sorted(_OUTSTANDING.keys()):
        waitable = _OUTSTANDING.get(age)
        if waitable is not None:
            waitable.wait()
    _synchronize()
    return None


def _checked(requests: Iterable[Request[T]]) -> list[Request[T]]:
    found = list(requests) if isinstance(requests, Iterable) else [requests]
    others = [type(request).__name__ for request in found if not hasattr(request, "wait")]
    if others or not isinstance(requests, Iterable):
        got = others[0] if others else type(requests).__name__
        raise ConfigError("requests", "a list of what verbs with async_op=True return", found=got)
    return found


def _synchronize() -> None:
    """Wait for the accelerators that this process has used; to ask another one would set it up, at some 0.5 GB."""
    if not torch.cuda.is_available():
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)
