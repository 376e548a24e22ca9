"""Hosts of an elastic job that do not reach each other, though the one that leads reaches both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

__all__ = ["UnreachableHosts"]

_CUT_OFF_S = (
    5.0  # after which this host itself would have noticed that one of the two does not answer
)
_REFUSED_S = 10.0
_MOST_REFUSED_S = 600.0


class UnreachableHosts:
    """Which hosts say that they do not reach each other, and which are left out for that reason."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # until when, and for how long

    def note(self, host: int, others: Iterable[int]) -> None:
        """Note which others a host does not reach now."""
        now = time.monotonic()
        before = self._since
        self._since = {pair: since for pair, since in before.items() if pair[0] != host}
        for pair in ((host, other) for other in others):
            self._since[pair] = before.get(pair, now)

    def forget(self) -> None:
        """Another host leads from here on, which is told anew."""
        self._since.clear()

    def overdue(self, hosts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first two of the `hosts`, in order of seniority, for which that has lasted too
        long, or none.
        """
        now = time.monotonic()
        for pair, since in self._since.items():
            if set(pair) <= set(hosts) and now - since >= _CUT_OFF_S:
                senior, junior = sorted(pair, key=hosts.index)
                return [(senior, junior)]
        return []

    def refuse(self, address: str) -> None:
        """Do not let the host at an address in again for some time, longer each time."""
        _, seconds = self._refused.get(address, (0.0, _REFUSED_S / 2))
        seconds = min(2 * seconds, _MOST_REFUSED_S)
        self._refused[address] = (time.monotonic() + seconds, seconds)

    def is_refused(self, address: str) -> bool:
        """Return whether that time is not over."""
        return time.monotonic() < self._refused.get(address, (0.0, 0.0))[0]
