"""What is said when ranks have parted: one report for all of them, as data and as a file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import DataError
from .checked import build

__all__ = ["KINDS", "STATES", "Call", "Parting", "RankRow", "Report", "Said", "from_json", "read", "write_once"]

KINDS = ("desync", "batches", "parameters", "lost", "raised", "left", "frozen", "stall")
"""What can be wrong: ranks are in other collectives, on other batches or have other parameters; or a rank has died, has
raised an exception, has left too soon, does not move, or does not come."""

STATES = ("waits", "runs", "raised", "died", "ended", "frozen", "lost")
"""What a rank can be doing. "lost": nothing is heard of its machine."""

_FORMAT = 1
_MOST_BYTES = 16 << 20  # 1,000 ranks with a traceback each are a tenth of this


@dataclass(frozen=True)
class Call:
    """A collective, as one rank has called it.

    Attributes:
        what: e.g. ``all_reduce(float32[10, 4], sum)``.
        place: e.g. ``train.py:31 in main``.
        source: the text of that line.
        number: how many collectives of this group the rank has called, this one included.
        group: the group's name, "" for the one of all ranks.
        batch: the batch that the rank was on.
    """

    what: str
    place: str = ""
    source: str = ""
    number: int = 0
    group: str = ""
    batch: int | None = None


@dataclass(frozen=True)
class RankRow:
    """What is known of one rank.

    Attributes:
        rank: its global number.
        state: one of `STATES`.
        note: more about that, short.
        host: its machine, "" where there is one only.
        pid: of its process, 0 where it is not known.
        batch: the batch that it is on.
        call: the collective that it waits in, or its last one.
        waiting_s: seconds that it has waited there; None where it does not wait.
        stack: where it is, the innermost line first.
        words: its traceback or last words.
    """

    rank: int
    state: str
    note: str = ""
    host: str = ""
    pid: int = 0
    batch: int | None = None
    call: Call | None = None
    waiting_s: float | None = None
    stack: tuple[str, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Said:
    """What some `ranks` have called alike; `call` is None for those that have called nothing."""

    ranks: tuple[int, ...]
    call: Call | None = None


@dataclass(frozen=True)
class Parting:
    """The collective of one number in one group, as each rank has called it."""

    number: int
    group: str
    calls: tuple[Said, ...]


@dataclass(frozen=True)
class Report:
    """What is wrong, who is where, and what to do.

    Attributes:
        kind: one of `KINDS`.
        sentence: what is wrong, in one sentence.
        ranks: all ranks, in order.
        culprits: the ranks to blame, as far as that can be said.
        parting: the last collectives, that in which the ranks part at the end.
        cause: the likely cause.
        advice: what to do about it.
        time: seconds since the epoch.
        program: what was run.
    """

    kind: str
    sentence: str
    ranks: tuple[RankRow, ...]
    culprits: tuple[int, ...] = ()
    parting: tuple[Parting, ...] = ()
    cause: str = ""
    advice: str = ""
    time: float = 0.0
    program: str = ""

    def to_json(self) -> str:
        """The same as text that `from_json` reads."""
        return json.dumps({"lockstep_report": _FORMAT, **asdict(self)}, ensure_ascii=True, allow_nan=False)

    def with_rows(self, rows: Sequence[RankRow]) -> Report:
        """The same with these `rows` in place of those of the same ranks."""
        new = {row.rank: row for row in rows}
        return replace(self, ranks=tuple(new.get(row.rank, row) for row in self.ranks))


def from_json(text: str) -> Report:
    """The report that `text` is.

    Raises:
        ValueError: saying what is wrong with it.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict) or "lockstep_report" not in value:
        raise ValueError("it is JSON, but not a report of Lockstep's")
    if value["lockstep_report"] != _FORMAT:
        raise ValueError(f"it is of another version of Lockstep (format {_FORMAT} can be read)")
    report = build(Report, value)
    if report.kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}")
    if wrong := [row.rank for row in report.ranks if row.state not in STATES]:
        raise ValueError(f"state of rank {wrong[0]}: expected one of {', '.join(STATES)}")
    return report


def read(path: Path) -> Report:
    """The report in the file `path`.

    Raises:
        DataError: it cannot be read, or is no report.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
        return from_json(data.decode())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # among them those of JSON and UTF-8
        raise DataError(f"{path} is damaged, or no report of Lockstep's: {error}") from None


def write_once(folder: Path, report: Report) -> bool:
    """Write ``report.json`` into `folder` unless there is one already; says whether this one is there now.

    Others see all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    # two threads of a process may find something at the same moment
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
