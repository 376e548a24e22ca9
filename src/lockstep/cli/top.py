"""``lockstep top``: what the ranks of the jobs on this machine are doing now."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import environment
from ..errors import ConfigError
from .parser import Help

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..watch.jobs import About
    from ..watch.live import Live, RankNow

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Show what the ranks of a job on this machine are doing now: the batch that each
is on, the collective that it waits in (or its last one) and its line in the
program, how much of its time it waits, samples per second where they are
counted, and memory. It reads what the ranks keep in shared memory, and does not
disturb them. Where several jobs are running, it lists them.
"""

_EXAMPLES = """
examples:
  lockstep top                the job, or the list of jobs; Ctrl-C ends it
  lockstep top 4711           the job of that launcher, or of a rank
  lockstep top runs/long      the job with this --output-dir, or started there
  lockstep top --once         one picture, for scripts

how to read it: the rank that waits least is the one that the others wait for.
Rates are those of the last ten seconds, with --once those since the start.

exit codes: 0; 2 where there is no such job
"""

_NOTHING = "Nothing is recorded yet. Ranks are from their first process group on; one that is alone in its job is not."
_BAD = ("stopped", "no heartbeat", "gone", "raised")


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="show what the ranks of running jobs are doing",
        usage="%(prog)s [options] [PID or DIR]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="PID or DIR", help="which job, where there are several")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    parser.add_argument("--interval", metavar="S", default="1", help="seconds between pictures (default: 1)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_command, known=[flag for action in parser._actions for flag in action.option_strings])


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    from rich.console import Console

    interval = _interval(arguments.interval)
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False, no_color=not environment.wants_colours())
    if not terminal:
        console.width = max(console.width, 120)
    picture = _Picture(arguments.job)
    try:
        _repeat(console, picture.draw, interval if terminal and not arguments.once else 0.0)
    finally:
        picture.close()
    return 0


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise ConfigError("--interval", "a number of seconds from 0.1 to 3600", text)
    return value


def _chosen(found: dict[Path, About], wanted: str | None) -> dict[Path, About]:
    chosen = _matching(found, wanted)
    if not chosen and wanted is not None:
        there = ", ".join(str(about.pid) for about in found.values()) or "none"
        raise ConfigError("job", f"the PID or the folder of a job that is running here ({there})", wanted)
    return chosen


def _matching(found: dict[Path, About], wanted: str | None) -> dict[Path, About]:
    if wanted is None:
        return found
    if wanted.isdecimal():
        return {folder: about for folder, about in found.items() if int(wanted) in (about.pid, *_pids(folder))}
    path = Path(wanted).expanduser().resolve()
    return {folder: about for folder, about in found.items() if path in _folders(folder, about)}


def _folders(folder: Path, about: About) -> list[Path]:
    return [folder.resolve(), *(Path(text).resolve() for text in (about.cwd, about.folder) if text)]


def _pids(folder: Path) -> list[int]:
    from ..recorder import open_job

    found = open_job(folder)
    pids = [recording.pid for recording in found.values()]
    for recording in found.values():
        recording.close()
    return pids


# --- pictures -------------------------------------------------------------------------------------------------


class _Picture:
    """Draws the job that was chosen, or that is the only one, or a list of those that there are."""

    def __init__(self, wanted: str | None) -> None:
        self._wanted = wanted
        self._live: dict[Path, Live] = {}  # at most one: it remembers what rates are made of

    def draw(self) -> RenderableType | None:
        """The picture as it is now; None when the job that was shown has ended."""
        from ..watch.jobs import find_jobs
        from ..watch.live import Live

        there = find_jobs()
        if self._live and not _matching(there, self._wanted):
            return None
        found = _chosen(there, self._wanted)
        if len(found) != 1:
            return _jobs(found)
        [(folder, about)] = found.items()
        if folder not in self._live:  # the ranks of a job that are started afresh have another one
            self.close()
            self._live[folder] = Live(folder)
        self._wanted = str(about.pid)  # it stays on the screen when another job starts
        return _job(self._live[folder].look(), about)

    def close(self) -> None:
        """Let go of the recordings."""
        for live in self._live.values():
            live.close()
        self._live.clear()


def _repeat(console: Console, picture: Callable[[], RenderableType | None], interval: float) -> None:
    """Show the picture every `interval` seconds until there is none, or once for 0."""
    from rich.live import Live as Screen

    first = picture()
    if not interval or first is None:
        console.print(first)
        return
    with suppress(KeyboardInterrupt):
        with Screen(first, console=console, screen=True, auto_refresh=False) as screen:
            while (now := picture()) is not None:
                screen.update(now, refresh=True)
                time.sleep(interval)
        console.print("The job has ended.")


def _jobs(found: Mapping[Path, About]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from ..watch.plain import plain

    if not found:
        return Text("No job is running here that Lockstep watches over (`lockstep run`, or lockstep.init()).")
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name, ratio in (("PID", None), ("ranks", None), ("running for", None), ("folder", 2), ("program", 3)):
        kind: Any = "right" if name in ("PID", "ranks") else "left"
        table.add_column(name, justify=kind, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for about in found.values():
        cells = (str(about.pid), str(about.workers), _duration(time.time() - about.started), about.cwd, about.program)
        table.add_row(*map(plain, cells))
    return table


def _job(ranks: Sequence[RankNow], about: About) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..watch.plain import plain

    head = Text(plain(about.program), "bold")
    head.append(f"   PID {about.pid}, {_duration(time.time() - about.started)}", "dim")
    if not ranks:
        return Group(head, Text(_NOTHING))
    away = ranks[0].world_size - len(ranks)
    if away > 0:
        head.append(f", {len(ranks)} of {ranks[0].world_size} ranks are on this machine", "dim")
    return Group(head, Text(), _table(ranks))


def _table(ranks: Sequence[RankNow]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name, ratio in (("rank", None), ("state", None), ("batch", None), ("waiting", None), ("samples/s", None),
                        ("memory", None), ("collective", 1)):  # fmt: skip
        kind: Any = "left" if name in ("state", "collective") else "right"
        table.add_column(name, justify=kind, ratio=ratio, no_wrap=name != "collective", overflow="ellipsis")
    late = _late(ranks)
    for rank in ranks:
        style = "red" if rank.state in _BAD else "yellow" if rank.rank in late else ""
        call = Text(rank.what, no_wrap=True, overflow="ellipsis")
        if rank.place:
            call.append(f"\n{rank.place}", "dim")
        batch, samples = rank.batch, rank.samples_s
        table.add_row(
            str(rank.rank),
            Text(rank.state + (f" {_duration(rank.seconds)}" if rank.seconds >= 1 else ""), style),
            "" if batch is None else str(batch),
            f"{rank.waiting:.0%}",
            "" if samples is None else f"{samples:,.0f}",
            _size(rank.memory),
            call,
        )
    return table


def _late(ranks: Sequence[RankNow]) -> list[int]:
    """Those for which all others have waited for a second."""
    rest = [rank.rank for rank in ranks if rank.state == "computes"]
    waits = [rank for rank in ranks if rank.state == "waits"]
    alike = waits and len(rest) + len(waits) == len(ranks) and all(rank.seconds >= 1 for rank in waits)
    return rest if alike else []


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min" if minutes < 60 else f"{hours} h {minutes % 60} min"


def _size(amount: int) -> str:
    return "" if not amount else f"{amount / 2**30:.1f} GiB" if amount >= 10 * 2**27 else f"{amount / 2**20:.0f} MiB"
