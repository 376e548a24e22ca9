"""The ledger of a run: 64 bytes for each step, in `ledger.bin`, and a line for each start, in
`ledger.jsonl`.

A record is little-endian; its first four bytes are the CRC-32 of the other sixty. A run that
resumes computes some steps again: their earlier records stay in the file, and are compared with the
new ones.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..errors import ConfigError, DataError
from .spikes import COLUMNS, Spike, find_spikes
from .starts import Start

RECORDS = "ledger.bin"
STARTS = "ledger.jsonl"

# Kinds of records.
# the program has started: `step` is the first that follows, `number` the line of ledger.jsonl
_START = 1
_STEP = 2
_FINGERPRINT = 3  # checksums of the state after `step` updates
_ROLLBACK = 4  # in `step`, the state of the beginning of step `number` was restored
# in `step`, the worker with the rank `number` has computed something else than the others
_FAULT = 5

# Flags of a step.
SKIPPED = 1
NOT_SUMMED = 2  # without the digest of the samples: on a device whose sums have not enough digits

_SIZE = 64
_HEAD = [("crc", "<u4"), ("kind", "u1"), ("flags", "u1"), ("workers", "<u2"), ("step", "<u8")]
_VALUES = [
    ("loss", "<f8"),
    ("count", "<f8"),
    ("gradient_norm", "<f8"),
    ("learning_rate", "<f8"),
    ("samples", "<u8"),
    ("buffers_norm", "<f4"),
]
_CHECKSUMS = [
    ("parameters", "<u8"),
    ("buffers", "<u8"),
    ("optimizer", "<u8"),
    ("batch", "<u8"),
    ("rates", "<u8"),
]
_STEP_RECORD = np.dtype([*_HEAD, *_VALUES, ("seconds", "<f4")])
_FINGERPRINT_RECORD = np.dtype([*_HEAD, *_CHECKSUMS, ("spare", "V8")])
_EVENT_RECORD = np.dtype([*_HEAD, ("number", "<u8"), ("spare", "V40")])

_BODY = struct.Struct("<BBHQ")
_STEP_BODY = struct.Struct("<ddddQff")
_FINGERPRINT_BODY = struct.Struct("<QQQQQ8x")
_EVENT_BODY = struct.Struct("<Q40x")

# What a step has computed: from its number to the norm of the buffers, without the time.
_COMPARED = slice(8, 60)
# The relative difference that another order of sums may make within a few steps.
_ROUNDING = 1e-3
_ROUNDED = ("loss", "gradient_norm", "buffers_norm")

Records = NDArray[np.void]


class StepValues(NamedTuple):
    """What is recorded of a step, and compared when it is computed again.

    Attributes:
        loss: the mean over the global batch.
        count: what it is a mean over, such as samples.
        gradient_norm: the 2-norm of the whole gradient, before clipping.
        learning_rate: of the first parameter group.
        samples: a digest of the numbers and places of all samples of the global batch.
        buffers_norm: the 2-norm of all floating buffers, such as running statistics, after the
            passes.
    """

    loss: float
    count: float  # type: ignore[assignment]
    gradient_norm: float
    learning_rate: float
    samples: int
    buffers_norm: float


class Difference(NamedTuple):
    """A value of a step that differs: `name` of `StepValues`, as it `was` recorded, and as it `is`
    now.
    """

    step: int
    name: str
    was: float
    now: float

    def __str__(self) -> str:
        shown = "other samples, or in another order"
        if self.name != "samples":
            shown = f"{_NAMES[self.name]} was {self.was!r}, and is {self.now!r}"
        return f"step {self.step}: {shown}"


_NAMES = {
    "loss": "the loss",
    "count": "what the loss counts",
    "gradient_norm": "the norm of the gradient",
    "learning_rate": "the learning rate",
    "buffers_norm": "the norm of the buffers",
}


def first_difference(
    step: int, was: Sequence[float], now: Sequence[float], rounding: bool = False
) -> Difference | None:
    """Compare what a step has computed with what it computes now.

    Args:
        step: its number.
        was: the recorded values, in the order of `StepValues`.
        now: the present values.
        rounding: whether loss and norms may differ by rounding.

    Returns:
        The cause rather than its consequences: other samples before another loss. None if all are
        the same; NaN is the same as NaN.
    """
    pairs = dict(zip(StepValues._fields, zip(was, now, strict=True), strict=True))
    for name in ("samples", "count", "learning_rate", *_ROUNDED):
        before, after = pairs[name]
        if name == "buffers_norm":
            after = float(np.float32(after))
        is_same = before == after or (before != before and after != after)
        if rounding and name in _ROUNDED:
            is_same = is_same or abs(before - after) <= _ROUNDING * max(abs(before), abs(after))
        if not is_same:
            return Difference(step, name, before, after)
    return None


class LedgerWriter:
    """Appends to the ledger of a run directory; on rank 0 alone.

    Each record is written by one call. A torn end, of a process that was killed, is cut off at
    first.

    Args:
        folder: the run directory.
        start: what is said of this start.
        first_step: the step that it begins with.
        rounding: whether a step that is computed again may differ by rounding.

    Attributes:
        cut: bytes of a torn end that were cut off.
        workers: number of workers of this start.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(self, folder: Path, start: Start, first_step: int, rounding: bool = False) -> None:
        self.workers = start.workers
        self._rounding = rounding
        self._earlier: dict[int, bytes] = {}
        self._descriptor = os.open(folder / RECORDS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self.cut = self._take_up(folder, first_step)
            line = (messages.encode(start) + "\n").encode()
            with (folder / STARTS).open("ab+") as file:
                file.seek(0)
                text = file.read()
                if text and not text.endswith(b"\n"):  # a torn line
                    line = b"\n" + line
                file.write(line)
            number = text.count(b"\n") + line.startswith(b"\n")
            self.event(_START, first_step, number)
        except BaseException:
            self.close()
            raise

    def _take_up(self, folder: Path, first_step: int) -> int:
        """Cut off a torn end, and keep the records of the steps that follow, to compare them."""
        data = (folder / RECORDS).read_bytes()
        end = len(data) // _SIZE * _SIZE
        while end and not _is_sound(data[end - _SIZE : end]):
            end -= _SIZE
        if end < len(data):
            os.ftruncate(self._descriptor, end)
        records = np.frombuffer(data[:end], _STEP_RECORD)
        again = (records["kind"] == _STEP) & (records["step"] >= first_step)
        for number in np.flatnonzero(again).tolist():
            record = data[number * _SIZE : (number + 1) * _SIZE]
            if _is_sound(record):
                self._earlier[int(records["step"][number])] = record
        return len(data) - end

    def has(self, step: int) -> bool:
        """Return whether the file had a record of a step from `first_step` on when it was opened,
        and no other has been written since.
        """
        return step in self._earlier

    def step(
        self, step: int, values: StepValues, flags: int = 0, seconds: float = 0.0
    ) -> Difference | None:
        """Append the record of a step.

        Args:
            step: its number.
            values: what it has computed.
            flags: of `SKIPPED` and the others.
            seconds: since the start.

        Returns:
            What differs from an earlier record of that step.
        """
        body = _BODY.pack(_STEP, flags, self.workers, step) + _STEP_BODY.pack(*values, seconds)
        record = self._append(body)
        earlier = self._earlier.pop(step, None)
        if earlier is None or earlier[_COMPARED] == record[_COMPARED]:
            return None
        then = _STEP_BODY.unpack(earlier[_SIZE - _STEP_BODY.size :])
        return first_difference(step, then[:-1], values, self._rounding)

    def fingerprint(self, step: int, checksums: Sequence[int]) -> None:
        """Append the checksums of the state after `step` updates.

        Args:
            step: the number of updates.
            checksums: of the parameters, the buffers, the optimizer's state, the content of the
                last batch, and the learning rates of all parameter groups.
        """
        head = _BODY.pack(_FINGERPRINT, 0, self.workers, step)
        self._append(head + _FINGERPRINT_BODY.pack(*checksums))

    def rollback(self, step: int, restored: int) -> None:
        """Record that in `step` the state of the beginning of step `restored` was restored."""
        self.event(_ROLLBACK, step, restored)

    def fault(self, step: int, rank: int) -> None:
        """Record that in `step` the worker with that rank has computed something else than the
        others.
        """
        self.event(_FAULT, step, rank)

    def event(self, kind: int, step: int, number: int) -> None:
        """Append a record of another kind."""
        self._append(_BODY.pack(kind, 0, self.workers, step) + _EVENT_BODY.pack(number))

    def _append(self, body: bytes) -> bytes:
        record = zlib.crc32(body).to_bytes(4, "little") + body
        if os.write(self._descriptor, record) < _SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return record

    def sync(self) -> None:
        """Flush to the device."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _is_sound(record: bytes) -> bool:
    return zlib.crc32(record[4:]) == int.from_bytes(record[:4], "little")


@dataclass(frozen=True)
class Ledger:
    """What the ledger of a run says.

    Attributes:
        folder: the run directory.
        steps: structured array, a row for each step, in order, of its last computation: `step`, the
            fields of `StepValues`, `seconds` since the start of the program, `workers`, `flags`,
            and `start`, the place in `starts`.
        recomputed: likewise, the earlier computations of steps that were computed again, in the
            order of the file.
        fingerprints: structured array, a row for each: `step` updates were done, and checksums of
            `parameters`, `buffers`, the `optimizer`'s state, the content of the first 64 samples
            of rank 0's part of the last `batch` (with virtual workers, of the first one's) and the
            learning `rates`. That of the batch is 0 where rank 0 was lost before it had written
            the record.
        rollbacks: (step, step whose beginning was restored).
        faults: (step, rank of a worker that has computed something else than the others).
        starts: what is known of each start of the program, in order.
        damaged: the numbers of the records whose checksum is wrong, which are left out.
        torn: bytes of a record that was not written to its end.
    """

    folder: Path
    steps: Records
    recomputed: Records
    fingerprints: Records
    rollbacks: list[tuple[int, int]]
    faults: list[tuple[int, int]]
    starts: list[Start]
    damaged: list[int]
    torn: int

    def find(self, step: int) -> Any:
        """Return the row of a step; None without one."""
        number = int(np.searchsorted(self.steps["step"], step))
        is_there = number < len(self.steps) and self.steps["step"][number] == step
        return self.steps[number] if is_there else None

    def record(self, step: int) -> Any:
        """Return the row of a step.

        Raises:
            ConfigError: there is none.
        """
        row = self.find(step)
        if row is None:
            steps = self.steps["step"]
            known = f"{steps[0]} to {steps[-1]}" if len(steps) else "which is empty"
            raise ConfigError("step", f"a step of the ledger of {self.folder}, {known}", step)
        return row

    def spikes(self) -> list[tuple[int, Spike]]:
        """Return the steps that stand out, with what does, those with the largest consequences
        first.
        """
        columns = {name: self.steps[name].tolist() for name in COLUMNS}
        return find_spikes(self.steps["step"].tolist(), columns)

    def start_of(self, step: int) -> Start:
        """Return the start of the program that has computed a step last.

        Raises:
            ConfigError: there is no such step.
        """
        return self.starts[int(self.record(step)["start"])]


def values_of(record: Any) -> StepValues:
    """Return what a row of `Ledger.steps` has computed."""
    return StepValues(*(record[name].item() for name in StepValues._fields))


def ledger(run: str | os.PathLike[str]) -> Ledger:
    """Read the ledger of a run directory.

    Args:
        run: the run directory.

    Raises:
        DataError: it has no ledger.
    """
    folder = Path(run)
    try:
        data = (folder / RECORDS).read_bytes()
        lines = (folder / STARTS).read_bytes().splitlines()
    except OSError as error:
        why = "ledger=False, or an older version" if folder.is_dir() else "there is no such folder"
        raise DataError(f"{folder}: no ledger ({why})") from error
    whole = len(data) // _SIZE * _SIZE
    sound = np.array(
        [_is_sound(data[at : at + _SIZE]) for at in range(0, whole, _SIZE)], dtype=bool
    )
    heads = np.frombuffer(data[:whole], _STEP_RECORD)
    events = np.frombuffer(data[:whole], _EVENT_RECORD)
    kinds = np.where(sound, heads["kind"], 0)
    starts = [_start(lines, int(event["number"])) for event in events[kinds == _START]]
    rows = np.empty(int((kinds == _STEP).sum()), _ROW)
    for name in _ROW.names or ():
        if name != "start":
            rows[name] = heads[kinds == _STEP][name]
    rows["start"] = np.maximum(np.cumsum(kinds == _START) - 1, 0)[kinds == _STEP]
    last = _last_of_each(rows["step"])
    prints = np.frombuffer(data[:whole], _FINGERPRINT_RECORD)[kinds == _FINGERPRINT]
    return Ledger(
        folder=folder,
        steps=rows[last],
        recomputed=np.delete(rows, last),
        fingerprints=prints[_last_of_each(prints["step"])][["step", *(n for n, _ in _CHECKSUMS)]],
        rollbacks=_pairs(events[kinds == _ROLLBACK]),
        faults=_pairs(events[kinds == _FAULT]),
        starts=starts or [Start()],
        damaged=np.flatnonzero(~sound).tolist(),
        torn=len(data) - whole,
    )


_ROW = np.dtype(
    [
        ("step", "<i8"),
        *_VALUES,
        ("seconds", "<f4"),
        ("workers", "<u2"),
        ("flags", "u1"),
        ("start", "<i8"),
    ]
)


def _pairs(events: Records) -> list[tuple[int, int]]:
    """Return (step, number) of each event, once: it is written before the record of its step, and
    again if the worker that writes was lost in between.
    """
    return list(dict.fromkeys((int(event["step"]), int(event["number"])) for event in events))


def _last_of_each(steps: NDArray[Any]) -> NDArray[Any]:
    """Return the places of the last record of each step, in the order of the steps."""
    _, from_end = np.unique(steps[::-1], return_index=True)
    return len(steps) - 1 - from_end


def _start(lines: Sequence[bytes], number: int) -> Start:
    """Return what a line says; a damaged one says nothing."""
    try:
        return messages.decode(lines[number], Start)
    except (ValueError, IndexError):
        return Start()
