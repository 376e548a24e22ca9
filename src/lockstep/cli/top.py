"""``lockstep top``: shows what the ranks of running jobs are doing, read from their flight
records, and how far the job is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments, environment
from ..errors import ConfigError, counted
from ..flight_recorder import open_job
from ..flight_recorder.live_ranks import LiveRanks, RankStatus
from ..flight_recorder.rank_progress import WINDOW_S, OtherHosts, read_other_hosts
from ..launcher.job_totals import JobTotals, read_totals
from ..system.terminal_text import plain
from .parser import Help

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..flight_recorder.jobs import JobDescription

_DESCRIPTION = """\
Show how far a job on this host is, and what its ranks are doing: steps, samples
and tokens per second, waits for data and for other ranks, the slowest rank (on
any host), goodput, losses and joins; of each rank the current batch, the
collective in which it waits (or its last one) and its source line, the share of
its time spent waiting for other ranks, and memory. It only reads what the ranks
and the launcher keep in shared memory. If several jobs are running, it lists
them.
"""

_EXAMPLES = """
examples:
  lockstep top                the job, or a list of jobs; Ctrl-C ends it
  lockstep top 4711           the job of this launcher's or rank's PID
  lockstep top runs/long      the job with this --output-dir or current folder
  lockstep top --once         print the table once, for scripts

The rank that waits least is the straggler for which the others wait. On one host
a rank waits while it is in a collective that another rank has not entered;
between hosts, while a call of it blocks. The first host of a job knows the ranks
of all hosts, the others only their own and the slowest. Rates are averages over
the last ten seconds; with --once, and in steps that take longer, since the start.
Goodput is the share of the time since the start in which steps were made that
count. `lockstep run --metrics-port` serves the same numbers to Prometheus.
Batches are counted from 0 over all epochs.

exit codes: 0; 2 if there is no such job
"""

_NO_RECORDS = "No flight records yet: they begin with a rank's first process group."
_EVENTS = 5  # of an elastic job: the last ones are shown
_OTHER_RANKS = 16  # on other hosts: more would not fit on a screen
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
    parser.add_argument(
        "job", nargs="?", metavar="PID or DIR", help="the job, if several are running"
    )
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    parser.add_argument(
        "--interval", metavar="S", default="1", help="seconds between updates (default: 1)"
    )
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    from rich.console import Console

    expected = "a number of seconds from 0.1 to 3600"
    interval = arguments.parse_number(
        "--interval", parsed.interval, least=0.1, most=3600, expected=expected
    )
    terminal = sys.stdout.isatty()
    console = Console(
        highlight=False, markup=False, emoji=False, no_color=not environment.wants_colours()
    )
    if not terminal:
        console.width = max(console.width, 120)
    display = _Display(parsed.job)
    try:
        _repeat(console, display.draw, interval if terminal and not parsed.once else 0.0)
    finally:
        display.close()
    return 0


def select_jobs(
    jobs: dict[Path, JobDescription], selector: str | None
) -> dict[Path, JobDescription]:
    """Return the jobs that match the PID or folder in `selector`; all if it is None."""
    if selector is None:
        return jobs
    if selector.isdecimal():
        return {
            folder: job
            for folder, job in jobs.items()
            if int(selector) in (job.pid, *_pids(folder))
        }
    path = Path(selector).expanduser().resolve()
    return {folder: job for folder, job in jobs.items() if path in _folders(folder, job)}


def _folders(folder: Path, job: JobDescription) -> list[Path]:
    """Return the folders by which a user may call a job."""
    return [folder.resolve(), *(Path(text).resolve() for text in (job.cwd, job.folder) if text)]


def _pids(folder: Path) -> list[int]:
    """Return the processes of the ranks whose flight records are in `folder`."""
    readers = open_job(folder).values()
    pids = [reader.pid for reader in readers]
    for reader in readers:
        reader.close()
    return pids


class _Display:
    """Draws the selected or only job, or a list of all jobs.

    Args:
        selector: what the user calls the job; None for the only one.
    """

    def __init__(self, selector: str | None) -> None:
        self._selector = selector
        self._folder: Path | None = None  # of the records of the job that is shown
        self._ranks: LiveRanks | None = None
        self._totals: deque[JobTotals] = deque()  # of the last seconds

    def draw(self) -> RenderableType | None:
        """Return the current table; None after the job that was shown has ended.

        Raises:
            ConfigError: no running job matches the selector.
        """
        from ..flight_recorder.jobs import find_jobs

        running = find_jobs()
        selected = select_jobs(running, self._selector)
        if self._ranks is not None and not selected:
            return None
        if not selected and self._selector is not None:
            pids = ", ".join(str(job.pid) for job in running.values()) or "none"
            expected = f"the PID or the folder of a job that is running on this host ({pids})"
            raise ConfigError("job", expected, self._selector)
        if len(selected) != 1:
            return _list_of_jobs(selected)
        [(folder, job)] = selected.items()
        if self._ranks is None or folder != self._folder:  # restarted ranks have another folder
            self.close()
            self._folder = folder
            self._ranks = LiveRanks(folder, is_elastic=bool(job.control))
        self._selector = str(job.pid)  # this job stays selected when another one starts
        self._note_totals(read_totals(folder))
        return _one_job(
            job, self._ranks.poll(), self._totals, read_other_hosts(folder), _last_events(folder)
        )

    def _note_totals(self, totals: JobTotals | None) -> None:
        """Keep the totals of the last seconds, between which rates are averages."""
        if totals is None or (self._totals and self._totals[-1].updated == totals.updated):
            return
        self._totals.append(totals)
        while len(self._totals) > 2 and totals.updated - self._totals[1].updated >= WINDOW_S:
            self._totals.popleft()

    def close(self) -> None:
        """Close the flight records."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


