"""A report as text, for a terminal and for a file beside its JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from ..flight_recorder import describe
from ..system import atomic_files
from ..system.terminal_text import plain, plain_lines
from .report import Call, CollectiveCalls, RankStatus, Report

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
    lines = [*_body(report, width, lead)]
    if written:
        lines += [_Line(""), *_wrapped(f"Written to {written}", width)]
    lines += _tracebacks(report)
    texts = []
    for line in lines:
        painted = colours and line.style and line.text
        texts.append(f"\x1b[{_ANSI[line.style]}m{line.text}\x1b[0m" if painted else line.text)
    return "\n".join(texts)


def _body(report: Report, width: int, lead: int) -> Iterator[_Line]:
    first, *others = _wrapped("x" * lead + report.sentence, width, style="head") or [_Line("")]
    yield from (replace(first, text=first.text[lead:]), *others)
    yield _Line("")
    yield from _table(report, width)
    if report.last_collectives:
        last = report.last_collectives[-1]
        diverges = f", diverging at #{last.number}" if len(last.calls) > 1 else ""
        yield _Line("")
        yield _Line(f"Last collectives{diverges}:", "title")
        for numbers, collective in _runs(report.last_collectives[-5:]):
            yield from _collective_lines(numbers, collective, report, width)
    for title, text in (("Likely cause", report.cause), ("What to do", report.advice)):
        if text:
            yield _Line("")
            yield _Line(f"{title}:", "title")
            yield from _wrapped(text, width, "  ")


def _wrapped(text: str, width: int, indent: str = "", style: str = "") -> list[_Line]:
    lines = textwrap.wrap(
        plain(text), max(20, width - len(indent)), break_on_hyphens=False, break_long_words=False
    )
    return [_Line(indent + line, style) for line in lines]


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
    columns: list[_Row] = [(["rank", "host", "batch", "waiting"], ["where"], "")]
    for ranks, row in rows:
        waiting = "" if row.waiting_s is None else seconds(row.waiting_s)
        host = _cut(plain(row.host), _HOST)
        batch = "" if row.batch is None else str(row.batch)
        text = [*_state(row), *(f"  {line}" for line in _call_lines(row))]
        columns.append(
            ([rank_list(ranks), host, batch, waiting], text, "bad" if row.state in _FAILED else "")
        )
    return columns


def _alike(rows: Iterable[RankStatus]) -> list[tuple[list[int], RankStatus]]:
    """Return one row for all rows that differ in rank, process and time only, with the longest
    time.
    """
    alike: dict[RankStatus, tuple[list[int], list[float]]] = {}
    for row in rows:
        ranks, waits = alike.setdefault(
            structs.replace(row, rank=0, pid=0, waiting_s=None, traceback=""), ([], [])
        )
        ranks.append(row.rank)
        waits += [] if row.waiting_s is None else [row.waiting_s]
    return [
        (ranks, structs.replace(row, waiting_s=max(waits, default=None)))
        for row, (ranks, waits) in alike.items()
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
        structs.replace(
            calls_of_ranks,
            call=calls_of_ranks.call and structs.replace(calls_of_ranks.call, number=0, batch=None),
        )
        for calls_of_ranks in collective.calls
    ]
    return structs.replace(collective, number=0, calls=tuple(calls))


def _collective_lines(
    numbers: str, collective: CollectiveCalls, report: Report, width: int
) -> Iterator[_Line]:
    number = f"  #{numbers} " + (f"of {plain(collective.group)} " if collective.group else "")
    batches = {alike.call.batch for alike in collective.calls if alike.call is not None}
    for alike in collective.calls:
        who = (
            "all ranks"
            if len(alike.ranks) == len(report.ranks)
            else f"rank{'s'[: len(alike.ranks) != 1]} " + rank_list(alike.ranks)
        )
        lines = ["reached, no longer recorded" if alike.is_overwritten else "not reached"]
        if alike.call is not None:
            shows_batch = len(batches) > 1 and alike.call.batch is not None
            batch = f" (batch {alike.call.batch})" if shows_batch else ""
            what = plain(describe(alike.call.name, None, alike.call.what))
            lines = [what + batch, *(f"  {line}" for line in call_lines(alike.call))]
        head = f"{number}{who}: ".ljust(18)
        first, *others = [piece for line in lines for piece in _fitted(line, width - len(head))]
        yield _Line(head + first, "bad" if len(collective.calls) > 1 else "")
        yield from (_Line(" " * len(head) + other, "dim") for other in others)
        number = " " * len(number)


def _tracebacks(report: Report) -> Iterator[_Line]:
    rows = [row for row in report.ranks if row.traceback.strip()]
    for row in [row for row in rows if row.rank in report.culprits][:_MAX_TRACEBACKS] or rows[
        :_MAX_TRACEBACKS
    ]:
        yield _Line("")
        place = f" on {plain(row.host)}" if row.host else ""
        yield _Line(f"Traceback of rank {row.rank}{place}:", "title")
        lines = plain_lines(row.traceback.strip("\n"))
        if len(lines) > _MAX_TRACEBACK_LINES:
            lines = [*lines[:10], "...", *lines[10 - _MAX_TRACEBACK_LINES :]]
        yield from map(_Line, lines)


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
