"""Converts the records of a run to a trace for Perfetto and Chrome, with one track per rank."""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import flight_recorder
from .errors import DataError, counted
from .flight_recorder import Record

__all__ = ["RankTime", "write_trace"]

_RECORDS = "rank-*.records"
# for collectives in flight at the same time; further ones are drawn as instant events
_MAX_TRACKS = 8

# further events begin with a comma
_FIRST = {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}}

_Key = tuple[str, int, str, int]
"""Identifies a collective on all ranks: group, sequence number, signature, and how often these
occurred before.
"""


@dataclass
class RankTime:
    """How one rank spent its time.

    Attributes:
        rank: its number.
        host: its host.
        collectives: number of collectives and point-to-point messages.
        seconds: from the start of the first to the end of the last.
        inside_s: seconds with a collective in flight.
        waiting_s: seconds of these in which another member of the group had not yet entered the
            collective.
        last: number of collectives that this rank entered last.
    """

    rank: int
    host: str
    collectives: int = 0
    seconds: float = 0.0
    inside_s: float = 0.0
    waiting_s: float = 0.0
    last: int = 0


@dataclass
class _Source:
    """The records of one rank. Attributes: offset, from their clock to Unix time; read, returns
    them oldest first.
    """

    rank: int
    size: int
    host: str
    offset: float
    read: Callable[[], Iterable[Record]]


@dataclass
class _Arrivals:
    """The times of the first and last event of all ranks, and the last arrival at each collective.

    Attributes:
        first, last: Unix times.
        of: collective → (when its last member entered it, that member's rank, number of members
            that entered it).
    """

    first: float = math.inf
    last: float = -math.inf
    of: dict[_Key, tuple[float, int, int]] = field(default_factory=dict)


def write_trace(
    folder: Path, path: Path, further: Iterable[Mapping[str, Any]] = ()
) -> list[RankTime]:
    """Write the trace of the run whose records are in `folder` to `path`, compressed if that ends
    in ".gz".

    Each rank has a track with its computation, every collective, and within that the time until the
    last member of the group entered it; collectives in flight at the same time have further tracks
    below. The ranks of one host share a clock; between hosts, times are as exact as their clocks
    agree.

    Experimental: may change in any release.

    Args:
        folder: the folder given to ``lockstep run --timeline``, or the folder with the flight
            records of a running job, which hold the last few hundred collectives.
        path: the output file; it is written atomically.
        further: events of the Trace Event Format to add after those of the ranks.

    Returns:
        How each rank spent its time.

    Raises:
        DataError: there are no records, or they cannot be read.
        OSError: the trace cannot be written.

    References:
        The Trace Event Format, as Chrome's about:tracing documents it.
    """
    sources = _sources(folder)
    try:
        arrivals = _find_arrivals(sources)
        if arrivals.last < arrivals.first:
            raise DataError(
                f"{folder} contains the files of {counted(len(sources), 'rank')}, without any "
                "collective"
            )
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with _open(draft, path.suffix == ".gz") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + json.dumps(_FIRST))
                times = [_write_rank(file, source, arrivals) for source in sources]
                file.writelines(f",\n{json.dumps(event)}" for event in further)
                file.write("\n]}\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder} contains damaged records: {error}") from None
    return times


def _open(path: Path, compressed: bool) -> IO[str]:
    return (
        gzip.open(path, "wt", encoding="utf-8") if compressed else path.open("w", encoding="utf-8")
    )


def _sources(folder: Path) -> list[_Source]:
    sources = _sources_of_logs(folder) or _sources_of_job(folder)
    if not sources:
        hint = "`lockstep run --timeline DIR` or LOCKSTEP_TIMELINE=DIR writes them."
        raise DataError(
            f"{folder}: expected a folder with records of ranks, {_RECORDS}, got one without. "
            f"{hint}"
        )
    if len({source.size for source in sources}) > 1:
        hint = "Remove it, and let the next run write to an empty one."
        raise DataError(
            f"{folder} contains records of several runs, with different numbers of ranks. {hint}"
        )
    offsets: dict[str, float] = {}
    # the ranks of one host share a clock, but measured its offset at different times
    for source in sources:
        source.offset = offsets.setdefault(source.host, source.offset)
    return sorted(sources, key=lambda source: source.rank)


def _sources_of_logs(folder: Path) -> list[_Source]:
    sources = []
    for path in folder.glob(_RECORDS):
        try:
            header = flight_recorder.read_log_header(path)
            rank = int(header["rank"])
            size = int(header["world_size"])
            host = str(header["host"])
            offset = float(header["unix_offset"])
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}") from None
        sources.append(
            _Source(rank, size, host, offset, functools.partial(flight_recorder.read_log, path))
        )
    return sources


def _sources_of_job(folder: Path) -> list[_Source]:
    sources = []
    for rank, reader in flight_recorder.open_job(folder).items():
        records = reader.records()
        sources.append(
            _Source(rank, reader.world_size, reader.host, reader.unix_offset, records.copy)
        )
        reader.close()
    return sources


def _find_arrivals(sources: Iterable[_Source]) -> _Arrivals:
    arrivals = _Arrivals()
    for source in sources:
        for record, key in _keyed_records(source):
            entered = record.entered + source.offset
            arrivals.first = min(arrivals.first, entered)
            arrivals.last = max(arrivals.last, entered, (record.left or 0.0) + source.offset)
            latest, rank, count = arrivals.of.get(key, (-math.inf, 0, 0))
            if entered > latest:
                latest = entered
                rank = source.rank
            arrivals.of[key] = latest, rank, count + 1
    return arrivals


