"""A report as text for a terminal (pure)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .plain import plain, plain_lines
from .report import Call, Parting, RankRow, Report

__all__ = ["as_text", "call_lines", "rank_list", "seconds"]

_MOST_ROWS = 16
_MOST_WORDS = 4  # ranks whose last words are shown: those of the culprits, if they have left any
_MOST_LINES = 200  # of one rank's last words
_ANSI = {"head": "1;31", "title": "1", "bad": "31", "dim": "2"}
_HOST = 16  # columns for the name of a machine
_PLACE = re.compile(r":\d+( in \S+)?$")  # what stands before the text of a source line
_STATES = {
    "waits": "waits",
    "runs": "in none now",
    "raised": "raised an exception",
    "died": "died",
    "ended": "has ended",
    "frozen": "does not move",
    "lost": "nothing is heard of its machine",
}
_FAILED = ("raised", "died", "frozen", "lost")


@dataclass(frozen=True)
class _Line:
    text: str
    style: str = ""


def as_text(report: Report, width: int = 80, colours: bool = False, written: str = "", lead: int = 0) -> str:
    """The report as lines of at most `width` columns; tracebacks are left as they are.

    Args:
        report: from whatever source: nothing in it reaches the terminal but visible text.
        width: columns.
        colours: whether to mark what matters in the terminal's colours.
        written: where it has been written to, if that is to be said.
        lead: columns of the first line that are taken already.
    """
    lines = [*_body(report, width, lead), *_written(written, width), *_words(report)]
    return "\n".join(_painted(line) if colours else line.text for line in lines)


def _painted(line: _Line) -> str:
    return f"\x1b[{_ANSI[line.style]}m{line.text}\x1b[0m" if line.style and line.text else line.text


def _body(report: Report, width: int, lead: int) -> Iterator[_Line]:
    first, *others = _wrapped("x" * lead + report.sentence, width, style="head") or [_Line("")]
    yield from (replace(first, text=first.text[lead:]), *others)
    yield _Line("")
    yield from _table(report, width)
    if report.parting:
        yield _Line("")
        yield _Line("The last collectives, and where they part:", "title")
        for numbers, parting in _runs(report.parting[-5:]):
            yield from _parting(numbers, parting, report, width)
    for title, text in (("Likely cause", report.cause), ("What to do", report.advice)):
        if text:
            yield _Line("")
            yield _Line(f"{title}:", "title")
            yield from _wrapped(text, width, "  ")


def _wrapped(text: str, width: int, indent: str = "", style: str = "") -> list[_Line]:
    lines = textwrap.wrap(plain(text), max(20, width - len(indent)), break_on_hyphens=False, break_long_words=False)
    return [_Line(indent + line, style) for line in lines]


# --- the table of ranks -------------------------------------------------------------------------------------


def _table(report: Report, width: int) -> Iterator[_Line]:
    rows = _alike(report.ranks)
    columns = _columns(rows)
    widths = [max(len(cells[i]) for cells, _, _ in columns) for i in range(len(columns[0][0]))]
    keep = [i for i in range(len(widths)) if any(cells[i] for cells, _, _ in columns[1:])]
    for number, (cells, text, style) in enumerate(columns[: _MOST_ROWS + 1]):
        head = "  " + "".join(cells[i].ljust(widths[i] + 2) for i in keep)
        first, *others = [piece for line in text for piece in _fitted(line, width - len(head))] or [""]
        yield _Line((head + first).rstrip(), style if number else "dim")
        for other in others:
            yield _Line(" " * len(head) + other, "dim" if other.startswith(" ") else "")
    if len(rows) > _MOST_ROWS:
        yield _Line(f"  ... and {sum(len(ranks) for ranks, _ in rows[_MOST_ROWS:])} ranks more")


_Row = tuple[list[str], list[str], str]


def _columns(rows: Sequence[tuple[list[int], RankRow]]) -> list[_Row]:
    """(cells, lines of the last column, style) of each row, that of the titles first."""
    found: list[_Row] = [(["rank", "host", "batch", "waiting"], ["where"], "")]
    for ranks, row in rows:
        waiting = "" if row.waiting_s is None else seconds(row.waiting_s)
        host, batch = _cut(plain(row.host), _HOST), "" if row.batch is None else str(row.batch)
        text = [*_state(row), *(f"  {line}" for line in _place(row))]
        found.append(([rank_list(ranks), host, batch, waiting], text, "bad" if row.state in _FAILED else ""))
    return found


def _alike(rows: Iterable[RankRow]) -> list[tuple[list[int], RankRow]]:
    """Rows that differ in rank, process and time alone, as one each; what is said of time is the longest."""
    found: dict[RankRow, tuple[list[int], list[float]]] = {}
    for row in rows:
        ranks, waits = found.setdefault(replace(row, rank=0, pid=0, waiting_s=None, words=""), ([], []))
        ranks.append(row.rank)
        waits += [] if row.waiting_s is None else [row.waiting_s]
    return [(ranks, replace(row, waiting_s=max(waits, default=None))) for row, (ranks, waits) in found.items()]


def _state(row: RankRow) -> list[str]:
    note = f": {plain(row.note)}" if row.note else ""
    if row.state == "waits" and row.call is not None:
        return [f"in {call_name(row.call)}{note}"]
    return [_STATES.get(row.state, plain(row.state)) + note]


def _place(row: RankRow) -> list[str]:
    lines = []
    if row.call is not None:
        lines += [call_name(row.call)] if row.state != "waits" else []
        lines = [f"last: {line}" for line in lines] + call_lines(row.call)
    if row.stack and row.state != "waits":
        first, *others = map(plain, row.stack[:4])
        lines += [f"is at {first}", *(f"   in {other}" for other in others)]
    return lines


def call_name(call: Call) -> str:
    """``all_reduce(float32[10], sum) #7 of group tp``."""
    number = f" #{call.number}" if call.number else ""
    return plain(call.what) + number + (f" of group {plain(call.group)}" if call.group else "")