def _repeat(
    console: Console, display: Callable[[], RenderableType | None], interval: float
) -> None:
    """Show the table every `interval` seconds until there is none, or once for 0."""
    from rich.live import Live

    shown = display()
    if not interval or shown is None:
        console.print(shown)
        return
    with suppress(KeyboardInterrupt):
        with Live(shown, console=console, screen=True, auto_refresh=False) as screen:
            while (shown := display()) is not None:
                screen.update(shown, refresh=True)
                time.sleep(interval)
        console.print("The job has ended.")


def _list_of_jobs(jobs: Mapping[Path, JobDescription]) -> RenderableType:
    """Return a table of jobs, a line each."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not jobs:
        return Text(
            "No job with a watchdog is running on this host (`lockstep run`, or lockstep.init())."
        )
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    columns = {"PID": None, "ranks": None, "running for": None, "folder": 2, "program": 3}
    for name, ratio in columns.items():
        side: Any = "right" if name in ("PID", "ranks") else "left"
        table.add_column(name, justify=side, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for job in jobs.values():
        running_for = _duration(time.time() - job.started)
        cells = (str(job.pid), str(job.workers), running_for, job.cwd, job.program)
        table.add_row(*map(plain, cells))
    return Group(table, Text(), Text("`lockstep top PID` shows the ranks of one of them."))


def _one_job(
    job: JobDescription,
    ranks: Sequence[RankStatus],
    totals: Sequence[JobTotals],
    others: OtherHosts | None,
    events: Sequence[str],
) -> RenderableType:
    """Return all that is shown of a job.

    Args:
        job: its description.
        ranks: of this host.
        totals: of the last seconds, the oldest first; none if its launcher has written none.
        others: what is known of other hosts; None if there are none.
        events: what has happened last in an elastic job, a line each.
    """
    from rich.console import Group
    from rich.text import Text

    head = Text(plain(job.program), "bold")
    head.append(f"   PID {job.pid}, {_duration(time.time() - job.started)}", "dim")
    lines: list[RenderableType] = [head]
    if ranks and len(ranks) < ranks[0].world_size:
        head.append(f", {len(ranks)} of {ranks[0].world_size} ranks are on this host", "dim")
    first_host = "" if others is None else plain(others.first_host)
    if totals and (totals[-1].is_whole or first_host in ("", job.host)):
        lines += [Text(line) for line in _lines_of_totals(totals)]
    elif first_host:
        text = f"`lockstep top` on {first_host}, the first host, shows the totals"
        lines.append(Text(text, "dim"))
    slow = totals[-1].slowest if totals else None
    if others is not None:
        slow = others.slowest
    if slow is not None:
        lines.append(
            Text(
                f"slowest: rank {slow.rank} on {plain(slow.host)}, which waits {slow.waits:.0%} of "
                f"its time; another one waits {slow.others_wait:.0%}",
                "yellow",
            )
        )
    lines.append(Text())
    lines.append(_table_of_ranks(ranks) if ranks else Text(_NO_RECORDS))
    if others is not None and others.ranks:
        lines += [Text(), _table_of_other_hosts(others)]
    if events:
        lines.append(Text())
        lines += [Text(line, no_wrap=True, overflow="ellipsis") for line in events]
    return Group(*lines)


def _last_events(folder: Path) -> list[str]:
    """Return what has happened last in an elastic job, a line each."""
    from ..flight_recorder.jobs import EVENTS

    try:
        lines = (folder / EVENTS).read_text(errors="replace").splitlines()
    except OSError:  # nothing yet, or the job is not elastic
        return []
    return [plain(line) for line in lines[-_EVENTS:]]


def _lines_of_totals(totals: Sequence[JobTotals]) -> list[str]:
    """Return how far a job is and how fast, and what it has lost, in two lines; none before the
    first step.
    """
    last = totals[-1]
    if not last.steps:
        return []
    # of a single look, as with --once, since the start
    first = totals[0] if len(totals) > 1 else JobTotals(last.started, last.started)
    passed_s = max(last.updated - first.updated, 1e-6)
    speeds = [
        f"step {last.step:,}",
        f"{_rate((last.steps - first.steps) / passed_s)} steps/s",
        f"{_rate((last.samples - first.samples) / passed_s)} samples/s",
    ]
    if last.tokens:
        speeds.append(f"{_rate((last.tokens - first.tokens) / passed_s)} tokens/s")
    for_data = (last.data_wait_s - first.data_wait_s) / passed_s
    for_ranks = (last.rank_wait_s - first.rank_wait_s) / passed_s
    speeds.append(f"waits {for_data:.0%} for data, {for_ranks:.0%} for other ranks")
    account = [f"goodput {last.goodput:.0%} since the start"]
    if last.lost or last.joined:
        account.append(f"{counted(last.lost, 'worker')} lost, {last.joined} joined")
    if last.restarts:
        repeated = counted(last.steps_repeated, "step")
        account.append(f"{counted(last.restarts, 'restart')}, {repeated} repeated")
    return [", ".join(speeds), ", ".join(account)]


def _rate(count: float) -> str:
    """Return a number per second as text, with two digits at least: few are not none."""
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def _table_of_ranks(ranks: Sequence[RankStatus]) -> RenderableType:
    """Return the table of the ranks of this host."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name in ("rank", "PID", "state", "batch", "waiting", "samples/s", "memory"):
        side: Any = "left" if name == "state" else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis")
    table.add_column("collective", ratio=1, overflow="ellipsis")
    stragglers = _stragglers(ranks)
    for rank in ranks:
        style = ""
        if rank.state in _BAD:
            style = "red"
        elif rank.rank in stragglers:
            style = "yellow"
        state = rank.state
        if rank.seconds >= 1:
            state += f" {_duration(rank.seconds)}"
        collective = Text(rank.collective, no_wrap=True, overflow="ellipsis")
        if rank.call_site:
            collective.append(f"\n{rank.call_site}", "dim")
        table.add_row(
            str(rank.rank),
            str(rank.pid),
            Text(state, style),
            "" if rank.batch is None else str(rank.batch),
            "?" if rank.waiting is None else f"{rank.waiting:.0%}",
            "" if rank.samples_s is None else _rate(rank.samples_s),
            _size(rank.memory),
            collective,
        )
    return table


