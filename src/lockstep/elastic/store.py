"""The store by which the members of one membership form their process group: a worker's side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import Store

from .client import MembershipClient
from .keys import Answer, StoreRequest

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,misc"


class GenerationStore(Store):
    """The c10d store of one generation, whose waits have no time limit and end with it.

    c10d itself keeps no reference to a store in Python: whoever makes a group with it does.

    Args:
        client: of this worker.
        generation: whose members use it.
    """

    def __init__(self, client: MembershipClient, generation: int) -> None:
        super().__init__()
        self._client = client
        self._generation = generation

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self._client.check()
        self._client.send(StoreRequest(self._generation, "set", (key,), (_as_bytes(value),)))

    def get(self, key: str) -> bytes:
        """Wait until `key` exists, and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all `keys` exist, and return their values."""
        return list(self._request("get", keys, waits=True).values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` exist, however long."""
        self.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to the number `key`, and return the sum."""
        return self._request("add", (key,), amount=amount).number

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist."""
        return bool(self._request("check", keys).number)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set `key` if its value is `expected`, or that is "" and it does not exist.

        Returns:
            Its value then.
        """
        values = (_as_bytes(expected), _as_bytes(value))
        return self._request("compare_set", (key,), values).values[0]

    def _request(
        self,
        operation: Literal["get", "add", "check", "compare_set"],
        keys: Sequence[str],
        values: tuple[bytes, ...] = (),
        amount: int = 0,
        waits: bool = False,
    ) -> Answer:
        """Return the coordinator's answer; `waits`: it may take as long as another worker needs."""
        generation = self._generation

        def make(number: int) -> StoreRequest:
            return StoreRequest(generation, operation, tuple(keys), values, amount, number)

        return self._client.request(generation, make, waits)

    def delete_key(self, key: str) -> bool:
        """Do nothing: the keys of a generation end with it."""
        return False

    def num_keys(self) -> int:
        """Return 0: nobody counts the keys."""
        return 0

    def has_extended_api(self) -> bool:
        """Return whether several keys can be set and read at once."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: there is no time limit."""


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
