"""What a machine says of its ranks to the others: how they do, and the last collectives of each of their groups."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from ..recorder import Raw, Recording
from ..recorder.layout import LANES, State
from .reporting import row_of
from .waiting import is_recv, needed, waits_in

__all__ = ["LAST", "told_of"]

LAST = 6  # collectives of a group that are told; those before were compared in earlier rounds
_AT = State()


def told_of(
    recordings: Mapping[int, Recording], gone: Collection[int], stopped: Collection[int], skip: Collection[int]
) -> dict[str, Any]:
    """It, as JSON knows it.

    Args:
        recordings: of this machine's ranks.
        gone: those whose processes have ended.
        stopped: those whose processes have been stopped.
        skip: keys of groups that have no ranks on other machines.
    """
    ranks: dict[str, list[Any]] = {}
    groups: dict[str, list[list[Any]]] = {}
    for rank, recording in recordings.items():
        row = row_of(recording.state(), True, rank in gone, rank in stopped)
        call = row.call
        ranks[str(rank)] = [
            *(row.state, row.note, row.host, row.pid, row.batch, row.waiting_s),
            None if call is None else [call.what, call.place, call.source, call.number, call.group, call.batch],
            row.words[-2000:],
        ]
        for lane in range(LANES):
            key = recording.word((recording.layout.lanes >> 3) + lane)
            if key and key not in skip:
                groups.setdefault(str(key), []).append(_group(recording, lane, key))
    waits = {str(rank): found for rank, each in recordings.items() if (found := _waits(each)) is not None}
    sent = {str(rank): _sent(each) for rank, each in recordings.items()}
    alone = any(each.is_alone for rank, each in recordings.items() if rank not in gone)
    return {"ranks": ranks, "groups": _alike(groups), "waits": waits, "sent": sent, "alone": alone}


def _waits(recording: Recording) -> list[int] | None:
    """[number of the record, peer of a receive or -1, messages of its that are needed, group, sequence number]."""
    raw = waits_in(recording)
    if raw is None:
        return None
    if raw.peer < 0:
        return [raw.number, -1, 0, raw.key, raw.sequence]
    if raw.peer == recording.rank or not is_recv(recording, raw):  # from anybody, or a message to be sent
        return None
    return [raw.number, raw.peer, needed(recording, raw), 0, 0]


def _sent(recording: Recording) -> dict[str, int]:
    """How many messages it has sent, to those to whom it has sent any."""
    counts = ((peer, recording.messages(peer, sent=True)) for peer in range(recording.world_size))
    return {str(peer): count for peer, count in counts if count}


def _group(recording: Recording, lane: int, key: int) -> list[Any]:
    """[ranks, last sequence number, what it waits in or None, records, texts].

    What it waits in: the first that has not ended, the seconds since it was called, and those that the user allows.
    """
    head, records, waits = recording.head(lane), [], None
    for sequence in range(max(1, head + 1 - LAST), head + 1):
        raw = recording.raw(recording.row(lane, sequence))
        if raw is None or raw.key != key or raw.sequence != sequence:
            continue
        if not raw.left and waits is None:
            waits = [sequence, round(time.monotonic() - raw.entered, 1), recording.limit_s(lane)]
        records.append(_record(raw))
    return [[recording.rank], head, waits, records, [recording.text(n) for n in _texts(recording, lane, head)]]


def _record(raw: Raw) -> list[int]:
    return [raw.sequence, raw.fingerprint, raw.line, raw.batch, raw.loop, int(raw.name > 0)]


def _texts(recording: Recording, lane: int, head: int) -> tuple[int, ...]:
    """Numbers of what was called last, where, and of the group's name."""
    raw = recording.raw(recording.row(lane, head))
    return (0, 0, 0) if raw is None else (raw.what, raw.place, raw.group)


def _alike(groups: dict[str, list[list[Any]]]) -> dict[str, list[list[Any]]]:
    """Ranks of which the same is to be told, together: all of them as long as nothing is wrong."""
    joined: dict[str, list[list[Any]]] = {}
    for key, parts in groups.items():
        for part in parts:
            same = next((each for each in joined.setdefault(key, []) if _same(each, part)), None)
            if same is None:
                joined[key].append(part)
            else:
                same[0] += part[0]
    return joined


def _same(one: list[Any], other: list[Any]) -> bool:
    waits = (one[2] and one[2][0]) == (other[2] and other[2][0])
    return bool(waits and one[1] == other[1] and one[3] == other[3] and one[4] == other[4])
