"""Deadlocks: cycles of ranks that wait for each other, on one host and across hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..flight_recorder import RawRecord, RecorderReader
from ..flight_recorder.layout import StateWords
from .host_state import CallRow, HostStates, Wait
from .mismatch import Finding

__all__ = ["CrossHostCycles", "LocalCycles", "current_wait", "is_message_sent", "is_recv", "messages_needed"]

_WORDS = StateWords()
_CAUSE = "Ranks communicate in different orders, or a message is received that no rank sends."
_ADVICE = "Issue matching calls in the same order on both sides, and match each recv with a send."


def _deadlock(waits: list[tuple[int, str, int]]) -> Finding:
    """Return the finding for a cycle, of (rank, what it waits in, rank that it waits for)."""
    described = (f"rank {rank} waits in {call} for rank {other}" for rank, call, other in waits)
    return Finding("desync", f"Deadlock: {'; '.join(described)}.", (), _CAUSE, _ADVICE)


# --- On one host ------------------------------------------------------------------------------------------------------

_STABLE_S = 0.4  # ranks must have waited for each other for this long


class LocalCycles:
    """Finds cycles of ranks on this host.

    Args:
        rank: this rank.
        readers: of the flight recorders of this host, by rank.
    """

    def __init__(self, rank: int, readers: Mapping[int, RecorderReader]) -> None:
        self._rank, self._readers = rank, readers
        self._seen: tuple[tuple[int, int], ...] = ()
        self._since = 0.0

    def find(self) -> Finding | None:
        """Return the cycle that this rank is in, once it has existed for a while."""
        now, cycle = time.monotonic(), self._cycle_through_rank()
        if cycle != self._seen:
            self._seen, self._since = cycle, now
        if not cycle or now - self._since < _STABLE_S:
            return None
        waits = []
        for index, (rank, number) in enumerate(cycle):
            reader = self._readers[rank]
            raw = reader.raw(number)
            if raw is None:
                return None
            record = reader.record(raw)
            waits.append((rank, f"{record.description} at {record.call_site}", cycle[index - 1][0]))
        return _deadlock(waits)

    def _cycle_through_rank(self) -> tuple[tuple[int, int], ...]:
        """Return (rank, number of the record in which it waits); each waits for the one before it in the tuple."""
        waiting = {rank: raw for rank, each in self._readers.items() if (raw := current_wait(each)) is not None}
        paths = [[self._rank]] if self._rank in waiting else []
        for path in paths:
            for rank in self._waited_for(path[-1], waiting):
                if rank == self._rank:
                    return tuple((each, waiting[each].number) for each in path[::-1])
                if rank not in path:
                    paths.append([*path, rank])
        return ()

    def _waited_for(self, rank: int, waiting: Mapping[int, RawRecord]) -> Iterator[int]:
        """Yield those of the waiting ranks that `rank` waits for."""
        raw, own = waiting[rank], self._readers[rank]
        for other in waiting:
            reader = self._readers[other]
            if other == rank:
                continue
            if raw.peer >= 0:
                if raw.peer == other and is_recv(own, raw) and not is_message_sent(own, reader, raw):
                    yield other
            else:
                slot = reader.group_slot(raw.key)
                if slot >= 0 and reader.last_sequence(slot) < raw.sequence:
                    yield other


def current_wait(reader: RecorderReader) -> RawRecord | None:
    """Return the record in which a rank waits; None if it does not, or several of its threads communicate."""
    if reader.phase != "waits" or reader.state_word(_WORDS.threads) != 1:
        return None  # another thread may do what is waited for
    return reader.raw(reader.state_word(_WORDS.since_record))


def is_recv(own: RecorderReader, raw: RawRecord) -> bool:
    """Return whether that record of the rank `own` is a receive."""
    return own.text(raw.what).startswith("recv")


def messages_needed(own: RecorderReader, raw: RawRecord) -> int:
    """Return how many messages the peer must have sent for the receive `raw` of the rank `own`; tags are ignored."""
    later = (own.raw(number) for number in range(raw.number + 1, own.state_word(_WORDS.records) + 1))
    behind = sum(each is not None and each.peer == raw.peer and is_recv(own, each) for each in later)
    return own.messages(raw.peer, sent=False) - behind


def is_message_sent(own: RecorderReader, sender: RecorderReader, raw: RawRecord) -> bool:
    """Return whether the message of the receive `raw`, of the rank `own`, has been sent."""
    return sender.messages(own.rank, sent=True) >= messages_needed(own, raw)


# --- Across hosts, from what each host has published (pure) ----------------------------------------------------------


class CrossHostCycles:
    """Finds cycles across hosts.

    The states of the hosts are not of one moment: a cycle counts only when all hosts have published it again.
    """

    def __init__(self) -> None:
        self._seen: tuple[tuple[int, int], ...] = ()
        self._counts: dict[int, Any] = {}

    def find(self, states: HostStates) -> Finding | None:
        """Return the cycle that existed in the states before, and still exists in these."""
        cycle, counts = _find_cycle(states), {host: state.count for host, state in states.items()}
        if cycle != self._seen:
            self._seen, self._counts = cycle, counts
        if not cycle or any(self._counts.get(host) == count for host, count in counts.items()):
            return None
        rows = {rank: row for state in states.values() for rank, row in state.ranks.items()}
        waits = []
        for index, (rank, _) in enumerate(cycle):
            call = rows[rank].call or CallRow("a collective", "an unknown line")
            waits.append((rank, f"{call.what} at {call.call_site}", cycle[index - 1][0]))
        return _deadlock(waits)


def _find_cycle(states: HostStates) -> tuple[tuple[int, int], ...]:
    """Return (rank, number of the record in which it waits); each waits for the one before it in the tuple."""
    waits = {rank: wait for state in states.values() for rank, wait in state.waits.items()}
    for start in sorted(waits):
        paths = [[start]]
        reached = {start}
        for path in paths:
            for rank in _waited_for(path[-1], waits, states):
                if rank == start:
                    return tuple((each, waits[each].record) for each in reversed(path))
                if rank not in reached:
                    reached.add(rank)
                    paths.append([*path, rank])
    return ()


def _waited_for(rank: int, waits: Mapping[int, Wait], states: HostStates) -> Iterator[int]:
    """Yield those of the waiting ranks that `rank` waits for."""
    wait = waits[rank]
    for state in states.values():
        is_peers_host = wait.peer in waits and wait.peer in state.ranks
        if is_peers_host and state.sent.get(wait.peer, {}).get(rank, 0) < wait.messages:
            yield wait.peer
        for group in state.groups.get(wait.key, []) if wait.peer < 0 else []:
            if group.last < wait.sequence:
                yield from (other for other in group.ranks if other != rank and other in waits)
