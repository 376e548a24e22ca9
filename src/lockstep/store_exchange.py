"""What every rank has to say, told to all of them through a c10d store, in a number of messages that does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from .errors import StallError

__all__ = ["Combine", "Store", "exchange", "exchange_present", "nothing", "present", "ranks_of", "runs_of"]

Combine = Callable[[Mapping[int, str]], str]
"""Makes of what ranks have said, by rank, what all of them need to know; it should be short, as every rank gets it."""


class Store(Protocol):
    """What is asked of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Let `key` have that value."""

    def get(self, key: str) -> bytes:
        """The value of `key`, once it is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number `key`; what it is then."""

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when all `keys` are there."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys`, once all of them are there."""


def exchange(store: Store, topic: str, rank: int, text: str, names: Sequence[int], combine: Combine) -> str:
    """What `combine` makes of the texts of all ranks, the same for each; every rank must call it, once for each topic.

    The rank that comes last reads what all have said; the others wait for what it makes of that. So with n ranks each
    exchanges some five messages with the store, whose host sends n texts, and the combined one n times; it would send
    n² texts if each rank read all.

    Args:
        store: where they meet; its timeout limits the wait.
        topic: names the exchange in the store.
        rank: this rank, 0 ≤ rank < len(names).
        text: what it has to say.
        names: what the ranks are called in errors.
        combine: must give the same on every rank.

    Raises:
        StallError: some ranks have not said anything in time; it names them.
    """
    keys = _keys(topic, len(names))
    try:
        return _exchange(store, topic, rank, text, keys, combine, lambda key: store.get(key))
    except RuntimeError as error:
        missing = _missing(store, keys)
        if not missing:  # who came last has gone since
            return _read(store, keys, combine)
        late = tuple(names[each] for each in missing)
        who = f"rank{'s'[: len(late) != 1]} {', '.join(map(str, late))}"
        raise StallError(f"making the group ({topic}): {who} did not arrive: {error}", late) from error


def exchange_present(
    store: Store, topic: str, rank: int, text: str, size: int, combine: Combine, patience: timedelta
) -> str:
    """As `exchange`, but after `patience` those are left out that have said nothing."""
    keys = _keys(topic, size)

    def wait(key: str) -> bytes:
        store.wait([key], patience)
        return store.get(key)

    try:
        return _exchange(store, topic, rank, text, keys, combine, wait)
    except RuntimeError:
        missing = set(_missing(store, keys))
        return _read(store, {each: key for each, key in keys.items() if each not in missing}, combine)


def present(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """The values of those `keys` that are there: some two messages where all are, a few more for each that is not."""
    missing = set(_missing(store, dict(enumerate(keys))))
    there = [key for number, key in enumerate(keys) if number not in missing]
    return dict(zip(there, store.multi_get(there), strict=True)) if there else {}


def runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Ascending `ranks` as half-open ranges: a machine's are mostly one."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1][1] += 1
        else:
            runs.append([rank, rank + 1])
    return runs


def ranks_of(runs: Iterable[Sequence[int]]) -> list[int]:
    """What `runs_of` was given."""
    return [rank for start, stop in runs for rank in range(start, stop)]


def nothing(_: Mapping[int, str]) -> str:
    """Combines nothing: for an exchange in which ranks only wait for each other."""
    return ""


def _keys(topic: str, size: int) -> dict[int, str]:
    return {each: f"{topic}/{each}" for each in range(size)}


def _exchange(
    store: Store,
    topic: str,
    rank: int,
    text: str,
    keys: Mapping[int, str],
    combine: Combine,
    wait: Callable[[str], bytes],
) -> str:
    store.set(keys[rank], text)
    if store.add(f"{topic}/here", 1) < len(keys):
        return wait(f"{topic}/combined").decode()
    found = _read(store, keys, combine)
    store.set(f"{topic}/combined", found)
    return found


def _read(store: Store, keys: Mapping[int, str], combine: Combine) -> str:
    values = store.multi_get(list(keys.values()))
    return combine({each: value.decode() for each, value in zip(keys, values, strict=True)})


def _missing(store: Store, keys: Mapping[int, str]) -> list[int]:
    """Whose keys are not there, found by halves: a store only says whether all of several are."""
    numbers = list(keys)
    if not numbers or store.check([keys[each] for each in numbers]):
        return []
    if len(numbers) == 1:
        return numbers
    half = len(numbers) // 2
    parts = ({each: keys[each] for each in part} for part in (numbers[:half], numbers[half:]))
    return [each for part in parts for each in _missing(store, part)]
