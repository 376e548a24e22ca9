"""The keys of a membership, by which its members find each other: requests and answers (pure).

The coordinator keeps them in memory; they end with their membership.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..messages import Integer, List, Tagged


class StoreRequest(Tagged, frozen=True):
    """An operation of a worker on the keys of `generation`, as of c10d's stores.

    Attributes:
        generation: the membership whose keys they are.
        operation: "set" sets the only key to the only value; "get" waits until all keys exist, and
            the answer has their values; "add" adds `amount` to the number at the only key, and the
            answer has the sum; "check" asks whether all keys exist; "compare_set" sets the only key
            to the second value if it has the first one, and the answer has its value then.
        keys: to which it applies.
        values: of the operation.
        amount: to add.
        request: its number, which the answer repeats; -1 for "set", which is not answered.
    """

    generation: Integer
    operation: Literal["set", "get", "add", "check", "compare_set"]
    keys: List[str]
    values: List[bytes] = ()
    amount: Integer = 0
    request: Integer = -1


class Answer(Tagged, frozen=True):
    """The answer to a request of a worker: values, a sum, or whether keys exist.

    Attributes:
        request: its number.
        values: of keys.
        number: a sum; or 1 if all keys exist, and 0 if not.
    """

    request: Integer
    values: List[bytes] = ()
    number: Integer = 0


class Keys:
    """The keys of one membership."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[int, StoreRequest]] = []

    def forget(self, number: int) -> None:
        """Drop what a worker waits for."""
        self._waiting = [(waits, message) for waits, message in self._waiting if waits != number]

    def use(self, number: int, message: StoreRequest) -> Iterator[tuple[int, Answer]]:
        """Do what a worker requests; yields the answers, each with the number of its worker.

        A request without the keys and values of its operation is ignored.
        """
        values = self._values
        match message:
            case StoreRequest(operation="set", keys=(key,), values=(value,)):
                values[key] = value
            case StoreRequest(operation="get"):
                self._waiting.append((number, message))
            case StoreRequest(operation="add", keys=(key,)):
                total = int(values.get(key, b"0")) + message.amount
                values[key] = str(total).encode()
                yield number, Answer(message.request, number=total)
            case StoreRequest(operation="check"):
                exist = all(key in values for key in message.keys)
                yield number, Answer(message.request, number=int(exist))
            case StoreRequest(operation="compare_set", keys=(key,), values=(expected, value)):
                if values.get(key, b"") == expected:
                    values[key] = value
                yield number, Answer(message.request, (values.get(key, expected),))
        yield from self._answer_those_that_wait()

    def _answer_those_that_wait(self) -> Iterator[tuple[int, Answer]]:
        still_waiting = []
        for number, message in self._waiting:
            if all(key in self._values for key in message.keys):
                values = tuple(self._values[key] for key in message.keys)
                yield number, Answer(message.request, values)
            else:
                still_waiting.append((number, message))
        self._waiting = still_waiting
