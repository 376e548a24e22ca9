"""The report: what is wrong, what each rank was doing, the likely cause and what to do; as data,
text and files.
"""

from __future__ import annotations

import os
import re
import textwrap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import structs

from .. import messages
from ..errors import DataError
from ..flight_recorder import describe
from ..messages import Integer, List
from ..system import atomic_files
from ..system.terminal_text import plain, plain_lines

__all__ = [
    "KINDS",
    "STATES",
    "Call",
    "CollectiveCalls",
    "Finding",
    "RankCalls",
    "RankStatus",
    "Report",
    "advice_on_method",
    "as_text",
    "from_json",
    "method_in",
    "rank_list",
    "read",
    "seconds",
    "write",
    "write_once",
]


# --- What is wrong, before it becomes a report
# ------------------------------------------------------------------------

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
    found = _METHODS.match(text)
    return "" if found is None else found[0]


def advice_on_method(method: str) -> str:
    """Return what to do where only some ranks call a method of Lockstep's."""
    return (
        f"Call {method} on every rank; only printing and writing belong below `if comm.rank == 0:`."
    )


# --- The report as data
# -----------------------------------------------------------------------------------------------

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


# --- Text for a terminal (pure)
# ---------------------------------------------------------------------------------------

_MAX_ROWS = 16
_MAX_TRACEBACKS = 4  # those of the culprits, if there are any
_MAX_TRACEBACK_LINES = 200  # of one traceback
_ANSI = {"head": "1;31", "title": "1", "bad": "31", "dim": "2"}
_HOST = 16  # columns for the name of a host
_CALL_SITE = re.compile(r":\d+( in \S+)?$")  # followed by the text of a source line
_STATES_AS_TEXT = {
    "waits": "waits",
    "runs": "not in a collective",
    "raised": "raised an exception",
    "died": "died",
    "ended": "exited",
    "frozen": "stopped",
    "lost": "its host does not respond",
}
_FAILED = ("raised", "died", "frozen", "lost")


@dataclass(frozen=True)
class _Line:
    text: str
    style: str = ""


def as_text(
    report: Report, width: int = 80, colours: bool = False, written: str = "", lead: int = 0
) -> str:
    """Return the report as lines of at most `width` columns; tracebacks are not wrapped.

    Args:
        report: may come from any source: only visible text of it reaches the terminal.
        width: columns.
        colours: whether to use the terminal's colours.
        written: path of the file to which it was written; "" to leave that out.
        lead: columns of the first line that are taken already.
    """
    lines = [*_body(report, width, lead), *_written(written, width), *_tracebacks(report)]
    return "\n".join(_painted(line) if colours else line.text for line in lines)


def _painted(line: _Line) -> str:
    return f"\x1b[{_ANSI[line.style]}m{line.text}\x1b[0m" if line.style and line.text else line.text


def _body(report: Report, width: int, lead: int) -> Iterator[_Line]:
    first, *others = _wrapped("x" * lead + report.sentence, width, style="head") or [_Line("")]
    yield from (replace(first, text=first.text[lead:]), *others)
    yield _Line("")
    yield from _table(report, width)
    if report.last_collectives:
        yield _Line("")
        yield _Line(_title_of_last(report.last_collectives[-1]), "title")
        for numbers, collective in _runs(report.last_collectives[-5:]):
            yield from _collective_lines(numbers, collective, report, width)
    for title, text in (("Likely cause", report.cause), ("What to do", report.advice)):
        if text:
            yield _Line("")
            yield _Line(f"{title}:", "title")
            yield from _wrapped(text, width, "  ")


def _title_of_last(last: CollectiveCalls) -> str:
    diverges = len(last.calls) > 1
    return "Last collectives" + (f", diverging at #{last.number}:" if diverges else ":")


def _wrapped(text: str, width: int, indent: str = "", style: str = "") -> list[_Line]:
    lines = textwrap.wrap(
        plain(text), max(20, width - len(indent)), break_on_hyphens=False, break_long_words=False
    )
    return [_Line(indent + line, style) for line in lines]


