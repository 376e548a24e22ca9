"""``lockstep top``: shows what the ranks of running jobs are doing, read from their flight
records.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments, environment
from ..errors import ConfigError
from ..flight_recorder import RankState, RawRecord, RecorderReader, open_job
from ..system.processes import read_status, resident_bytes
from ..system.terminal_text import plain
from .parser import Help

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..flight_recorder.jobs import JobDescription

__all__ = ["Live", "RankStatus", "add_to", "run_command", "select_jobs"]


# --- The state of the ranks
# -------------------------------------------------------------------------------------------

_WINDOW_S = 10.0  # rates are averages over this time; at the first poll, since the start
_HEARTBEAT_LIMIT_S = 3.0  # a rank's watchdog records many heartbeats per second


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank.

    Attributes:
        rank: its number, of `world_size`.
        pid: of its process.
        state: "computes", "waits", "stopped", "no heartbeat", "raised", "ended", "left" or "gone".
            A rank waits in a blocking call, and while it is in a collective that another rank of
            this host has not entered.
        seconds: for how long it has waited; for how long it has computed since its last collective
            or message.
        batch: its current batch, counted over all epochs.
        collective: the collective in which it waits, or its last one.
        call_site: the call site of the collective, with the source line.
        waiting: the fraction of its time in which it was in a collective that another rank of this
            host had not entered, or blocked in a message, 0 to 1; None if it is the only rank of
            the job on this host.
        samples_s: samples per second; None if none has been counted.
        memory: resident bytes of its process; 0 if that has ended.
    """

    rank: int
    world_size: int
    pid: int
    state: str
    seconds: float
    batch: int | None
    collective: str
    call_site: str
    waiting: float | None
    samples_s: float | None
    memory: int


class Live:
    """The ranks whose flight records are in `folder`; call `poll` repeatedly.

    Args:
        folder: of the job's records.
        is_elastic: whether ranks may change, so that only those of the newest group count.
    """

    def __init__(self, folder: Path, is_elastic: bool = False) -> None:
        self._folder = folder
        self._is_elastic = is_elastic
        self._readers: dict[int, RecorderReader] = {}
        self._history: dict[int, deque[tuple[float, RankState]]] = {}
        self._collective_waits: deque[_Waits] = deque()

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def poll(self) -> list[RankStatus]:
        """Return the states of all ranks, in order."""
        for rank, reader in open_job(self._folder).items():
            self._use(rank, reader)
        readers = _members(self._readers) if self._is_elastic else self._readers
        now = time.monotonic()
        waits = _find_waits(
            readers, self._collective_waits[-1].end if self._collective_waits else 0.0, now
        )
        self._collective_waits.append(waits)
        while now - self._collective_waits[0].end >= _WINDOW_S:
            self._collective_waits.popleft()
        is_alone = len(readers) < 2
        return [
            self._status(rank, readers[rank], waits.pending.get(rank), is_alone, now)
            for rank in sorted(readers)
        ]

    def _use(self, rank: int, reader: RecorderReader) -> None:
        """Use the record of a rank, unless it is the one that is used already."""
        known = self._readers.get(rank)
        if known is not None and (known.pid, known.started) == (reader.pid, reader.started):
            reader.close()
            return
        if known is not None:
            known.close()
        self._readers[rank] = reader
        self._history.pop(rank, None)

    def _status(
        self,
        rank: int,
        reader: RecorderReader,
        pending: RawRecord | None,
        is_alone: bool,
        now: float,
    ) -> RankStatus:
        state = reader.state()
        history = self._history.setdefault(rank, deque())
        history.append((now, state))
        while len(history) > 2 and now - history[1][0] >= _WINDOW_S:
            history.popleft()
        since, earlier = history[0]
        waited = _waited_in_messages(state, now)
        samples = state.samples
        if len(history) > 1:
            waited -= _waited_in_messages(earlier, since)
        else:
            since = state.started
        elapsed = max(now - since, 1e-6)
        waiting = None if is_alone else self._waiting_share(rank, waited / elapsed)
        rate = None
        if samples:
            recent = samples - (earlier.samples or 0) if len(history) > 1 else 0
            # A step may take longer than all these looks together; a rank that only waits has none,
            # though.
            is_stopped = waiting is not None and waiting > 0.99
            rate = (
                recent / elapsed
                if recent or is_stopped
                else samples / max(now - state.started, 1e-6)
            )
        name = _state_name(state, now)
        call = state.call
        began = state.since
        if name == "computes" and pending is not None:
            name = "waits"
            call = reader.record(pending)
            began = pending.entered
        elif name == "computes" and call is not None:
            began = max(began, call.entered, call.left or 0.0)
        call_site = ""
        if call is not None:
            call_site = plain(call.call_site) + (f": {plain(call.source)}" if call.source else "")
        return RankStatus(
            rank,
            state.world_size,
            state.pid,
            name,
            max(0.0, now - began),
            state.batch,
            plain(call.name or call.what) if call is not None else "",
            call_site,
            waiting,
            rate,
            resident_bytes(state.pid),
        )

    def _waiting_share(self, rank: int, in_messages: float) -> float:
        waited = sum(waits.seconds.get(rank, 0.0) for waits in self._collective_waits)
        observed = sum(waits.end - waits.begin for waits in self._collective_waits)
        return min(1.0, max(0.0, waited / max(observed, 1e-6) + in_messages))


