"""The launcher's side of the watch over a node's workers: a place for their recordings, their words, and the report."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .. import environment
from ..errors import DataError
from ..recorder import open_job, places
from ..watch import jobs
from ..watch import report as reports
from ..watch.notes import Notes
from .command import without_values
from .failure import Failure
from .options import Watch

__all__ = ["Watching"]

_HOWEVER_LONG = 7 * 24 * 3600.0  # seconds that ranks wait for one in a debugger

_HOW = {"exit": ("lost", "died", "died"), "SystemExit": ("left", "ended", "has come to its end")}
_ADVICE = {
    "lost": "See what it has written last, and the kernel's log there (dmesg) for what ran out of memory.",
    "left": "Let all ranks do the same number of steps, and end together.",
    "raised": "Mend what its traceback says; the others were ended because of it.",
}


@dataclass
class Watching:
    """What is kept for the watchers in one run's workers.

    Attributes:
        name: the run's, which no other has.
        options: what the user has chosen.
        debug_rank: the rank that is being debugged, for which the others wait however long it takes.
        tell: shows the launcher's own words.
        folder: of the workers that were started last, None where nobody watches.
    """

    name: str
    options: Watch
    debug_rank: int | None
    tell: Callable[[str], None]
    folder: Path | None = None
    _base: Path | None = field(default=None, repr=False)
    _notes: Notes | None = field(default=None, repr=False)
    _has_room: bool = field(default=True, repr=False)

    @property
    def is_on(self) -> bool:
        """Whether there is any watch over the workers."""
        return (self.options.mode or environment.watch_mode()) != "off"

    def variables(self) -> dict[str, str]:
        """What the workers that are about to be started find in their environment."""
        chosen = {"LOCKSTEP_WATCH": self.options.mode, "LOCKSTEP_TIMELINE": self.options.timeline}
        limit = self.options.stall_timeout
        chosen["LOCKSTEP_STALL_TIMEOUT"] = None if limit is None else str(limit)
        if self.debug_rank is not None:
            chosen |= dict.fromkeys(("LOCKSTEP_STALL_TIMEOUT", "LOCKSTEP_STALL_WARNING"), str(_HOWEVER_LONG))
        chosen["LOCKSTEP_WATCH_DIR"] = str(self.folder) if self.folder is not None else ""
        if not self._has_room:
            chosen |= {"LOCKSTEP_WATCH": "off", "LOCKSTEP_WATCH_DIR": ""}
        return {name: value for name, value in chosen.items() if value is not None}

    def begin(self, attempt: int, first_rank: int, workers: int) -> None:
        """Make the place for workers that are about to be started; where there is no room, nobody watches them."""
        if not self.is_on:
            return
        before, self.folder = self.folder, None
        try:
            self._base = self._base or jobs.make_base()
            self.folder = self._base / self.name / f"attempt-{attempt}"
            self._make(self.folder, first_rank, workers)
            self._has_room = True
        except OSError as error:
            self.tell(f"lockstep: the ranks are not watched: {self._base or places.parent()}: {error.strerror}")
            if self.folder is not None:
                jobs.remove(self.folder.parent)
            self.folder, self._has_room = None, False
        if before is not None:  # nobody looks at those who have failed
            shutil.rmtree(before, ignore_errors=True)

    def _make(self, folder: Path, first_rank: int, workers: int) -> None:
        jobs.remove_dead()
        folder.mkdir(mode=0o700, parents=True)
        self._notes = Notes(folder)
        name = Path(sys.argv[0]).name.replace("__main__.py", "lockstep")
        program, host, now = " ".join([name, *without_values(sys.argv[1:])])[:200], socket.gethostname(), time.time()
        its_folders = (str(Path.cwd()), self.options.folder)
        jobs.describe(folder, jobs.About(program, os.getpid(), workers, first_rank, now, host, *its_folders))

    def pass_on(self) -> None:
        """Show what the watchers have said since the last time."""
        for text in self._notes.new() if self._notes is not None else ():
            self.tell(f"lockstep: {text}")

    def are_recorded(self, ranks: Iterable[int]) -> bool:
        """Whether any of the global `ranks` belongs to a group that is watched."""
        folder = self.folder
        return folder is not None and any(places.rank_file(folder, rank).exists() for rank in ranks)

    def report(self) -> reports.Report | None:
        """The one that the watchers have made for all ranks, if there is one."""
        if self.folder is None:
            return None
        try:
            return reports.read(self.folder / "report.json")
        except DataError:
            return None

    def states(self) -> dict[int, str]:
        """The states of all ranks as the report has them; empty without one."""
        report = self.report()
        return {row.rank: row.state for row in report.ranks} if report is not None else {}

    def take(self, failure: Failure) -> None:
        """Let this node's workers raise the `failure` of another's, unless they have a report already."""
        if self.folder is not None:
            with suppress(OSError, ValueError):  # the disk is full, or that node has another version
                report = reports.from_json(failure.report) if failure.report else _report_on(failure, self.folder)
                reports.write_once(self.folder, report)

    def close(self) -> None:
        """Remove what is left of the run."""
        self.pass_on()
        if self.folder is not None:
            jobs.remove(self.folder.parent)


def _report_on(failure: Failure, folder: Path) -> reports.Report:
    """On a worker of another node, with what is known of this one's, whose recordings are in `folder`."""
    from ..watch.reporting import row_of

    kind, state, did = _HOW.get(failure.kind, ("raised", "raised", f"has raised {failure.kind}"))
    reason = failure.reason.strip().partition("\n")[0]
    rows = [reports.RankRow(failure.rank, state, reason, failure.host, words=failure.traceback)]
    for recording in open_job(folder).values():
        rows.append(row_of(recording.state(), True, False, False))
        recording.close()
    rows.sort(key=lambda row: row.rank)
    sentence = f"Rank {failure.rank} on {failure.host} {did}: {reason}."
    return reports.Report(kind, sentence, tuple(rows), (failure.rank,), advice=_ADVICE[kind], time=time.time())
