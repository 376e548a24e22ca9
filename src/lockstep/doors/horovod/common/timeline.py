"""``hvd.start_timeline`` and ``stop_timeline``: what Horovod's operations took, as a trace for Perfetto and Chrome."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep import environment
from lockstep.errors import ConfigError, LockstepError
from lockstep.timeline import write_trace

from ..engine import operations
from ..engine.job import current as current_job
from ..engine.operations import Operations
from .tensor_rows import tensor_rows

__all__ = ["begin_timeline", "end_timeline", "start_timeline", "stop_timeline"]

_DYNAMIC = "DYNAMIC"
_PATIENCE_S = 10.0  # of rank 0, for others that are about to stop the timeline too


@dataclass(frozen=True)
class _Timeline:
    """Attributes: path, of the trace; folder, of this machine's ranks; records, this rank's."""

    path: Path
    folder: Path
    records: Operations


_numbers = itertools.count(1)
_timeline: _Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Keep records of all operations from now on; all ranks call it, with the same path. A timeline there is ends.

    Args:
        file_path: where `stop_timeline`, or the end of the job, writes the trace, on the machine of rank 0. It has a
            lane for each of that machine's ranks, and a row for each tensor.
        mark_cycles: whether the trace has a mark, CYCLE_START, wherever a round of the ranks begins on rank 0, in which
            they tell each other what they have asked for.

    Raises:
        ConfigError: a ValueError, before `init`, or for a path that cannot be written to.
    """
    global _timeline
    comm = current_job("start_timeline").comm
    end_timeline()
    path = Path(file_path).expanduser().absolute()
    folder = path.with_name(f".{path.name}.records-{_run()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records = Operations(folder, comm.rank, comm.size, mark_cycles)
    except OSError as error:
        raise ConfigError("file_path", "a file that can be written", found=f"{path} ({error.strerror})") from None
    _timeline = _Timeline(path, folder, records)
    operations.current = records


def stop_timeline() -> None:
    """Write the trace; all ranks call it. The last of a machine's ranks to do so writes it.

    Rank 0 returns when it is there, unless another rank of its machine does not come for ten seconds.
    """
    found = _timeline
    end_timeline()
    if found is not None and found.records.rank == 0:
        until = time.monotonic() + _PATIENCE_S
        while found.folder.exists() and time.monotonic() < until:
            time.sleep(0.01)


def end_timeline() -> None:
    """Write the trace, if this is the last of the machine's ranks to end it."""
    global _timeline
    found, _timeline = _timeline, None
    operations.current = None
    if found is None:
        return
    found.records.close()
    try:
        _end(found)
    except (OSError, LockstepError) as error:
        print(f"the timeline {found.path} was not written: {error}", file=sys.stderr)


def begin_timeline() -> None:
    """Start the timeline that HOROVOD_TIMELINE names, if it names one."""
    path = environment.horovod_timeline()
    if path and path != _DYNAMIC:
        start_timeline(path, environment.horovod_marks_cycles())


def _end(timeline: _Timeline) -> None:
    timeline.records.path.with_suffix(".ended").touch()
    with timeline.folder.with_name(f"{timeline.folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept, ended = ([*timeline.folder.glob(f"rank-*.{kind}")] for kind in ("records", "ended"))
        if len(ended) < len(kept):
            return
        try:
            if timeline.folder.joinpath("rank-0.records") in kept:
                _write(timeline.folder, timeline.path)
        finally:
            shutil.rmtree(timeline.folder, ignore_errors=True)  # another rank has been the last, perhaps
            Path(lock.name).unlink(missing_ok=True)


def _write(folder: Path, path: Path) -> None:
    ranks, whole = folder / "ranks.json", folder / "whole"
    write_trace(folder, ranks)
    with (
        ranks.open(encoding="utf-8") as source,
        gzip.open(whole, "wt") if path.suffix == ".gz" else whole.open("w") as file,
    ):
        for line in source:
            if line == "]}\n":  # the last
                file.writelines(f",{json.dumps(event)}\n" for event in tensor_rows(folder))
            file.write(line)
    whole.replace(path)


def _run() -> str:
    """What this machine's ranks of this job have in common, and no other job has."""
    variables = environment.variables()
    names = ("LOCKSTEP_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    text = " ".join([*(variables.get(name, "") for name in names), str(next(_numbers))])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _forget() -> None:
    global _timeline
    _timeline = operations.current = None


os.register_at_fork(after_in_child=_forget)  # the records are those of the process that began them
