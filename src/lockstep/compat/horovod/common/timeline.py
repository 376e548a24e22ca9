"""``hvd.start_timeline`` and ``hvd.stop_timeline``: a trace of Horovod's operations with a row for
each tensor.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import arguments, environment
from lockstep.environment.variable_table import RUN_ID
from lockstep.errors import ConfigError, LockstepError
from lockstep.flight_recorder import Record, read_log, read_log_header
from lockstep.timeline import write_trace

from ..engine import operation_log
from ..engine.job import current as current_job
from ..engine.operation_log import OperationLog

__all__ = [
    "close_timeline",
    "start_timeline",
    "start_timeline_from_environment",
    "stop_timeline",
    "tensor_events",
]


@dataclass
class _Row:
    """The row of a tensor in the trace.

    Attributes:
        pid: the process ID of its events.
        lane_ends: the time at which each of its lanes becomes free; operations that overlap are in
            different lanes.
    """

    pid: int
    lane_ends: list[float] = field(default_factory=list)

    def occupy_lane(self, start: float, end: float) -> int:
        """Return the index of a lane that is free at `start`, and occupy it until `end`."""
        free = (lane for lane, lane_end in enumerate(self.lane_ends) if lane_end <= start)
        lane = next(free, len(self.lane_ends))
        self.lane_ends[lane : lane + 1] = [end]
        return lane


def tensor_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield trace events for the operations in the logs of `folder`; time 0 is when the first rank
    submitted the first.

    The ranks must share a clock. An operation is NEGOTIATE_ALLREDUCE or the like from when the
    first rank submits it until the last rank does, with an instant event for each rank, and then
    ALLREDUCE until all ranks have the result. Unnamed operations share a row. The process IDs of
    the rows follow those of the ranks. CYCLE_START is an instant event at the start of each cycle
    of rank 0, if cycles were logged.
    """
    size = 0
    offset = 0.0
    operations = dict[tuple[str, int], dict[int, Record]]()
    for path in sorted(folder.glob("rank-*.records")):
        header = read_log_header(path)
        size = header["world_size"]
        offset = header["unix_offset"]
        for record in read_log(path):
            operations.setdefault((record.group, record.sequence), {})[header["rank"]] = record
    in_order = sorted(operations.values(), key=_first_submission)
    zero = _first_submission(in_order[0]) if in_order else 0.0
    start = {"start_time_since_epoch_in_micros": round((zero + offset) * 1e6)}
    yield {"name": next(iter(start)), "ph": "M", "pid": 0, "args": start}
    yield from _cycle_events(folder / "rank-0.cycles", zero)
    rows: dict[str, _Row] = {}
    for records in in_order:
        title = _row_title(next(iter(records.values())))
        if title not in rows:
            rows[title] = _Row(size + len(rows))
            yield {
                "name": "process_name",
                "ph": "M",
                "pid": rows[title].pid,
                "args": {"name": title},
            }
            yield {
                "name": "process_sort_index",
                "ph": "M",
                "pid": rows[title].pid,
                "args": {"sort_index": size},
            }
        yield from _operation_events(rows[title], records, zero)