def _members(readers: Mapping[int, RecorderReader]) -> dict[int, RecorderReader]:
    """Return the ranks of an elastic job's newest group, in which each member has made a new
    record.
    """
    living = [reader for reader in readers.values() if _is_running(reader.pid)]
    newest = {reader.pid: reader for reader in sorted(living, key=lambda reader: reader.started)}
    size = max(newest.values(), key=lambda reader: reader.started).world_size if newest else 0
    return {reader.rank: reader for reader in newest.values() if reader.rank < size}


@dataclass(frozen=True)
class _Waits:
    """How long ranks were in collectives that another rank of this host had not entered.

    Which thread blocks where says little: the all-reduces of a backward pass are asynchronous, and
    `DistributedDataParallel` waits for them in C++.

    Attributes:
        begin, end: of the time that was examined, by the monotonic clock.
        seconds: by rank.
        pending: by rank, its first collective that another rank has not entered at `end`.
    """

    begin: float
    end: float
    seconds: dict[int, float]
    pending: dict[int, RawRecord]


def _find_waits(readers: Mapping[int, RecorderReader], begin: float, end: float) -> _Waits:
    """Return the waits of all ranks from `begin`, or as far back as the records and `_WINDOW_S`
    reach, to `end`.
    """
    calls = {rank: list(reader.raws()) for rank, reader in readers.items()}
    overwritten = [raws[0].entered for raws in calls.values() if raws and raws[0].number > 1]
    begin = min(
        end,
        max(
            [begin, end - _WINDOW_S, *(reader.started for reader in readers.values()), *overwritten]
        ),
    )
    last_entry: dict[tuple[int, int], float] = {}
    for raw in (raw for raws in calls.values() for raw in raws if raw.sequence):
        collective = raw.key, raw.sequence
        last_entry[collective] = max(last_entry.get(collective, raw.entered), raw.entered)
    entered_by_all = {key: _entered_by_all(readers.values(), key) for key, _ in last_entry}
    seconds: dict[int, float] = {}
    pending: dict[int, RawRecord] = {}
    for rank, raws in calls.items():
        seconds[rank] = 0.0
        covered = begin
        for raw in raws:
            if not raw.sequence:
                continue
            is_missing = raw.sequence > entered_by_all[raw.key]
            if is_missing and not raw.left:
                pending.setdefault(rank, raw)
            until = min(end if is_missing else last_entry[raw.key, raw.sequence], raw.left or end)
            seconds[rank] += max(0.0, until - max(raw.entered, covered))
            covered = max(covered, until)
    return _Waits(begin, end, seconds, pending)


def _entered_by_all(readers: Iterable[RecorderReader], key: int) -> int:
    """Return the sequence number of the last collective of a group that all its ranks on this host
    have entered.
    """
    slots = ((reader, reader.group_slot(key)) for reader in readers)
    return min((reader.last_sequence(slot) for reader, slot in slots if slot >= 0), default=0)


