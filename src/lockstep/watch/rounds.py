"""What machines tell each other of their ranks, through the job's store: twice a second, two messages each."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

__all__ = ["PERIOD_S", "Rounds", "Store"]

PERIOD_S = 0.5
_REPORT = "report"

Told = dict[str, Any]


class Store(Protocol):
    """What is asked of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Let `key` have that value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys`, all of which there are."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it has the value `expected`; the value that it has then."""


class Rounds:
    """One machine's part.

    Every machine says how its ranks do, and asks for two values: the sign of life of the first machine, and the report.
    Only the first machine reads what all have said, and compares it. With m machines that are 2 m + 2 messages a
    period, whatever the number of ranks.

    Args:
        store: where they meet.
        machine: number of this one.
        machines: number of all.
    """

    def __init__(self, store: Store, machine: int, machines: int) -> None:
        self._store, self._machine, self._machines = store, machine, machines
        self._count = 0
        self._heard: dict[int, tuple[int, float]] = {}  # the last number of each machine's, and when it came

    def begin(self) -> None:
        """Say that there is nothing yet; every machine must have said so before any goes on."""
        self._store.set(f"told/{self._machine}", json.dumps({"count": 0}))
        if self._machine == 0:
            self._store.set(_REPORT, "")

    def tell(self, told: Told) -> None:
        """Say how the ranks of this machine do."""
        self._count += 1
        # another rank of the machine may have spoken for it before
        self._store.set(f"told/{self._machine}", json.dumps({**told, "count": time.time_ns() + self._count}))

    def hear(self) -> tuple[str, dict[int, Told]]:
        """The report, "" without one, and what machines have said: all for the first of them, else only the first."""
        asked = range(self._machines) if self._machine == 0 else (0,)
        report, *values = self._store.multi_get([_REPORT, *(f"told/{each}" for each in asked)])
        said = {each: json.loads(value) for each, value in zip(asked, values, strict=True)}
        now = time.monotonic()
        for each, told in said.items():
            if each not in self._heard or self._heard[each][0] != told["count"]:
                self._heard[each] = (told["count"], now)
        return report.decode(), said

    def forgive(self) -> None:
        """Count anew for how long machines have been silent, as nobody has listened."""
        now = time.monotonic()
        self._heard = {machine: (count, now) for machine, (count, _) in self._heard.items()}

    def silent_s(self, machine: int) -> float:
        """The seconds since something new was heard of a machine."""
        heard = self._heard.get(machine)
        return 0.0 if heard is None else time.monotonic() - heard[1]

    def report(self, text: str) -> str:
        """Give all machines a report; the one that they have then, which may be another."""
        return self._store.compare_set(_REPORT, "", text).decode()
