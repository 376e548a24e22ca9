"""The report: what is wrong, what each rank was doing, the likely cause and what to do; as data and as a file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from .. import messages
from ..errors import DataError
from ..flight_recorder import RankState, Record, RecorderReader, jobs
from ..messages import Integer, List
from .diagnosis import exception_line
from .mismatch import Finding

__all__ = [
    "KINDS",
    "STATES",
    "Call",
    "CollectiveCalls",
    "RankCalls",
    "RankStatus",
    "Report",
    "from_json",
    "make_report",
    "rank_status",
    "read",
    "write_once",
]


# --- The report -------------------------------------------------------------------------------------------------------

KINDS = ("desync", "batches", "parameters", "lost", "raised", "left", "frozen", "stall")
"""What can be wrong: ranks call different collectives, are on different batches or have different parameters; or a rank
has died, has raised an exception, has exited too early, is stopped, or is too slow."""

STATES = ("waits", "runs", "raised", "died", "ended", "frozen", "lost")
"""What a rank can be doing. "lost": its host does not respond."""

_FORMAT = 1
_MAX_BYTES = 16 << 20  # 1,000 ranks with a traceback each are a tenth of this


class Call(msgspec.Struct, frozen=True):
    """A collective, as one rank has called it.

    Attributes:
        what: e.g. ``all_reduce(float32[10, 4], sum)``.
        call_site: e.g. ``train.py:31 in main``.
        source: the source text of that line.
        number: its sequence number in the group; 0 for a message.
        group: the group's name, "" for the default group.
        batch: the batch that the rank was on.
        name: what the collective is for, e.g. ``gradient all-reduce``; "" if it has no name.
    """

    what: str
    call_site: str = ""
    source: str = ""
    number: Integer = 0
    group: str = ""
    batch: Integer | None = None
    name: str = ""


class RankStatus(msgspec.Struct, frozen=True):
    """What a rank is doing.

    Attributes:
        rank: its global rank.
        state: one of `STATES`.
        note: a short explanation of the state.
        host: name of its host, "" if there is only one.
        pid: of its process, 0 if it is not known.
        batch: the batch that it is on.
        call: the collective in which it waits, or its last one.
        waiting_s: seconds that it has waited there; None if it does not wait.
        stack: of its main thread, innermost frame first.
        traceback: of the exception that it has raised.
    """

    rank: Integer
    state: str
    note: str = ""
    host: str = ""
    pid: Integer = 0
    batch: Integer | None = None
    call: Call | None = None
    waiting_s: float | None = None
    stack: List[str] = ()
    traceback: str = ""


class RankCalls(msgspec.Struct, frozen=True):
    """What some `ranks` have called alike; `call` is None for ranks that have called nothing."""

    ranks: List[Integer]
    call: Call | None = None


class CollectiveCalls(msgspec.Struct, frozen=True):
    """The collective of one sequence number in one group, as the ranks have called it."""

    number: Integer
    group: str
    calls: List[RankCalls]


class Report(msgspec.Struct, frozen=True):
    """The report on all ranks.

    Attributes:
        kind: one of `KINDS`.
        sentence: what is wrong, in one sentence.
        ranks: all ranks, in order.
        culprits: the ranks at fault, as far as they are known.
        last_collectives: the last collectives of a group; the ranks diverge at the last one.
        cause: the likely cause.
        advice: what to do.
        time: Unix time.
        program: the command line.
    """

    kind: str
    sentence: str
    ranks: List[RankStatus]
    culprits: List[Integer] = ()
    last_collectives: List[CollectiveCalls] = ()
    cause: str = ""
    advice: str = ""
    time: float = 0.0
    program: str = ""

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return messages.encode({"lockstep_report": _FORMAT, **msgspec.structs.asdict(self)})

    def with_rows(self, rows: Sequence[RankStatus]) -> Report:
        """Return the report with these `rows` in place of those of the same ranks."""
        new = {row.rank: row for row in rows}
        return msgspec.structs.replace(self, ranks=tuple(new.get(row.rank, row) for row in self.ranks))


def from_json(text: str) -> Report:
    """Parse a report.

    Raises:
        ValueError: `text` is not a report; says why.
    """
    value = messages.decode(text, object)
    if not isinstance(value, dict) or "lockstep_report" not in value:
        raise ValueError("it is JSON, but not a report of Lockstep's")
    if value["lockstep_report"] != _FORMAT:
        raise ValueError(f"it is of another version of Lockstep (format {_FORMAT} can be read)")
    report = messages.convert(value, Report)
    if report.kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}")
    if wrong := [row.rank for row in report.ranks if row.state not in STATES]:
        raise ValueError(f"state of rank {wrong[0]}: expected one of {', '.join(STATES)}")
    return report


def read(path: Path) -> Report:
    """Read the report in the file `path`.

    Raises:
        DataError: the file cannot be read, or is not a report.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
        return from_json(data.decode())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also of JSON and UTF-8
        raise DataError(f"{path} is damaged, or no report of Lockstep's: {error}") from None