# --- The table of ranks
# -----------------------------------------------------------------------------------------------


def _table(report: Report, width: int) -> Iterator[_Line]:
    rows = _alike(report.ranks)
    columns = _columns(rows)
    widths = [max(len(cells[i]) for cells, _, _ in columns) for i in range(len(columns[0][0]))]
    keep = [i for i in range(len(widths)) if any(cells[i] for cells, _, _ in columns[1:])]
    for number, (cells, text, style) in enumerate(columns[: _MAX_ROWS + 1]):
        head = "  " + "".join(cells[i].ljust(widths[i] + 2) for i in keep)
        first, *others = [piece for line in text for piece in _fitted(line, width - len(head))] or [
            ""
        ]
        yield _Line((head + first).rstrip(), style if number else "dim")
        for other in others:
            yield _Line(" " * len(head) + other, "dim" if other.startswith(" ") else "")
    if len(rows) > _MAX_ROWS:
        yield _Line(f"  ... and {sum(len(ranks) for ranks, _ in rows[_MAX_ROWS:])} more ranks")


_Row = tuple[list[str], list[str], str]


def _columns(rows: Sequence[tuple[list[int], RankStatus]]) -> list[_Row]:
    """Return (cells, lines of the last column, style) of each row, the titles first."""
    found: list[_Row] = [(["rank", "host", "batch", "waiting"], ["where"], "")]
    for ranks, row in rows:
        waiting = "" if row.waiting_s is None else seconds(row.waiting_s)
        host = _cut(plain(row.host), _HOST)
        batch = "" if row.batch is None else str(row.batch)
        text = [*_state(row), *(f"  {line}" for line in _call_lines(row))]
        found.append(
            ([rank_list(ranks), host, batch, waiting], text, "bad" if row.state in _FAILED else "")
        )
    return found


def _alike(rows: Iterable[RankStatus]) -> list[tuple[list[int], RankStatus]]:
    """Return one row for all rows that differ in rank, process and time only, with the longest
    time.
    """
    found: dict[RankStatus, tuple[list[int], list[float]]] = {}
    for row in rows:
        ranks, waits = found.setdefault(
            structs.replace(row, rank=0, pid=0, waiting_s=None, traceback=""), ([], [])
        )
        ranks.append(row.rank)
        waits += [] if row.waiting_s is None else [row.waiting_s]
    return [
        (ranks, structs.replace(row, waiting_s=max(waits, default=None)))
        for row, (ranks, waits) in found.items()
    ]


def _state(row: RankStatus) -> list[str]:
    note = f": {plain(row.note)}" if row.note else ""
    if row.state == "waits" and row.call is not None:
        return [f"in {call_name(row.call)}{note}"]
    return [_STATES_AS_TEXT.get(row.state, plain(row.state)) + note]


def _call_lines(row: RankStatus) -> list[str]:
    lines = []
    if row.call is not None:
        lines += [call_name(row.call)] if row.state != "waits" else []
        lines = [f"last: {line}" for line in lines] + call_lines(row.call)
    if row.stack and row.state != "waits":
        first, *others = map(plain, row.stack[:4])
        lines += [f"is at {first}", *(f"   in {other}" for other in others)]
    return lines


def call_name(call: Call) -> str:
    """Return ``gradient all-reduce, batch 3: all_reduce(float32[10], sum) #7 of group tp``."""
    number = f" #{call.number}" if call.number else ""
    group = f" of group {plain(call.group)}" if call.group else ""
    return plain(describe(call.name, call.batch, call.what)) + number + group


def call_lines(call: Call) -> list[str]:
    """Return the call site and its source line."""
    if not call.call_site:
        return []
    return [plain(call.call_site) + (f": {plain(call.source)}" if call.source else "")]


