"""The launcher's side of the watch over a node's workers: a place for their recordings, their words, and the report."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .. import environment
from ..errors import DataError
from ..recorder import places
from ..watch import jobs
from ..watch import report as reports
from ..watch.notes import Notes
from .options import Watch

__all__ = ["Watching"]

_HOWEVER_LONG = 7 * 24 * 3600.0  # seconds that ranks wait for one in a debugger


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
    _notes: Notes | None = field(default=None, repr=False)

    @property
    def is_on(self) -> bool:
        """Whether there is any watch over the workers."""
        return (self.options.mode or environment.watch_mode()) != "off"

    def variables(self, attempt: int) -> dict[str, str]:
        """What the workers of this `attempt` find in their environment."""
        chosen = {"LOCKSTEP_WATCH": self.options.mode, "LOCKSTEP_TIMELINE": self.options.timeline}
        limit = self.options.stall_timeout
        chosen["LOCKSTEP_STALL_TIMEOUT"] = None if limit is None else str(limit)
        if self.debug_rank is not None:
            chosen |= dict.fromkeys(("LOCKSTEP_STALL_TIMEOUT", "LOCKSTEP_STALL_WARNING"), str(_HOWEVER_LONG))
        chosen["LOCKSTEP_WATCH_DIR"] = str(self._attempt(attempt)) if self.is_on else ""
        return {name: value for name, value in chosen.items() if value is not None}

    def begin(self, attempt: int, first_rank: int, workers: int) -> None:
        """Make the place for workers that are about to be started."""
        if self.is_on:
            self.folder = self._attempt(attempt)
            jobs.make_base()
            jobs.remove_dead()
            self.folder.mkdir(mode=0o700, parents=True)
            self._notes = Notes(self.folder)
            name = Path(sys.argv[0]).name.replace("__main__.py", "lockstep")
            program, host, now = " ".join([name, *sys.argv[1:]])[:200], socket.gethostname(), time.time()
            its_folders = (str(Path.cwd()), self.options.folder)
            about = jobs.About(program, os.getpid(), workers, first_rank, now, host, *its_folders)
            jobs.describe(self.folder, about)

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

    def close(self) -> None:
        """Remove what is left of the run."""
        self.pass_on()
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _attempt(self, number: int) -> Path:
        return places.base() / self.name / f"attempt-{number}"
