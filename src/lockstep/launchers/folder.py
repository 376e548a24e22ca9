"""The private folder in which workers leave word for their launcher: who is there, who has finished, who failed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Folder", "Report", "time_file"]


@dataclass(frozen=True)
class Report:
    """What a worker says about its early end.

    Attributes:
        rank: its local rank.
        time: nanoseconds since the epoch, taken where the exception was caught.
        kind: class name of the exception.
        reason: its message.
        traceback: its traceback as text.
        exit_code: the process's exit code.
        after: local ranks that had died by then, so that this failure is likely to follow from theirs.
        signal_number: the signal on which the worker stopped in good order; 0 where it failed.
        checkpoint: what it saved before it stopped.
        packed: the exception itself as `call.pack` and Base64 make it text, where it is one of Lockstep's; else "".
        in_collective: whether it was raised while talking to other ranks, as it is where one of them has left.
        is_joint: whether it only says what the report of all ranks says.
    """

    rank: int
    time: int
    kind: str
    reason: str
    traceback: str = ""
    exit_code: int = 1
    after: tuple[int, ...] = ()
    signal_number: int = 0
    checkpoint: str | None = None
    packed: str = ""
    in_collective: bool = False
    is_joint: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the worker ended in good order because a signal asked for it."""
        return self.signal_number > 0


@dataclass(frozen=True)
class Folder:
    """Files of one run; `path` is a directory that only this user can enter.

    A worker holds a POSIX lock on its presence file as long as it lives. The kernel takes the lock away when the
    process ends, however it ends, and before it closes the process's sockets: a peer that fails because of that
    death already sees the lock free. Processes forked by the worker do not share the lock.
    """

    path: Path

    def attempt(self, number: int) -> Folder:
        """The folder of the workers that were started when others had failed `number` times before."""
        return Folder(self.path / f"attempt-{number}")

    @property
    def needs_time(self) -> bool:
        """Whether a worker that was sent a signal has asked for time to clear up."""
        return time_file(self.path.parent).exists()

    def enter(self, rank: int) -> None:
        """Mark this process as the living worker `rank`; lasts until the process ends."""
        draft = self.path / f"entering-{rank}"
        # never closed: closing any descriptor of the file gives the lock up
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, str(os.getpid()).encode())
        draft.rename(self._presence(rank))

    def present(self, ranks: Iterable[int]) -> dict[int, int]:
        """The process ids of those of `ranks` that have entered and still live."""
        entered = {rank: self._presence(rank) for rank in ranks if self._presence(rank).exists()}
        return {rank: int(path.read_text()) for rank, path in entered.items() if _is_locked(path)}

    def lost(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have entered and died without having finished."""
        entered = [rank for rank in ranks if self._presence(rank).exists()]
        return [rank for rank in entered if not _is_locked(self._presence(rank)) and not self.is_finished(rank)]

    def finish(self, rank: int) -> None:
        """Mark `rank` as having done its work, so that its end is no loss."""
        self._finished(rank).touch()

    def is_finished(self, rank: int) -> bool:
        """Whether `rank` has done its work."""
        return self._finished(rank).exists()

    def has_ended(self, rank: int) -> bool:
        """Whether `rank` has finished, failed or died."""
        return self.is_finished(rank) or self._report(rank).exists() or bool(self.lost([rank]))

    def write(self, report: Report) -> None:
        """Leave `report` for the launcher, who sees all of it or nothing."""
        draft = self.path / f"writing-{report.rank}"
        draft.write_text(json.dumps(asdict(report)))
        draft.rename(self._report(report.rank))

    def read(self, rank: int) -> Report | None:
        """The report of `rank`, if it has left one."""
        try:
            fields = json.loads(self._report(rank).read_text())
        except FileNotFoundError:
            return None
        return Report(**{**fields, "after": tuple(fields["after"])})

    def _presence(self, rank: int) -> Path:
        return self.path / f"present-{rank}"

    def _finished(self, rank: int) -> Path:
        return self.path / f"finished-{rank}"

    def _report(self, rank: int) -> Path:
        return self.path / f"report-{rank}.json"


def time_file(folder: Path) -> Path:
    """The file in a run's folder that a worker makes to ask for time."""
    return folder / "asked-for-time"


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        return False