def _keyed_records(source: _Source) -> Iterator[tuple[Record, _Key]]:
    """Yield the records with their keys; a program may create several groups of the same name, one
    after the other.
    """
    seen: Counter[tuple[str, int, str]] = Counter()
    for record in source.read():
        if not (_is_time(record.entered) and (record.left is None or _is_time(record.left))):
            raise ValueError(f"invalid times in record {record.number} of rank {source.rank}")
        name = (
            record.group,
            record.sequence,
            record.what if record.sequence else f"{source.rank} {record.number}",
        )
        yield record, (*name, seen[name])
        seen[name] += record.sequence > 0


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass
class _EventWriter:
    """Writes the events of one rank. Attributes: zero, the Unix time that is 0 in the trace."""

    file: IO[str]
    rank: int
    zero: float

    def write_slice(
        self, track: int, name: str, category: str, start: float, end: float, **details: Any
    ) -> None:
        first = self._nanoseconds(start)
        last = self._nanoseconds(end)
        # Perfetto rounds both down to whole nanoseconds, and drops a slice that overlaps with the
        # next one
        times = {"ts": first / 1e3, "dur": max(0, last - first - 1) / 1e3}
        self._write(
            {"name": name, "cat": category, "ph": "X", "tid": track, **times, "args": details}
        )

    def write_instant(self, name: str, time: float, **details: Any) -> None:
        ts = self._nanoseconds(time) / 1e3
        self._write(
            {
                "name": name,
                "cat": "collective",
                "ph": "i",
                "s": "t",
                "tid": 1,
                "ts": ts,
                "args": details,
            }
        )

    def write_metadata(self, key: str, track: int = 0, **values: Any) -> None:
        self._write({"name": key, "ph": "M", "tid": track, "args": values})

    def _nanoseconds(self, time: float) -> int:
        return round((time - self.zero) * 1e9)

    def _write(self, event: dict[str, Any]) -> None:
        self.file.write(",\n" + json.dumps({"pid": self.rank, **event}))


def _write_rank(file: IO[str], source: _Source, arrivals: _Arrivals) -> RankTime:
    writer = _EventWriter(file, source.rank, arrivals.first)
    time = RankTime(source.rank, source.host)
    writer.write_metadata(
        "process_name", name=f"rank {source.rank}" + (f" on {source.host}" if source.host else "")
    )
    writer.write_metadata("process_sort_index", sort_index=source.rank)
    writer.write_metadata("thread_name", 0, name="batches")
    writer.write_metadata("thread_name", 1, name=f"rank {source.rank}")
    busy_until = [-math.inf] * _MAX_TRACKS
    start = covered = -math.inf
    batches = _BatchSlices(writer)
    for record, key, end in _records_with_ends(source, arrivals):
        entered = record.entered + source.offset
        if covered == -math.inf:
            start = covered = entered
        if entered > covered:
            writer.write_slice(1, "compute", "compute", covered, entered)
        latest, last_rank, count = arrivals.of[key]
        waited_until = min(latest, end or entered) if last_rank != source.rank else entered
        _write_collective(writer, busy_until, record, entered, end, waited_until)
        batches.add(record, entered)
        time.collectives += 1
        time.last += count > 1 and last_rank == source.rank
        time.inside_s += max(0.0, (end or entered) - max(entered, covered))
        time.waiting_s += max(0.0, min(waited_until, end or entered) - max(entered, covered))
        covered = max(covered, end or entered)
    batches.close(covered)
    time.seconds = covered - start if time.collectives else 0.0
    return time


def _records_with_ends(
    source: _Source, arrivals: _Arrivals
) -> Iterator[tuple[Record, _Key, float | None]]:
    """Yield the records with their ends; the last record of a rank, if unfinished, lasts to the end
    of the trace.
    """
    previous: tuple[Record, _Key] | None = None
    for record, key in _keyed_records(source):
        if previous is not None:
            yield (
                *previous,
                None if previous[0].left is None else previous[0].left + source.offset,
            )
        previous = record, key
    if previous is not None:
        yield (
            *previous,
            arrivals.last if previous[0].left is None else previous[0].left + source.offset,
        )


def _write_collective(
    writer: _EventWriter,
    busy_until: list[float],
    record: Record,
    entered: float,
    end: float | None,
    waited_until: float,
) -> None:
    details = {"call site": record.call_site, "source": record.source, "batch": record.batch}
    details |= {"group": record.group or "all ranks", "number": record.sequence}
    track = next((track for track, until in enumerate(busy_until) if until <= entered), None)
    if end is None or track is None:
        writer.write_instant(record.what, entered, **details)
        return
    if track and busy_until[track] == -math.inf:
        writer.write_metadata("thread_name", track + 1, name=f"concurrent {track}")
    busy_until[track] = max(end, entered)
    if record.left is None:
        details["ended"] = "no"
    writer.write_slice(track + 1, record.name or record.what, "collective", entered, end, **details)
    if waited_until > entered:
        writer.write_slice(track + 1, "waiting", "waiting", entered, waited_until)


@dataclass
class _BatchSlices:
    """Writes a slice for each batch of a rank."""

    writer: _EventWriter
    batch: int | None = None
    since: float = 0.0

    def add(self, record: Record, entered: float) -> None:
        batch = None if record.finished else record.batch
        if batch != self.batch:
            self.close(entered)
            self.batch = batch
            self.since = entered

    def close(self, now: float) -> None:
        if self.batch is not None:
            self.writer.write_slice(0, f"batch {self.batch}", "batch", self.since, now)
        self.batch = None
