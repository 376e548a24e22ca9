"""Makes a report of what the recordings of all ranks say."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..recorder import RankState, Record, Recording
from .causes import first_line
from .finding import Finding
from .meeting import program
from .report import Call, Parting, RankRow, Report, Said

__all__ = ["make_report", "row_of"]

_SHOWN = 5  # collectives before the ranks part, that one included
_STATES = {"runs": "runs", "waits": "waits", "left": "ended", "ended": "ended", "raised": "raised"}

Stacks = Mapping[int, tuple[str, ...]]


def make_report(
    finding: Finding, recordings: Mapping[int, Recording], rows: Mapping[int, RankRow], world_size: int
) -> Report:
    """The report of a finding.

    Args:
        finding: what is wrong.
        recordings: of the ranks of this machine, in order.
        rows: what is known of each rank; those that nothing is known of are left out.
        world_size: number of ranks.
    """
    return Report(
        finding.kind,
        finding.sentence,
        tuple(rows[rank] for rank in sorted(rows) if rank < world_size),
        finding.culprits,
        _partings(finding, recordings),
        finding.cause,
        finding.advice,
        time.time(),
        program(),
    )


def row_of(state: RankState, several_hosts: bool, dead: bool, stopped: bool, stack: tuple[str, ...] = ()) -> RankRow:
    """What is known of one rank, of this machine.

    Args:
        state: what its recording says.
        several_hosts: whether the name of its machine is worth saying.
        dead: whether its process has ended.
        stopped: whether its process has been stopped.
        stack: where it is.
    """
    now = time.monotonic()
    kind, note = _STATES[state.phase], ""
    if kind == "raised":
        note = first_line(state.words)
    elif kind == "ended":
        note = "it has destroyed its groups" if state.phase == "left" else "the program has come to its end"
    elif dead:
        kind, note = "died", f"process {state.pid} is gone, without an exception or an exit"
    elif stopped:
        kind, note = "frozen", f"process {state.pid} is stopped by a signal"
    elif now - state.heartbeat > 3:
        note = f"no heartbeat for {now - state.heartbeat:.1f} s"
    elif kind == "runs" and state.call is not None and state.call.left is None:
        note = "what it has called last is still under way"
    return RankRow(
        state.rank,
        kind,
        note,
        state.host if several_hosts else "",
        state.pid,
        state.batch,
        None if state.call is None else _call(state.call),
        now - state.call.entered if kind == "waits" and state.call is not None else None,
        stack,
        state.words if kind == "raised" else "",
    )


def _call(record: Record) -> Call:
    return Call(record.what, record.place, record.source, record.sequence, record.group, record.batch)


def _partings(finding: Finding, recordings: Mapping[int, Recording]) -> tuple[Parting, ...]:
    if not finding.key:
        return ()
    first = max(1, finding.sequence + 1 - _SHOWN)
    calls = {rank: _calls(recording, finding.key) for rank, recording in recordings.items()}
    members = {rank: found for rank, found in calls.items() if found is not None}
    group = next((call.group for found in members.values() for call in found.values()), "")
    return tuple(_parting(number, group, members) for number in range(first, finding.sequence + 1))


def _calls(recording: Recording, key: int) -> dict[int, Call] | None:
    """What a rank has called in a group, by sequence number; None for one that is not in it."""
    if recording.lane(key) < 0:
        return None
    return {raw.sequence: _call(recording.record(raw)) for raw in recording.raws() if raw.key == key and raw.sequence}


def _parting(number: int, group: str, members: Mapping[int, Mapping[int, Call]]) -> Parting:
    said: dict[tuple[str, str] | None, list[int]] = {}
    first: dict[tuple[str, str] | None, Call | None] = {}
    for rank, calls in members.items():
        call = calls.get(number)
        same = (call.what, call.place) if call is not None else None
        said.setdefault(same, []).append(rank)
        first.setdefault(same, call)
    return Parting(number, group, tuple(Said(tuple(ranks), first[same]) for same, ranks in said.items()))
