"""The report: what is wrong, what each rank was doing, the likely cause and what to do; as data and
as JSON.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from .. import messages
from ..errors import DataError
from ..messages import Integer, List

KINDS = ("desync", "batches", "parameters", "lost", "raised", "left", "frozen", "stall")
"""What can be wrong: ranks call different collectives, are on different batches or have different
parameters; or a rank has died, has raised an exception, has exited too early, is stopped, or is too
slow."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong; see `Report` for `sentence`, `cause` and `advice`.

    Attributes:
        kind: one of `KINDS`.
        culprits: the ranks at fault; empty if they are not known.
        key, sequence: group and sequence number of the collective at which the ranks diverge; 0 for
            none.
    """

    kind: str
    sentence: str
    culprits: tuple[int, ...] = ()
    cause: str = ""
    advice: str = ""
    key: int = 0
    sequence: int = 0

    def at(self, key: int, sequence: int) -> Finding:
        """Return the finding, at the collective `sequence` of the group `key`."""
        return replace(self, key=key, sequence=sequence)

    def as_warning(self) -> str:
        """Return the warning, where this is no error."""
        return f"warning: {self.sentence} {self.cause} {self.advice}"


_METHODS = re.compile(r"(Trainer|lockstep)\.\w+(?=: |$)")


def method_in(text: str) -> str:
    """Return the method of Lockstep with which the name of a collective begins, see `in_method`; ""
    for none.
    """
    match = _METHODS.match(text)
    return "" if match is None else match[0]


def advice_on_method(method: str) -> str:
    """Return what to do where only some ranks call a method of Lockstep's."""
    return (
        f"Call {method} on every rank; only printing and writing belong below `if comm.rank == 0:`."
    )


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
    """What some `ranks` have called alike.

    Attributes:
        ranks: the ranks.
        call: the call; None if they have not reached it, or if it is not recorded any more.
        is_overwritten: whether they have reached it, and later calls have overwritten its record.
    """

    ranks: List[Integer]
    call: Call | None = None
    is_overwritten: bool = False


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
        return msgspec.structs.replace(
            self, ranks=tuple(new.get(row.rank, row) for row in self.ranks)
        )


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
    path = folder / "report.json"
    draft = folder / f".report-{os.getpid()}-{threading.get_ident()}"
    try:
        draft.write_text(report.to_json())
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            draft.unlink()
    return True