def _table_of_other_hosts(others: OtherHosts) -> RenderableType:
    """Return a table of the ranks of other hosts, as these tell."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("rank", "host", "PID", "state", "step"):
        side: Any = "left" if name in ("host", "state") else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis")
    shown = sorted(others.ranks, key=lambda progress: progress.rank)[:_OTHER_RANKS]
    for progress in shown:
        state = "computes" if progress.state == "runs" else progress.state
        cells = (progress.rank, progress.host, progress.pid, state, progress.step)
        table.add_row(*(plain(str(cell)) for cell in cells))
    if len(shown) < len(others.ranks):
        table.add_row("…", f"{len(others.ranks) - len(shown)} more")
    return table


def _stragglers(ranks: Sequence[RankStatus]) -> list[int]:
    """Return the stragglers: the ranks that compute while all others have waited for a second."""
    computing = [rank.rank for rank in ranks if rank.state == "computes"]
    waiting = [rank for rank in ranks if rank.state == "waits"]
    others_do_neither = len(computing) + len(waiting) < len(ranks)
    if not waiting or others_do_neither or any(rank.seconds < 1 for rank in waiting):
        return []
    return computing


def _duration(seconds: float) -> str:
    """Return a time as text: "12 s", "3 min" or "2 h 5 min"."""
    if seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    minutes = int(seconds // 60)
    hours = int(seconds // 3600)
    return f"{minutes} min" if minutes < 60 else f"{hours} h {minutes % 60} min"


def _size(count: int) -> str:
    """Return bytes as text; "" for none."""
    if not count:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**27 else f"{count / 2**20:.0f} MiB"
