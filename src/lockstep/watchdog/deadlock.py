"""Deadlocks: cycles of ranks that wait for each other, on one host and across hosts.

A rank in a collective waits for the ranks that have not called it; `new_group` and `monitored_barrier` are recorded as
collectives, too. A receive waits for its sender and a send for its receiver, by group and tag.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from ..flight_recorder import RecorderReader
from ..flight_recorder.layout import StateWords
from .report import Finding
from .states import Wait, channel_key, current_wait, is_recv

__all__ = ["CycleSearch", "LocalWaits", "Waits", "explained", "find_other_tag"]

_STABLE_S = 0.4  # ranks must have waited for each other for this long
_STABLE_SEND_S = 2.0  # the same where one of them sends: some transports move a message before it is received
_CAUSE = "Ranks communicate in different orders, or a message is received that no rank sends."
_ADVICE = "Issue matching calls in the same order on both sides, and match each recv with a send."
_TAGS_ADVICE = "Give a send and its recv the same tag."
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


class Waits(Protocol):
    """The ranks that wait, and what the others have done of that for which they wait."""

    @property
    def waits(self) -> Mapping[int, Wait]:
        """The operation of each rank that waits."""

    def missing_ranks(self, rank: int) -> Iterable[int]:
        """Return the ranks that have not called the collective in which `rank` waits."""

    def is_matched(self, rank: int) -> bool:
        """Return whether the other rank, which waits as well, has done its part of the message of `rank`."""

    def moved(self, rank: int) -> int:
        """Return what `rank` has moved of messages: a send may end though no receive is posted for it."""

    def described(self, rank: int) -> str:
        """Return the call in which `rank` waits, as text."""

    def other_tag(self, rank: int) -> int | None:
        """Return the tag of a message of the other rank that fits that of `rank` but for its tag; None without one."""


class CycleSearch:
    """Finds cycles that last.

    The states of ranks are not of one moment: a cycle counts only when it has existed for a while, and in the case of
    other hosts when all of them have published it again.
    """

    def __init__(self) -> None:
        self._seen: tuple[tuple[int, ...], ...] = ()
        self._since = 0.0
        self._counts: Mapping[int, int] = {}

    def find(self, waits: Waits, starts: Collection[int], counts: Mapping[int, int]) -> Finding | None:
        """Return the cycle through one of `starts` that has been found before, and still exists.

        Args:
            waits: of the ranks.
            starts: ranks that wait.
            counts: for each host a number that differs from one of its publications to the next.
        """
        now, cycle = time.monotonic(), _find_cycle(waits, starts)
        seen = tuple((rank, waits.waits[rank].record, waits.moved(rank)) for rank in cycle)
        if seen != self._seen:
            self._seen, self._since, self._counts = seen, now, counts
        has_send = any(waits.waits[rank].is_send for rank in cycle)
        is_new = now - self._since < (_STABLE_SEND_S if has_send else _STABLE_S)
        if not cycle or is_new or any(self._counts.get(host) == count for host, count in counts.items()):
            return None
        return _finding(waits, cycle)


def _find_cycle(waits: Waits, starts: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of a cycle, each of which waits for the one before it in the tuple; empty without one."""
    for start in starts:
        paths = [[start]]
        reached: set[int] = set()
        for path in paths:
            for rank in _waited_for(waits, path[-1]):
                if rank == start:
                    return tuple(reversed(path))
                if rank not in reached:
                    reached.add(rank)
                    paths.append([*path, rank])
    return ()


def _waited_for(waits: Waits, rank: int) -> list[int]:
    """Return those of the waiting ranks that `rank` waits for."""
    peer = waits.waits[rank].peer
    if peer < 0:
        return [other for other in waits.missing_ranks(rank) if other != rank and other in waits.waits]
    return [peer] if peer in waits.waits and not waits.is_matched(rank) else []