def _waited_in_messages(state: RankState, now: float) -> float:
    waits = state.phase == "waits" and state.call is not None and not state.call.sequence
    return state.waited_in_messages_s + (max(0.0, now - state.since) if waits else 0.0)


def _is_running(pid: int) -> bool:
    process = read_status(pid)
    return process is not None and process.state not in ("Z", "X")


def _state_name(state: RankState, now: float) -> str:
    process = read_status(state.pid)
    if process is None or process.state in ("Z", "X"):
        return state.phase if state.phase in ("ended", "raised") else "gone"
    if process.state in ("T", "t"):
        return "stopped"
    if state.phase in ("runs", "waits") and now - state.heartbeat > _HEARTBEAT_LIMIT_S:
        return "no heartbeat"
    return {"runs": "computes"}.get(state.phase, state.phase)


# --- The command
# --------------------------------------------------------------------------------------------------

_DESCRIPTION = """\
Show what the ranks of a job on this host are doing: the current batch, the
collective in which each rank waits (or its last one) and its source line, the
fraction of time spent waiting for other ranks, samples per second if they are
counted, and memory; of an elastic job also its last losses and joins. It only
reads the ranks' flight records in shared memory. If several jobs are running, it
lists them.
"""

_EXAMPLES = """
examples:
  lockstep top                the job, or a list of jobs; Ctrl-C ends it
  lockstep top 4711           the job of this launcher's or rank's PID
  lockstep top runs/long      the job with this --output-dir or current folder
  lockstep top --once         print the table once, for scripts

The rank that waits least is the straggler for which the others wait. A rank
waits while it is in a collective that another rank of this host has not
entered; ranks on other hosts are not seen. Rates are averages over the last ten
seconds; with --once, and in steps that take longer, samples/s since the start.
Batches are counted from 0 over all epochs.

exit codes: 0; 2 if there is no such job
"""

_NO_RECORDS = (
    "No flight records yet: they begin with a rank's first process group, unless it is the only "
    "rank of its job."
)
_EVENTS = 5  # of an elastic job: the last ones are shown
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
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
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
    return [folder.resolve(), *(Path(text).resolve() for text in (job.cwd, job.folder) if text)]


def _pids(folder: Path) -> list[int]:
    readers = open_job(folder).values()
    pids = [reader.pid for reader in readers]
    for reader in readers:
        reader.close()
    return pids


# --- The display
# --------------------------------------------------------------------------------------------------


class _Display:
    """Draws the selected or only job, or a list of all jobs."""

    def __init__(self, selector: str | None) -> None:
        self._selector = selector
        self._live: dict[Path, Live] = {}  # at most one: it keeps the history for the rates

    def draw(self) -> RenderableType | None:
        """Return the current table; None after the job that was shown has ended.

        Raises:
            ConfigError: no running job matches the selector.
        """
        from ..flight_recorder.jobs import find_jobs

        running = find_jobs()
        selected = select_jobs(running, self._selector)
        if self._live and not selected:
            return None
        if not selected and self._selector is not None:
            pids = ", ".join(str(job.pid) for job in running.values()) or "none"
            expected = f"the PID or the folder of a job that is running on this host ({pids})"
            raise ConfigError("job", expected, self._selector)
        if len(selected) != 1:
            return _jobs(selected)
        [(folder, job)] = selected.items()
        if folder not in self._live:  # restarted ranks have another folder
            self.close()
            self._live[folder] = Live(folder, bool(job.control))
        self._selector = str(job.pid)  # this job stays selected when another one starts
        return _job(self._live[folder].poll(), job, _last_events(folder))

    def close(self) -> None:
        """Close the flight records."""
        for live in self._live.values():
            live.close()
        self._live.clear()