def _operation_events(
    row: _Row, records: Mapping[int, Record], zero: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of one operation, given the record of each rank."""
    submitted = {rank: record.entered for rank, record in records.items()}
    first = min(submitted.values())
    last = max(submitted.values())
    end = max(record.left or last for record in records.values())
    record = next(iter(records.values()))
    kind = record.what.partition(" ")[0].upper()
    lane = {"pid": row.pid, "tid": row.occupy_lane(first, end)}
    args = {
        "signature": record.what.partition(" (")[2].removesuffix(")"),
        "number": record.sequence,
    }
    yield {
        "name": f"NEGOTIATE_{kind}",
        "ph": "X",
        **lane,
        **_microseconds(first - zero, last - zero),
    }
    for rank, moment in sorted(submitted.items()):
        yield {
            "name": str(rank),
            "ph": "i",
            "s": "t",
            **lane,
            "ts": _microseconds(moment - zero)["ts"],
        }
    yield {"name": kind, "ph": "X", **lane, **_microseconds(last - zero, end - zero), "args": args}


def _cycle_events(path: Path, zero: float) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        if float(line) >= zero:
            moment = _microseconds(float(line) - zero)["ts"]
            yield {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": moment}


def _first_submission(records: Mapping[int, Record]) -> float:
    return min(record.entered for record in records.values())


def _row_title(record: Record) -> str:
    kind, _, rest = record.what.partition(" ")
    name = rest.partition(" (")[0]
    prefix, noname, _ = name.rpartition(".noname.")
    title = f"{prefix}, unnamed" if noname and not prefix.count(".") else f"{kind}.{name}"
    return f"{title} of {record.group}" if record.group else title


def _microseconds(start: float, end: float = 0.0) -> dict[str, float]:
    """Convert seconds to microseconds in whole nanoseconds: viewers drop an event that overlaps the
    next one.
    """
    first = round(start * 1e9)
    last = round(end * 1e9)
    return {"ts": first / 1e3, "dur": max(0, last - first - 1) / 1e3}


_DYNAMIC = "DYNAMIC"  # the value of HOROVOD_TIMELINE for a timeline that the program starts
_STOP_TIMEOUT_S = 10.0  # how long rank 0 waits for the other ranks to stop the timeline


@dataclass(frozen=True)
class _Timeline:
    """An active timeline.

    Attributes:
        path: the file of the trace.
        folder: the folder of the logs of this host's ranks.
        log: the log of this rank.
    """

    path: Path
    folder: Path
    log: OperationLog


_numbers = itertools.count(1)
_timeline: _Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Log all operations from now on; all ranks call it, with the same path. An active timeline is
    stopped.

    Args:
        file_path: the file to which `stop_timeline`, or the end of the job, writes the trace, on
            the host of rank 0. The trace has a row for each rank of that host, and a row for each
            tensor.
        mark_cycles: whether the trace has an event CYCLE_START at the start of each negotiation
            cycle of rank 0.

    Raises:
        ConfigError: a ValueError, before `init`, or for a path that is not writable.
    """
    global _timeline
    comm = current_job("start_timeline").comm
    close_timeline()
    path = (
        arguments.path("file_path", file_path, "a file that can be written").expanduser().absolute()
    )
    folder = path.with_name(f".{path.name}.records-{_timeline_id()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = OperationLog(folder, comm.rank, comm.size, mark_cycles)
    except OSError as error:
        raise ConfigError(
            "file_path", "a file that can be written", found=f"{path} ({error.strerror})"
        ) from None
    _timeline = _Timeline(path, folder, log)
    operation_log.active = log


def stop_timeline() -> None:
    """Stop the timeline; all ranks call it. The last rank of rank 0's host to do so writes the
    trace.

    On rank 0 this returns after the trace has been written, or after ten seconds if another rank
    has not called it.
    """
    stopped = _timeline
    close_timeline()
    if stopped is not None and stopped.log.rank == 0:
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while stopped.folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def close_timeline() -> None:
    """Close the log of this rank, and write the trace if all other ranks of this host have closed
    theirs.
    """
    global _timeline
    closed = _timeline
    _timeline = None
    operation_log.active = None
    if closed is None:
        return
    closed.log.close()
    try:
        _write_if_last(closed)
    except (OSError, LockstepError) as error:
        print(f"the timeline {closed.path} was not written: {error}", file=sys.stderr)


def start_timeline_from_environment() -> None:
    """Start the timeline that HOROVOD_TIMELINE requests, if it is set."""
    path = environment.horovod_timeline()
    if path and path != _DYNAMIC:
        start_timeline(path, environment.horovod_marks_cycles())


def _write_if_last(timeline: _Timeline) -> None:
    folder = timeline.folder
    timeline.log.path.with_suffix(".ended").touch()
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        logs = list(folder.glob("rank-*.records"))
        ended = list(folder.glob("rank-*.ended"))
        if len(ended) < len(logs):
            return
        try:
            if folder / "rank-0.records" in logs:
                write_trace(folder, timeline.path, tensor_events(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # another rank may have removed it
            Path(lock.name).unlink(missing_ok=True)


def _timeline_id() -> str:
    """Return a text that is the same for all ranks of this job and host, and differs for other jobs
    and timelines.
    """
    variables = environment.variables()
    names = (RUN_ID.name, "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    text = " ".join([*(variables.get(name, "") for name in names), str(next(_numbers))])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _reset_after_fork() -> None:
    global _timeline
    _timeline = operation_log.active = None


# the log belongs to the process that opened it
os.register_at_fork(after_in_child=_reset_after_fork)