def write_once(folder: Path, report: Report) -> bool:
    """Write ``report.json`` into `folder` unless it exists already; return whether it was written.

    The file appears atomically.

    Raises:
        OSError: it cannot be written.
    """
    # two threads of a process may do so at the same moment
    path, draft = folder / "report.json", folder / f".report-{os.getpid()}-{threading.get_ident()}"
    try:
        draft.write_text(report.to_json())
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            draft.unlink()
    return True


# --- Making a report from the flight recorders ------------------------------------------------------------------------

_SHOWN = 5  # last collectives, the one at which the ranks diverge included
_STATES = {"runs": "runs", "waits": "waits", "left": "ended", "ended": "ended", "raised": "raised"}

Stacks = Mapping[int, tuple[str, ...]]


def make_report(
    finding: Finding, readers: Mapping[int, RecorderReader], rows: Mapping[int, RankStatus], world_size: int
) -> Report:
    """Return the report of a finding.

    Args:
        finding: what is wrong.
        readers: of the flight recorders of this host's ranks, in order.
        rows: the status of each rank, as far as it is known.
        world_size: number of ranks.
    """
    return Report(
        finding.kind,
        finding.sentence,
        tuple(rows[rank] for rank in sorted(rows) if rank < world_size),
        finding.culprits,
        _last_collectives(finding, readers),
        finding.cause,
        finding.advice,
        time.time(),
        jobs.command_line(),
    )


def rank_status(
    state: RankState, several_hosts: bool, dead: bool, stopped: bool, stack: tuple[str, ...] = ()
) -> RankStatus:
    """Return the status of one rank of this host.

    Args:
        state: from its flight recorder.
        several_hosts: whether to include the name of its host.
        dead: whether its process has ended.
        stopped: whether its process is stopped.
        stack: of its main thread.
    """
    now = time.monotonic()
    kind, note = _STATES[state.phase], ""
    if kind == "raised":
        note = exception_line(state.traceback)
    elif kind == "ended":
        note = "it destroyed its process groups" if state.phase == "left" else "the program reached its end"
    elif dead:
        kind, note = "died", f"process {state.pid} is gone, without an exception or a regular exit"
    elif stopped:
        kind, note = "frozen", f"process {state.pid} is stopped by a signal"
    elif now - state.heartbeat > 3:
        note = f"no heartbeat for {now - state.heartbeat:.1f} s"
    elif kind == "runs" and state.call is not None and state.call.left is None:
        note = "its last collective is still pending"
    elif kind == "runs" and state.activity:
        note = f"it is in {state.activity}"
    return RankStatus(
        state.rank,
        kind,
        note,
        state.host if several_hosts else "",
        state.pid,
        state.batch,
        None if state.call is None else _call(state.call),
        now - state.call.entered if kind == "waits" and state.call is not None else None,
        stack,
        state.traceback if kind == "raised" else "",
    )


def _call(record: Record) -> Call:
    batch = None if record.finished else record.batch  # after its loop a collective belongs to no batch
    return Call(record.what, record.call_site, record.source, record.sequence, record.group, batch, record.name)


def _last_collectives(finding: Finding, readers: Mapping[int, RecorderReader]) -> tuple[CollectiveCalls, ...]:
    if not finding.key:
        return ()
    first = max(1, finding.sequence + 1 - _SHOWN)
    calls = {rank: _calls(reader, finding.key) for rank, reader in readers.items()}
    members = {rank: found for rank, found in calls.items() if found is not None}
    group = next((call.group for found in members.values() for call in found.values()), "")
    return tuple(_collective_calls(number, group, members) for number in range(first, finding.sequence + 1))


def _calls(reader: RecorderReader, key: int) -> dict[int, Record] | None:
    """Return what a rank has called in a group, by sequence number; None if it is not in the group."""
    if reader.group_slot(key) < 0:
        return None
    return {raw.sequence: reader.record(raw) for raw in reader.raws() if raw.key == key and raw.sequence}


def _collective_calls(number: int, group: str, members: Mapping[int, Mapping[int, Record]]) -> CollectiveCalls:
    records = {rank: calls.get(number) for rank, calls in members.items()}
    in_one_loop = len({record.loop for record in records.values() if record is not None}) == 1
    ranks_by_call: dict[tuple[str, str] | None, list[int]] = {}
    first: dict[tuple[str, str] | None, Call | None] = {}
    for rank, record in records.items():
        call = None if record is None else _call(record)
        if call is not None and not in_one_loop:  # batches of different loops say nothing about each other
            call = msgspec.structs.replace(call, batch=None)
        same = (call.what, call.call_site) if call is not None else None
        ranks_by_call.setdefault(same, []).append(rank)
        first.setdefault(same, call)
    return CollectiveCalls(
        number, group, tuple(RankCalls(tuple(ranks), first[same]) for same, ranks in ranks_by_call.items())
    )