def _fitted(line: str, width: int) -> list[str]:
    """Return `line` wrapped; the source text of a call site gets a line of its own if both do not
    fit in one.
    """
    width = max(30, width)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    call_site, colon, source = line.partition(": ")
    if len(line) > width and colon and _CALL_SITE.search(call_site):
        return [*_fitted(f"{call_site}:", width), _cut(indent + source, width)]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}.."


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``0-3,7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def seconds(value: float) -> str:
    """Return ``0.4 s``, ``75 s`` or ``12 min``."""
    if value < 9.95:
        return f"{max(value, 0.0):.1f} s"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


# --- The last collectives
# ---------------------------------------------------------------------------------------------


def _runs(collectives: Sequence[CollectiveCalls]) -> list[tuple[str, CollectiveCalls]]:
    """Return one for all consecutive collectives that differ in number and batch only, with their
    numbers.
    """
    runs: list[list[CollectiveCalls]] = []
    for collective in collectives:
        if runs and _unnumbered(runs[-1][-1]) == _unnumbered(collective):
            runs[-1].append(collective)
        else:
            runs.append([collective])
    return [
        (f"{run[0].number}" + (f"-{run[-1].number}" if len(run) > 1 else ""), run[-1])
        for run in runs
    ]


def _unnumbered(collective: CollectiveCalls) -> CollectiveCalls:
    calls = [
        structs.replace(each, call=each.call and structs.replace(each.call, number=0, batch=None))
        for each in collective.calls
    ]
    return structs.replace(collective, number=0, calls=tuple(calls))


def _collective_lines(
    numbers: str, collective: CollectiveCalls, report: Report, width: int
) -> Iterator[_Line]:
    number = f"  #{numbers} " + (f"of {plain(collective.group)} " if collective.group else "")
    for each in collective.calls:
        who = (
            "all ranks"
            if len(each.ranks) == len(report.ranks)
            else f"rank{'s'[: len(each.ranks) != 1]} " + rank_list(each.ranks)
        )
        lines = ["not reached"]
        if each.call is not None:
            batch = (
                f" (batch {each.call.batch})"
                if _differs(collective) and each.call.batch is not None
                else ""
            )
            what = plain(describe(each.call.name, None, each.call.what))
            lines = [what + batch, *(f"  {line}" for line in call_lines(each.call))]
        head = f"{number}{who}: ".ljust(18)
        first, *others = [piece for line in lines for piece in _fitted(line, width - len(head))]
        yield _Line(head + first, "bad" if len(collective.calls) > 1 else "")
        yield from (_Line(" " * len(head) + other, "dim") for other in others)
        number = " " * len(number)


def _differs(collective: CollectiveCalls) -> bool:
    return len({each.call.batch for each in collective.calls if each.call is not None}) > 1


# --- What follows
# --------------------------------------------------------------------------------------------------


def _written(written: str, width: int) -> Iterator[_Line]:
    if written:
        yield _Line("")
        yield from _wrapped(f"Written to {written}", width)


def _tracebacks(report: Report) -> Iterator[_Line]:
    rows = [row for row in report.ranks if row.traceback.strip()]
    for row in [row for row in rows if row.rank in report.culprits][:_MAX_TRACEBACKS] or rows[
        :_MAX_TRACEBACKS
    ]:
        yield _Line("")
        yield _Line(
            f"Traceback of rank {row.rank}{f' on {plain(row.host)}' if row.host else ''}:", "title"
        )
        lines = plain_lines(row.traceback.strip("\n"))
        if len(lines) > _MAX_TRACEBACK_LINES:
            lines = [*lines[:10], "...", *lines[10 - _MAX_TRACEBACK_LINES :]]
        yield from map(_Line, lines)


# --- Files: as JSON for `lockstep explain`, and as text
# ---------------------------------------------------------------


def write(folder: Path, report: Report) -> str:
    """Write ``report.json`` and ``report.txt`` and return the path of the first; "" if they cannot
    be written.

    A failure to write them, on a full disk for example, must not keep the report from being shown.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(folder / "report.json", report.to_json() + "\n")
        atomic_files.write_text(folder / "report.txt", as_text(report) + "\n")
    except OSError:
        return ""
    return str(folder / "report.json")
