"""Ranks of several machines that wait for each other in a circle, of what each machine has told (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .finding import Finding

__all__ = ["CIRCLE", "Circles"]

CIRCLE = (
    "Ranks communicate in different orders, or a message is received that nobody sends.",
    "Let both sides call what belongs together in the same order, and send for every recv.",
)
"""Likely cause, and what to do."""

Told = Mapping[int, Mapping[str, Any]]


class Circles:
    """Finds them. What machines tell is not of one moment, so that one is only believed when all have told again."""

    def __init__(self) -> None:
        self._seen: tuple[tuple[int, int], ...] = ()
        self._counts: dict[int, Any] = {}

    def look(self, told: Told) -> Finding | None:
        """The circle that has been there in what was told before, and still is."""
        found, counts = _circle(told), {machine: said.get("count") for machine, said in told.items()}
        if found != self._seen:
            self._seen, self._counts = found, counts
        if not found or any(self._counts.get(machine) == count for machine, count in counts.items()):
            return None
        rows = {int(rank): row for said in told.values() for rank, row in said.get("ranks", {}).items()}
        words = []
        for index, (rank, _) in enumerate(found):
            call = rows[rank][6] or ["a collective", "?"]
            words.append(f"rank {rank} waits in {call[0]} at {call[1]} for rank {found[index - 1][0]}")
        sentence = "; ".join(words)
        return Finding("desync", f"{sentence[0].upper()}{sentence[1:]}.", (), *CIRCLE)


def _circle(told: Told) -> tuple[tuple[int, int], ...]:
    """(rank, number of the record that it waits in), each waited for by the next one and waiting for the last."""
    waits = {int(rank): each for said in told.values() for rank, each in said.get("waits", {}).items()}
    for start in sorted(waits):
        paths = [[start]]
        reached = {start}
        for path in paths:
            for rank in _waited_for(path[-1], waits, told):
                if rank == start:
                    return tuple((each, waits[each][0]) for each in reversed(path))
                if rank not in reached:
                    reached.add(rank)
                    paths.append([*path, rank])
    return ()


def _waited_for(rank: int, waits: Mapping[int, list[int]], told: Told) -> Iterator[int]:
    """Those of the waiting ranks that `rank` waits for; see `telling`."""
    _, peer, needed, key, sequence = waits[rank]
    for said in told.values():
        if peer in waits and str(peer) in said.get("ranks", {}):
            sent = said.get("sent", {}).get(str(peer), {}).get(str(rank), 0)
            if sent < needed:
                yield peer
        for ranks, head, *_ in said.get("groups", {}).get(str(key), []) if peer < 0 else []:
            yield from (each for each in ranks if head < sequence and each != rank and each in waits)
