"""Which hosts have kept what rank 0 has sent for workers that join later (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from ...elastic.membership import Keep


class KeptValues:
    """The values that rank 0 has sent for workers that join later: which hosts have not kept them
    yet.

    A value is named by its worker and the number of the worker's request.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._missing: dict[tuple[int, int], set[int]] = {}

    def resume(self, kept: Iterable[Keep]) -> None:
        """This host begins to lead: hosts keep these values, and workers ask again for others."""
        self._known |= {
            (message.worker, message.request) for message in kept if not message.is_of_callbacks
        }
        self._missing.clear()

    def forget_waits(self) -> None:
        """No worker waits any more: all are started again."""
        self._missing.clear()

    def is_known(self, message: Keep) -> bool:
        """Return whether the hosts had been sent a value before this host led."""
        return (message.worker, message.request) in self._known

    def sent(self, message: Keep, hosts: Iterable[int]) -> None:
        """A value is sent to the hosts."""
        if message.request >= 0:
            self._missing[message.worker, message.request] = set(hosts)

    def kept_by(self, host: int, name: tuple[int, int]) -> bool:
        """A host has kept a value, or is lost; returns whether now all hosts have kept it."""
        missing = self._missing.get(name)
        if missing is None:
            return False
        missing.discard(host)
        if not missing:
            del self._missing[name]
        return not missing

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """The values that not all hosts have kept."""
        return list(self._missing)
