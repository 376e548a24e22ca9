"""The records of a run as a trace that Perfetto and Chrome show: a lane for each rank."""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import recorder
from .errors import DataError
from .recorder import Record

__all__ = ["RankTime", "write_trace"]

_RECORDS = "rank-*.records"
_LANES = 8  # for collectives that are under way together; more are drawn as marks

_FIRST = {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}}  # all others follow a comma

_Key = tuple[str, int, str, int]


@dataclass
class RankTime:
    """Where the time of one rank has gone.

    Attributes:
        rank: its number.
        host: its machine.
        collectives: how many collectives and messages there are.
        seconds: from the first to the end of the last.
        inside_s: seconds in which one was under way.
        waiting_s: seconds of these in which a member of the group had not come yet.
        last: in how many collectives it was the one that came last.
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
    """The records of one rank. Attributes: offset, from their clock to the common one; read, gives the oldest first."""

    rank: int
    size: int
    host: str
    offset: float
    read: Callable[[], Iterable[Record]]


@dataclass
class _Span:
    """First and last time of all ranks, and for each collective when its last member came, and who that was."""

    first: float = math.inf
    last: float = -math.inf
    came: dict[_Key, tuple[float, int, int]] = field(default_factory=dict)  # when, who, and how many have come


def write_trace(folder: Path, path: Path) -> list[RankTime]:
    """Write the trace of the run whose records are in `folder` to `path`, compressed where that ends in ".gz".

    Each rank has a lane with what it computed, every collective, and within that the time until the last member of the
    group came; collectives that are under way together have lanes of their own below. The ranks of one machine share a
    clock; that of several machines is as exact as their clocks agree.

    Args:
        folder: what ``lockstep run --timeline`` was given, or the folder of a running job's recordings, which hold the
            last few hundred collectives.
        path: of the file; it is there whole or not at all.

    Returns:
        Where each rank's time has gone.

    Raises:
        DataError: there are no records, or they cannot be read.
        OSError: the trace cannot be written.

    References:
        The Trace Event Format, as Chrome's about:tracing documents it.
    """
    sources = _sources(folder)
    try:
        span = _survey(sources)
        if span.last < span.first:
            raise DataError(f"{folder} holds the files of {len(sources)} ranks, and no collective in any of them")
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with _opened(draft, path.suffix == ".gz") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + json.dumps(_FIRST))
                times = [_write_rank(file, source, span) for source in sources]
                file.write("\n]}\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder} holds records that are damaged: {error}") from None
    return times


def _opened(path: Path, compressed: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if compressed else path.open("w", encoding="utf-8")


def _sources(folder: Path) -> list[_Source]:
    found = _files(folder) or _live(folder)
    if not found:
        hint = "`lockstep run --timeline DIR` or LOCKSTEP_TIMELINE=DIR makes them."
        raise DataError(f"{folder}: expected a folder with records of ranks, {_RECORDS}, got one without. {hint}")
    if len({source.size for source in found}) > 1:
        hint = "Remove it, and let the next run write to an empty one."
        raise DataError(f"{folder} holds records of several runs, with different numbers of ranks. {hint}")
    offsets: dict[str, float] = {}
    for source in found:  # ranks of one machine have one clock, and have asked for the time of day at different moments
        source.offset = offsets.setdefault(source.host, source.offset)
    return sorted(found, key=lambda source: source.rank)


def _files(folder: Path) -> list[_Source]:
    found = []
    for path in folder.glob(_RECORDS):
        try:
            header = recorder.log_header(path)
            rank, size = int(header["rank"]), int(header["world_size"])
            host, offset = str(header["host"]), float(header["unix_offset"])
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}") from None
        found.append(_Source(rank, size, host, offset, functools.partial(recorder.read_log, path)))
    return found


def _live(folder: Path) -> list[_Source]:
    found = []
    for rank, recording in recorder.open_job(folder).items():
        records = recording.records()
        found.append(_Source(rank, recording.world_size, recording.host, recording.unix_offset, records.copy))
        recording.close()
    return found


# --- first look: when did the last member come? ---------------------------------------------------------------


def _survey(sources: Iterable[_Source]) -> _Span:
    span = _Span()
    for source in sources:
        for record, key in _keyed(source):
            entered = record.entered + source.offset
            span.first = min(span.first, entered)
            span.last = max(span.last, entered, (record.left or 0.0) + source.offset)
            when, who, count = span.came.get(key, (-math.inf, 0, 0))
            span.came[key] = (entered, source.rank, count + 1) if entered > when else (when, who, count + 1)
    return span


def _keyed(source: _Source) -> Iterator[tuple[Record, _Key]]:
    """The records, with what the same collective is called on every rank; a group may be made again under its name."""
    seen: Counter[tuple[str, int, str]] = Counter()
    for record in source.read():
        if not (_is_time(record.entered) and (record.left is None or _is_time(record.left))):
            raise ValueError(f"the times of rank {source.rank}'s record {record.number}")
        name = (record.group, record.sequence, record.what if record.sequence else f"{source.rank} {record.number}")
        yield record, (*name, seen[name])
        seen[name] += record.sequence > 0


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --- second look: draw ----------------------------------------------------------------------------------------


@dataclass
class _Pen:
    """Writes events of one rank. Attributes: zero, the time that is 0 in the trace."""

    file: IO[str]
    rank: int
    zero: float

    def slice(self, lane: int, name: str, kind: str, start: float, end: float, **about: Any) -> None:
        first, last = self._at(start), self._at(end)
        # Perfetto cuts both down to whole nanoseconds, and drops a slice that reaches into the next one
        times = {"ts": first / 1e3, "dur": max(0, last - first - 1) / 1e3}
        self._put({"name": name, "cat": kind, "ph": "X", "tid": lane, **times, "args": about})

    def mark(self, name: str, time: float, **about: Any) -> None:
        ts = self._at(time) / 1e3
        self._put({"name": name, "cat": "collective", "ph": "i", "s": "t", "tid": 1, "ts": ts, "args": about})

    def label(self, what: str, lane: int = 0, **about: Any) -> None:
        self._put({"name": what, "ph": "M", "tid": lane, "args": about})

    def _at(self, time: float) -> int:
        """Nanoseconds since the first of all."""
        return round((time - self.zero) * 1e9)

    def _put(self, event: dict[str, Any]) -> None:
        self.file.write(",\n" + json.dumps({"pid": self.rank, **event}))


def _write_rank(file: IO[str], source: _Source, span: _Span) -> RankTime:
    pen, time = _Pen(file, source.rank, span.first), RankTime(source.rank, source.host)
    pen.label("process_name", name=f"rank {source.rank}" + (f" on {source.host}" if source.host else ""))
    pen.label("process_sort_index", sort_index=source.rank)
    pen.label("thread_name", 0, name="batches")
    pen.label("thread_name", 1, name=f"rank {source.rank}")
    busy = [-math.inf] * _LANES
    start = covered = -math.inf
    batches = _Batches(pen)
    for record, key, end in _ended(source, span):
        entered = record.entered + source.offset
        if covered == -math.inf:
            start = covered = entered
        if entered > covered:
            pen.slice(1, "compute", "compute", covered, entered)
        waiting = _waiting(span, key, source.rank, entered, end)
        _draw(pen, busy, record, entered, end, waiting)
        batches.see(record, entered)
        time.collectives += 1
        _, who, count = span.came[key]
        time.last += count > 1 and who == source.rank
        time.inside_s += max(0.0, (end or entered) - max(entered, covered))
        time.waiting_s += max(0.0, min(waiting, end or entered) - max(entered, covered))
        covered = max(covered, end or entered)
    batches.close(covered)
    time.seconds = covered - start if time.collectives else 0.0
    return time


def _ended(source: _Source, span: _Span) -> Iterator[tuple[Record, _Key, float | None]]:
    """The records with their ends; a rank's last one, if it has not ended, lasts to the end of the trace."""
    before: tuple[Record, _Key] | None = None
    for record, key in _keyed(source):
        if before is not None:
            yield (*before, None if before[0].left is None else before[0].left + source.offset)
        before = record, key
    if before is not None:
        yield (*before, span.last if before[0].left is None else before[0].left + source.offset)