def _finding(waits: Waits, cycle: tuple[int, ...]) -> Finding:
    calls = [waits.described(rank) for rank in cycle]
    others = [cycle[index - 1] for index in range(len(cycle))]
    cause, advice = _CAUSE, _ADVICE
    if any(call.startswith("new_group(") for call in calls):
        cause, advice = _GROUPS
    elif all(waits.waits[rank].is_send for rank in cycle):
        cause, advice = _SENDS
    lines = [
        f"rank {rank} waits in {call} for rank {other}" for rank, call, other in zip(cycle, calls, others, strict=True)
    ]
    finding = Finding("desync", f"Deadlock: {'; '.join(lines)}.", (), cause, advice)
    for rank in cycle:
        tag = waits.other_tag(rank)
        if tag is not None:
            return explained(finding, rank, waits.waits[rank], tag)
    return finding


def explained(finding: Finding, rank: int, wait: Wait, tag: int | None) -> Finding:
    """Return the finding on the message in which `rank` waits, with the tags as its cause if the other has this `tag`.

    Args:
        finding: what is wrong.
        rank: the rank that waits.
        wait: its message.
        tag: that of the other rank's message; None if the tags do not differ.
    """
    if tag is None:
        return finding
    here, there = ("sends", "receives") if wait.is_send else ("receives", "sends")
    cause = f"The tags differ: rank {rank} {here} with tag {wait.tag}, rank {wait.peer} {there} with tag {tag}."
    return replace(finding, cause=cause, advice=_TAGS_ADVICE)


class LocalWaits:
    """The ranks of this host that wait, by their flight recorders; see `Waits`.

    Args:
        readers: of the flight recorders of this host, by rank.
    """

    def __init__(self, readers: Mapping[int, RecorderReader]) -> None:
        self._readers = readers
        self.waits = {rank: wait for rank, each in readers.items() if (wait := current_wait(each)) is not None}

    def missing_ranks(self, rank: int) -> list[int]:
        """See `Waits`."""
        wait, own = self.waits[rank], self._readers[rank]
        slot = own.group_slot(wait.key)
        members = own.members(slot) if slot >= 0 else ()
        return [other for other in members if other in self.waits and not self._has_called(other, wait)]

    def _has_called(self, rank: int, wait: Wait) -> bool:
        reader = self._readers[rank]
        slot = reader.group_slot(wait.key)
        return slot >= 0 and reader.last_sequence(slot) >= wait.sequence

    def is_matched(self, rank: int) -> bool:
        """See `Waits`."""
        wait = self.waits[rank]
        return wait.is_matched_by(rank, self._readers[wait.peer])

    def moved(self, rank: int) -> int:
        """See `Waits`."""
        return self._readers[rank].state_word(StateWords().moved)

    def described(self, rank: int) -> str:
        """See `Waits`."""
        reader = self._readers[rank]
        raw = reader.raw(self.waits[rank].record)
        if raw is None:
            return "a collective"
        record = reader.record(raw)
        return f"{record.description} at {record.call_site}"

    def other_tag(self, rank: int) -> int | None:
        """See `Waits`."""
        return find_other_tag(self._readers[rank], self.waits[rank], self._readers)


def find_other_tag(own: RecorderReader, wait: Wait, readers: Mapping[int, RecorderReader]) -> int | None:
    """Return the tag of a message that would fit that in which the rank of `own` waits, but for its tag.

    Returns:
        None if the other rank, of this host, has no such message without a counterpart.
    """
    raw, peer = own.raw(wait.record), readers.get(wait.peer)
    if raw is None or peer is None:
        return None
    sent = not wait.is_send  # by the peer
    source, target = (peer.rank, own.rank) if sent else (own.rank, peer.rank)
    for each in reversed(list(peer.raws())):
        if each.peer == own.rank and each.key == raw.key and is_recv(peer, each) != sent and each.tag != raw.tag:
            theirs, ours = (channel_key(side, raw.key, source, target, each.tag) for side in (sent, not sent))
            if peer.channel_messages(theirs) > own.channel_messages(ours):
                return each.tag
    return None
