"""The part of a timeline that Horovod's users know: a row for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.recorder import Record, log_header, read_log

__all__ = ["tensor_rows"]


@dataclass
class _Row:
    """Attributes: pid, of its events; until, when each of its lanes is free, for operations under way together."""

    pid: int
    until: list[float] = field(default_factory=list)

    def lane(self, start: float, end: float) -> int:
        """One that is free from `start`, and taken until `end` from now on."""
        found = next((lane for lane, until in enumerate(self.until) if until <= start), len(self.until))
        self.until[found : found + 1] = [end]
        return found


def tensor_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Events for a trace of the ranks whose records are in `folder`, which share a clock; 0 is when the first began.

    An operation is NEGOTIATE_ALLREDUCE or the like from when the first rank asks for it until the last one does, with a
    mark at each rank's moment, and ALLREDUCE until all have its result. Operations without names share a row. The rows
    have the numbers of processes that follow those of the ranks. CYCLE_START is a mark where a round of the ranks has
    begun on rank 0, if these were noted.
    """
    size, offset, operations = 0, 0.0, dict[tuple[str, int], dict[int, Record]]()
    for path in sorted(folder.glob("rank-*.records")):
        header = log_header(path)
        size, offset = header["world_size"], header["unix_offset"]
        for record in read_log(path):
            operations.setdefault((record.group, record.sequence), {})[header["rank"]] = record
    in_order = sorted(operations.values(), key=_first)
    zero = _first(in_order[0]) if in_order else 0.0
    start = {"start_time_since_epoch_in_micros": round((zero + offset) * 1e6)}
    yield {"name": next(iter(start)), "ph": "M", "pid": 0, "args": start}
    yield from _cycles(folder / "rank-0.cycles", zero)
    rows: dict[str, _Row] = {}
    for ranks in in_order:
        title = _title(next(iter(ranks.values())))
        if title not in rows:
            rows[title] = _Row(size + len(rows))
            yield {"name": "process_name", "ph": "M", "pid": rows[title].pid, "args": {"name": title}}
            yield {"name": "process_sort_index", "ph": "M", "pid": rows[title].pid, "args": {"sort_index": size}}
        yield from _events(rows[title], ranks, zero)


def _events(row: _Row, ranks: Mapping[int, Record], zero: float) -> Iterator[dict[str, Any]]:
    asked = {rank: record.entered for rank, record in ranks.items()}
    first, last = min(asked.values()), max(asked.values())
    end = max(record.left or last for record in ranks.values())
    record = next(iter(ranks.values()))
    kind = record.what.partition(" ")[0].upper()
    place = {"pid": row.pid, "tid": row.lane(first, end)}
    form = {"form": record.what.partition(" (")[2].removesuffix(")"), "number": record.sequence}
    yield {"name": f"NEGOTIATE_{kind}", "ph": "X", **place, **_times(first - zero, last - zero)}
    for rank, moment in sorted(asked.items()):
        yield {"name": str(rank), "ph": "i", "s": "t", **place, "ts": _times(moment - zero)["ts"]}
    yield {"name": kind, "ph": "X", **place, **_times(last - zero, end - zero), "args": form}


def _cycles(path: Path, zero: float) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        if float(line) >= zero:
            yield {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": _times(float(line) - zero)["ts"]}


def _first(ranks: Mapping[int, Record]) -> float:
    return min(record.entered for record in ranks.values())


def _title(record: Record) -> str:
    kind, _, about = record.what.partition(" ")
    name = about.partition(" (")[0]
    shared, unnamed, _ = name.rpartition(".noname.")
    title = f"{shared}, unnamed" if unnamed and not shared.count(".") else f"{kind}.{name}"
    return f"{title} of {record.group}" if record.group else title


def _times(start: float, end: float = 0.0) -> dict[str, float]:
    """In microseconds, by whole nanoseconds: viewers drop what reaches into the next."""
    first, last = round(start * 1e9), round(end * 1e9)
    return {"ts": first / 1e3, "dur": max(0, last - first - 1) / 1e3}