def call_lines(call: Call) -> list[str]:
    """Where the collective stands in the program."""
    if not call.place:
        return []
    return [plain(call.place) + (f": {plain(call.source)}" if call.source else "")]


def _fitted(line: str, width: int) -> list[str]:
    """`line` in as many lines as it needs; the source text of a place has its own where both do not fit."""
    width, indent = max(30, width), " " * (len(line) - len(line.lstrip()) + 2)
    place, colon, source = line.partition(": ")
    if len(line) > width and colon and _PLACE.search(place):
        return [*_fitted(f"{place}:", width), _cut(indent + source, width)]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}.."


def rank_list(ranks: Iterable[int]) -> str:
    """``0-3,7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def seconds(value: float) -> str:
    """``0.4 s``, ``75 s``, ``12 min``."""
    if value < 9.95:
        return f"{max(value, 0.0):.1f} s"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


# --- the last collectives -----------------------------------------------------------------------------------


def _runs(partings: Sequence[Parting]) -> list[tuple[str, Parting]]:
    """Those in a row that are alike but for their numbers, and perhaps the batch, as one each; with the numbers."""
    runs: list[list[Parting]] = []
    for parting in partings:
        if runs and _unnumbered(runs[-1][-1]) == _unnumbered(parting):
            runs[-1].append(parting)
        else:
            runs.append([parting])
    return [(f"{run[0].number}" + (f"-{run[-1].number}" if len(run) > 1 else ""), run[-1]) for run in runs]


def _unnumbered(parting: Parting) -> Parting:
    calls = [replace(said, call=said.call and replace(said.call, number=0, batch=None)) for said in parting.calls]
    return replace(parting, number=0, calls=tuple(calls))


def _parting(numbers: str, parting: Parting, report: Report, width: int) -> Iterator[_Line]:
    number = f"  #{numbers} " + (f"of {plain(parting.group)} " if parting.group else "")
    for said in parting.calls:
        who = (
            "all ranks"
            if len(said.ranks) == len(report.ranks)
            else f"rank{'s'[: len(said.ranks) != 1]} " + rank_list(said.ranks)
        )
        lines = ["has not come" if len(said.ranks) == 1 else "have not come"]
        if said.call is not None:
            batch = f" (batch {said.call.batch})" if _differs(parting) and said.call.batch is not None else ""
            lines = [plain(said.call.what) + batch, *(f"  {line}" for line in call_lines(said.call))]
        head = f"{number}{who}: ".ljust(18)
        first, *others = [piece for line in lines for piece in _fitted(line, width - len(head))]
        yield _Line(head + first, "bad" if len(parting.calls) > 1 else "")
        yield from (_Line(" " * len(head) + other, "dim") for other in others)
        number = " " * len(number)


def _differs(parting: Parting) -> bool:
    return len({said.call.batch for said in parting.calls if said.call is not None}) > 1


# --- what follows the table ---------------------------------------------------------------------------------


def _written(written: str, width: int) -> Iterator[_Line]:
    if written:
        yield _Line("")
        yield from _wrapped(f"Written to {written}", width)


def _words(report: Report) -> Iterator[_Line]:
    told = [row for row in report.ranks if row.words.strip()]
    for row in [row for row in told if row.rank in report.culprits][:_MOST_WORDS] or told[:_MOST_WORDS]:
        yield _Line("")
        yield _Line(f"The last words of rank {row.rank}{f' on {plain(row.host)}' if row.host else ''}:", "title")
        lines = plain_lines(row.words.strip("\n"))
        if len(lines) > _MOST_LINES:
            lines = [*lines[:10], "...", *lines[10 - _MOST_LINES :]]
        yield from map(_Line, lines)