def _waiting(span: _Span, key: _Key, rank: int, entered: float, end: float | None) -> float:
    """Until when the rank has waited for another to come."""
    when, who, _ = span.came[key]
    return min(when, end or entered) if who != rank else entered


def _draw(pen: _Pen, busy: list[float], record: Record, entered: float, end: float | None, waiting: float) -> None:
    about = {"place": record.place, "source": record.source, "batch": record.batch}
    about |= {"group": record.group or "all ranks", "number": record.sequence}
    lane = next((lane for lane, until in enumerate(busy) if until <= entered), None)
    if end is None or lane is None:
        pen.mark(record.what, entered, **about)
        return
    if lane and busy[lane] == -math.inf:
        pen.label("thread_name", lane + 1, name=f"beside it, {lane}")
    busy[lane] = max(end, entered)
    if record.left is None:
        about["ended"] = "no"
    pen.slice(lane + 1, record.name or record.what, "collective", entered, end, **about)
    if waiting > entered:
        pen.slice(lane + 1, "waiting", "waiting", entered, waiting)


@dataclass
class _Batches:
    """Draws the batches that a rank was on."""

    pen: _Pen
    batch: int | None = None
    since: float = 0.0

    def see(self, record: Record, entered: float) -> None:
        batch = None if record.finished else record.batch
        if batch != self.batch:
            self.close(entered)
            self.batch, self.since = batch, entered

    def close(self, now: float) -> None:
        if self.batch is not None:
            self.pen.slice(0, f"batch {self.batch}", "batch", self.since, now)
        self.batch = None
