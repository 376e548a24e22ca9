"""A store that counts what it is asked, by as many ranks as one likes: each is a thread of this
process.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

__all__ = ["CountingStore", "all_ranks"]

T = TypeVar("T")

# TCPStore waits in a message of its own before it reads.
_MESSAGES = {"get": 2, "multi_get": 2}


class CountingStore:
    """One rank's connection to `inner`. Attributes: messages, to the store; received, bytes of
    values from it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.messages = self.received = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self.messages += _MESSAGES.get(name, 1)
            found = method(*args)
            values = found if isinstance(found, list) else [found]
            self.received += sum(len(value) for value in values if isinstance(value, bytes))
            return found

        return call


class _Store:
    """As torch's, in this process. Whoever waits is woken by what he waits for alone: torch's
    HashStore wakes all.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._there: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()
            self._there[key].set()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
            self._there[key].set()
            return number

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=600)) -> None:
        for key in keys:
            with self._lock:
                event = self._there[key]
            if not event.wait(timeout.total_seconds()):
                raise RuntimeError(f"wait timeout: {key}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def all_ranks(size: int, body: Callable[[Any, int], T]) -> tuple[list[T], list[CountingStore]]:
    """What ``body(store, rank)`` returns on each of `size` ranks at once, and the store of each."""
    shared = _Store()
    stores, before = [CountingStore(shared) for _ in range(size)], threading.stack_size(256 << 10)
    try:
        with ThreadPoolExecutor(size) as pool:
            found = [pool.submit(body, store, rank) for rank, store in enumerate(stores)]
            return [each.result(600) for each in found], stores
    finally:
        threading.stack_size(before)