def _repeat(
    console: Console, display: Callable[[], RenderableType | None], interval: float
) -> None:
    """Show the table every `interval` seconds until there is none, or once for 0."""
    from rich.live import Live as Screen

    first = display()
    if not interval or first is None:
        console.print(first)
        return
    with suppress(KeyboardInterrupt):
        with Screen(first, console=console, screen=True, auto_refresh=False) as screen:
            while (now := display()) is not None:
                screen.update(now, refresh=True)
                time.sleep(interval)
        console.print("The job has ended.")


def _jobs(jobs: Mapping[Path, JobDescription]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not jobs:
        return Text(
            "No job with a watchdog is running on this host (`lockstep run`, or lockstep.init())."
        )
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name, ratio in (
        ("PID", None),
        ("ranks", None),
        ("running for", None),
        ("folder", 2),
        ("program", 3),
    ):
        kind: Any = "right" if name in ("PID", "ranks") else "left"
        table.add_column(name, justify=kind, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for job in jobs.values():
        cells = (
            str(job.pid),
            str(job.workers),
            _duration(time.time() - job.started),
            job.cwd,
            job.program,
        )
        table.add_row(*map(plain, cells))
    return Group(table, Text(), Text("`lockstep top PID` shows the ranks of one of them."))


def _last_events(folder: Path) -> list[str]:
    """Return what has happened last in an elastic job, a line each."""
    from ..flight_recorder.jobs import EVENTS

    try:
        lines = (folder / EVENTS).read_text(errors="replace").splitlines()
    except OSError:  # nothing yet, or the job is not elastic
        return []
    return [plain(line) for line in lines[-_EVENTS:]]


def _job(ranks: Sequence[RankStatus], job: JobDescription, events: Sequence[str]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = Text(plain(job.program), "bold")
    head.append(f"   PID {job.pid}, {_duration(time.time() - job.started)}", "dim")
    foot = (
        [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in events)]
        if events
        else []
    )
    if not ranks:
        return Group(head, Text(_NO_RECORDS), *foot)
    if len(ranks) < ranks[0].world_size:
        head.append(f", {len(ranks)} of {ranks[0].world_size} ranks are on this host", "dim")
    return Group(head, Text(), _table(ranks), *foot)


def _rate(samples: float) -> str:
    """Return samples per second as text, with two digits at least: few are not none."""
    return f"{samples:,.0f}" if samples >= 10 else f"{samples:.2g}"


def _table(ranks: Sequence[RankStatus]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name in ("rank", "PID", "state", "batch", "waiting", "samples/s", "memory", "collective"):
        kind: Any = "left" if name in ("state", "collective") else "right"
        wide = name == "collective"
        table.add_column(
            name, justify=kind, ratio=1 if wide else None, no_wrap=not wide, overflow="ellipsis"
        )
    stragglers = _stragglers(ranks)
    for rank in ranks:
        style = "red" if rank.state in _BAD else "yellow" if rank.rank in stragglers else ""
        call = Text(rank.collective, no_wrap=True, overflow="ellipsis")
        if rank.call_site:
            call.append(f"\n{rank.call_site}", "dim")
        batch = rank.batch
        samples = rank.samples_s
        table.add_row(
            str(rank.rank),
            str(rank.pid),
            Text(rank.state + (f" {_duration(rank.seconds)}" if rank.seconds >= 1 else ""), style),
            "" if batch is None else str(batch),
            "?" if rank.waiting is None else f"{rank.waiting:.0%}",
            "" if samples is None else _rate(samples),
            _size(rank.memory),
            call,
        )
    return table


def _stragglers(ranks: Sequence[RankStatus]) -> list[int]:
    """Return the stragglers: the ranks that compute while all others have waited for a second."""
    computing = [rank.rank for rank in ranks if rank.state == "computes"]
    waiting = [rank for rank in ranks if rank.state == "waits"]
    if (
        not waiting
        or len(computing) + len(waiting) < len(ranks)
        or any(rank.seconds < 1 for rank in waiting)
    ):
        return []
    return computing


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    minutes = int(seconds // 60)
    hours = int(seconds // 3600)
    return f"{minutes} min" if minutes < 60 else f"{hours} h {minutes % 60} min"


def _size(count: int) -> str:
    if not count:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**27 else f"{count / 2**20:.0f} MiB"
