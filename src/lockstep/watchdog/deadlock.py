"""Deadlocks: cycles of ranks that wait for each other, on one host and across hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..flight_recorder import RawRecord, RecorderReader
from ..flight_recorder.layout import StateWords
from .channels import TAGS_ADVICE, describe_tags, is_message_sent, is_receive_posted, is_recv
from .host_state import CallRow, HostState, HostStates, Wait
from .mismatch import Finding

__all__ = ["CrossHostCycles", "LocalCycles", "current_wait"]

_WORDS = StateWords()
_CAUSE = "Ranks communicate in different orders, or a message is received that no rank sends."
_ADVICE = "Issue matching calls in the same order on both sides, and match each recv with a send."
_SENDS = (
    "Each of these ranks sends first: a send returns when its message has been received, unless the transport has room "
    "to keep it, so that it works with small messages and not with large ones.",
    "Let one side receive first, or use isend and irecv, or batch_isend_irecv, and wait for them afterwards.",
)
_GROUPS = (
    "new_group is called on some of the ranks only, or ranks make their groups in different orders.",
    "Call new_group on every rank, in the same order and with the same ranks; with use_local_synchronization=True, on "
    "all ranks of the group.",
)


def _deadlock(waits: list[tuple[int, str, int]], tags: str = "") -> Finding:
    """Return the finding for a cycle.

    Args:
        waits: rank, what it waits in, and the rank that it waits for.
        tags: which message has another tag than is waited for; "" for none.
    """
    described = (f"rank {rank} waits in {call} for rank {other}" for rank, call, other in waits)
    cause, advice = _CAUSE, _ADVICE
    if tags:
        cause, advice = tags, TAGS_ADVICE
    elif any(call.startswith("new_group(") for _, call, _ in waits):
        cause, advice = _GROUPS
    elif all(call.startswith("send(") for _, call, _ in waits):
        cause, advice = _SENDS
    return Finding("desync", f"Deadlock: {'; '.join(described)}.", (), cause, advice)


# --- On one host ------------------------------------------------------------------------------------------------------

_STABLE_S = 0.4  # ranks must have waited for each other for this long
_STABLE_SEND_S = 2.0  # the same where one of them sends: some transports move a message before it is received


class LocalCycles:
    """Finds cycles of ranks on this host.

    Args:
        rank: this rank.
        readers: of the flight recorders of this host, by rank.
    """

    def __init__(self, rank: int, readers: Mapping[int, RecorderReader]) -> None:
        self._rank, self._readers = rank, readers
        self._seen: tuple[tuple[int, int, int], ...] = ()
        self._since = 0.0

    def find(self) -> Finding | None:
        """Return the cycle that this rank is in, once it has existed for a while."""
        now, cycle = time.monotonic(), self._cycle_through_rank()
        if cycle != self._seen:
            self._seen, self._since = cycle, now
        if not cycle or now - self._since < _STABLE_S:
            return None
        if now - self._since < _STABLE_SEND_S and any(self._is_send(rank, number) for rank, number, _ in cycle):
            return None
        waits, tags = [], ""
        for index, (rank, number, _) in enumerate(cycle):
            reader, other = self._readers[rank], self._readers[cycle[index - 1][0]]
            raw = reader.raw(number)
            if raw is None:
                return None
            record = reader.record(raw)
            waits.append((rank, f"{record.description} at {record.call_site}", other.rank))
            tags = tags or describe_tags(reader, other, raw)
        return _deadlock(waits, tags)

    def _cycle_through_rank(self) -> tuple[tuple[int, int, int], ...]:
        """Return a cycle; each rank in it waits for the one before it in the tuple.

        Returns:
            For each rank the number of the record in which it waits, and what it has moved of messages, for a send
            may end though no receive is posted for it.
        """
        waiting = {rank: raw for rank, each in self._readers.items() if (raw := current_wait(each)) is not None}
        paths = [[self._rank]] if self._rank in waiting else []
        for path in paths:
            for rank in self._waited_for(path[-1], waiting):
                if rank == self._rank:
                    return tuple((each, waiting[each].number, self._moved(each)) for each in path[::-1])
                if rank not in path:
                    paths.append([*path, rank])
        return ()

    def _is_send(self, rank: int, number: int) -> bool:
        reader = self._readers[rank]
        raw = reader.raw(number)
        return raw is not None and raw.peer >= 0 and not is_recv(reader, raw)

    def _moved(self, rank: int) -> int:
        return self._readers[rank].state_word(_WORDS.moved)

    def _waited_for(self, rank: int, waiting: Mapping[int, RawRecord]) -> Iterator[int]:
        """Yield those of the waiting ranks that `rank` waits for."""
        raw, own = waiting[rank], self._readers[rank]
        if raw.peer >= 0:
            peer = self._readers[raw.peer] if raw.peer in waiting and raw.peer != rank else None
            if peer is not None and not (is_message_sent if is_recv(own, raw) else is_receive_posted)(own, peer, raw):
                yield raw.peer
            return
        own_slot = own.group_slot(raw.key)
        members = set(own.members(own_slot)) if own_slot >= 0 else set()
        for other in waiting.keys() & members - {rank}:
            slot = self._readers[other].group_slot(raw.key)
            if slot < 0 or self._readers[other].last_sequence(slot) < raw.sequence:
                yield other


def current_wait(reader: RecorderReader) -> RawRecord | None:
    """Return the record in which a rank waits; None if it does not, or several of its threads communicate."""
    if reader.phase != "waits" or reader.state_word(_WORDS.threads) != 1:
        return None  # another thread may do what is waited for
    return reader.raw(reader.state_word(_WORDS.since_record))


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
        if is_peers_host and _lacks_message(state, rank, wait):
            yield wait.peer
        for group in state.groups.get(wait.key, []) if wait.peer < 0 else []:
            if group.last < wait.sequence:
                yield from (other for other in group.ranks if other != rank and other in waits)


def _lacks_message(state: HostState, rank: int, wait: Wait) -> bool:
    """Return whether the peer of a wait of `rank` has not sent, or received, the message; `state` is that of its host.

    Without the peer's channels, sends are counted without regard to tags, and every receive may have been posted.
    """
    channels = state.channels.get(wait.peer)
    if channels is None or not wait.channels:
        return not wait.is_send and state.sent.get(wait.peer, {}).get(rank, 0) < wait.messages
    return sum(channels.get(channel, 0) for channel in wait.channels) < wait.messages
