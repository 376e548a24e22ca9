"""Deadlocks: cycles of ranks that wait for each other, on one host and across hosts.

A rank in a collective waits for the ranks that have not called it; `new_group` and
`monitored_barrier` are recorded as collectives, too. A receive waits for its sender and a send for
its receiver, by group and tag.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..flight_recorder import RecorderReader
from .report import Finding
from .states import JobStates, Wait, channel_key, is_recv

_STABLE_S = 0.4  # ranks must have waited for each other for this long
_STABLE_SEND_S = (
    2.0  # the same where one of them sends: some transports move a message before it is received
)
_CAUSE = "Ranks communicate in different orders, or a message is received that no rank sends."
_ADVICE = "Issue matching calls in the same order on both sides, and match each recv with a send."
_TAGS_ADVICE = "Give a send and its recv the same tag."
_SENDS = (
    "Each of these ranks sends first: a send returns when its message has been received, unless "
    "the transport has room to keep it, so that it works with small messages and not with large "
    "ones.",
    "Let one side receive first, or use isend and irecv, or batch_isend_irecv, and wait for them "
    "afterwards.",
)
_GROUPS = (
    "new_group is called on some of the ranks only, or ranks make their groups in different "
    "orders.",
    "Call new_group on every rank, in the same order and with the same ranks; with "
    "use_local_synchronization=True, on all ranks of the group.",
)


class CycleSearch:
    """Finds cycles that last.

    The states of ranks are not of one moment: a cycle counts only when it has existed for a while,
    and in the case of other hosts when all of them have published it again.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int]] = []
        self._since = 0.0
        self._counts: Mapping[int, int] = {}

    def find(
        self, job: JobStates, starts: Iterable[int], counts: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Return the ranks of a cycle that has been found before and still exists; each waits for
        the one before it.

        Args:
            job: the states of the ranks.
            starts: ranks that wait, through one of which the cycle is to go.
            counts: for each host a number that differs from one of its publications to the next.
        """
        now = time.monotonic()
        cycle = _find_cycle(job, starts)
        waits = [job.waits[rank] for rank in cycle]
        seen = [(rank, wait.record, wait.moved) for rank, wait in zip(cycle, waits, strict=True)]
        if seen != self._seen:
            self._seen = seen
            self._since = now
            self._counts = counts
        stable_s = _STABLE_SEND_S if any(wait.is_send for wait in waits) else _STABLE_S
        if now - self._since < stable_s or any(
            self._counts.get(host) == count for host, count in counts.items()
        ):
            return ()
        return cycle

    def forget(self) -> None:
        """Forget the cycle that has been found: a rank of it waits no more."""
        self._seen = []


def _find_cycle(job: JobStates, starts: Iterable[int]) -> tuple[int, ...]:
    for start in starts:
        paths = [[start]]
        reached: set[int] = set()
        for path in paths:
            for rank in _waited_for(job, path[-1]):
                if rank == start:
                    return tuple(reversed(path))
                if rank not in reached:
                    reached.add(rank)
                    paths.append([*path, rank])
    return ()


def _waited_for(job: JobStates, rank: int) -> list[int]:
    """Return those of the waiting ranks that `rank` waits for."""
    wait = job.waits[rank]
    if wait.peer < 0:
        return [
            other
            for other in job.missing(wait.key, wait.sequence)
            if other != rank and other in job.waits
        ]
    return [wait.peer] if wait.peer in job.waits and not job.is_matched(rank) else []


def deadlock_finding(
    cycle: tuple[int, ...],
    waits: Mapping[int, Wait],
    calls: Mapping[int, str],
    tags: Mapping[int, int | None],
) -> Finding:
    """Return the finding for a cycle of ranks, each of which waits for the one before it.

    Args:
        cycle: these ranks.
        waits: the operation of each.
        calls: the same as text.
        tags: see `explained`, for each of them.
    """
    lines = [
        f"rank {rank} waits in {calls[rank]} for rank {cycle[index - 1]}"
        for index, rank in enumerate(cycle)
    ]
    cause = _CAUSE
    advice = _ADVICE
    if any(calls[rank].startswith("new_group(") for rank in cycle):
        cause, advice = _GROUPS
    elif all(waits[rank].is_send for rank in cycle):
        cause, advice = _SENDS
    finding = Finding("desync", f"Deadlock: {'; '.join(lines)}.", (), cause, advice)
    tagged = next((rank for rank in cycle if tags[rank] is not None), None)
    return finding if tagged is None else explained(finding, tagged, waits[tagged], tags[tagged])


def explained(finding: Finding, rank: int, wait: Wait, tag: int | None) -> Finding:
    """Return the finding on the message in which `rank` waits, with the tags as its cause if they
    differ.

    Args:
        finding: what is wrong.
        rank: the rank that waits.
        wait: its message.
        tag: of the message of the other rank that would fit but for its tag; None if there is none.
    """
    if tag is None:
        return finding
    here, there = ("sends", "receives") if wait.is_send else ("receives", "sends")
    cause = (
        f"The tags differ: rank {rank} {here} with tag {wait.tag}, rank {wait.peer} {there} with "
        f"tag {tag}."
    )
    return replace(finding, cause=cause, advice=_TAGS_ADVICE)


def find_other_tag(
    reader: RecorderReader, wait: Wait, readers: Mapping[int, RecorderReader]
) -> int | None:
    """Return the tag of a message that would fit that in which the rank of `reader` waits, but for
    its tag.

    Returns:
        None if the other rank, of this host, has no such message without a counterpart.
    """
    raw = reader.raw(wait.record)
    peer = readers.get(wait.peer)
    if raw is None or peer is None:
        return None
    sent = not wait.is_send  # by the peer
    source, target = (peer.rank, reader.rank) if sent else (reader.rank, peer.rank)
    for candidate in reversed(list(peer.raws())):
        if (
            candidate.peer == reader.rank
            and candidate.key == raw.key
            and is_recv(peer, candidate) != sent
            and candidate.tag != raw.tag
        ):
            theirs, ours = (
                channel_key(side, raw.key, source, target, candidate.tag)
                for side in (sent, not sent)
            )
            if peer.channel_messages(theirs) > reader.channel_messages(ours):
                return candidate.tag
    return None
