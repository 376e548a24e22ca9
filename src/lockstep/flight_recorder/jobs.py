"""The jobs of this host: the folders with the flight recorders of their ranks, and what else is in
these folders.

A job's folder holds, beside the flight recorders, the description of the job, messages of its ranks
to the user, and the events of an elastic job.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import msgspec

from .. import environment, messages
from ..error_lines import write_error_line
from ..errors import LockstepError
from ..messages import Integer
from ..system import private_folders
from ..system.job_folders import is_abandoned
from ..system.terminal_text import plain
from . import layout, notes
from .reader import open_job

_MAX_CHARACTERS = (
    2000  # of a line of JSON (ASCII); up to 4 KiB that are written at once are not interleaved
)
_MAX_READ = 1 << 20  # bytes of messages that are read at once


def write_message(folder: Path | None, text: str) -> None:
    """Write a message for the launcher that reads those in `folder`; to standard error if that is
    None.
    """
    if folder is None:
        write_error_line(f"lockstep: {text}")
        return
    while len(line := messages.encode(text) + "\n") > _MAX_CHARACTERS:
        text = text[: len(text) * 3 // 4]
    descriptor = os.open(folder / "messages", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class MessageReader:
    """Reads the messages in a job's folder, each of them once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "messages"
        self._read = 0

    def read(self) -> list[str]:
        """Return the messages that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(_MAX_READ)
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return [text for line in complete.splitlines() if (text := _parse_message(line))]


def _parse_message(line: bytes) -> str:
    try:
        return "\n".join(map(plain, messages.decode(line, str).split("\n")))
    except ValueError:  # not written by `write_message`
        return ""


_NAME = "job.json"


EVENTS = "events"
"""The file in the folder of a job's records with what has happened in an elastic job, a line each.
"""


class JobDescription(msgspec.Struct, frozen=True):
    """The description of a job, a file beside the flight recorders of its ranks.

    Attributes:
        program: its command line.
        pid: of its launcher, or of the rank that made the folder; when it and all ranks have ended,
            so has the job.
        workers: number of ranks on this host.
        first_rank: the lowest of them.
        started: Unix time of its start.
        host: name of this host.
        cwd: the folder in which it was started.
        folder: its run directory, "" for none.
        control: the path of the socket by which `lockstep resize` reaches the launcher of an
            elastic job; else "".
    """

    program: str
    pid: Integer
    workers: Integer
    first_rank: Integer = 0
    started: float = 0.0
    host: str = ""
    cwd: str = ""
    folder: str = ""
    control: str = ""


def command_line() -> str:
    """Return the command line of this process."""
    return " ".join(sys.argv)[:200]


def make_base() -> Path:
    """Make the folder of this user's jobs; with a random name if another user has taken the default
    one.

    Raises:
        OSError: it cannot be made.
    """
    return private_folders.make_folder(layout.parent(), environment.runtime_dir())


def default_base() -> str:
    """Make the default folder of this user's jobs and return its path; "" if another user has taken
    it.
    """
    return str(private_folders.make_usual_folder(layout.parent(), environment.runtime_dir()) or "")


def resolve_base(published: str, token: str) -> Path:
    """Return the folder of jobs that another rank has chosen.

    Args:
        published: its `default_base`.
        token: a random text that it has published, from which a random name is made.

    Raises:
        OSError: the folder cannot be made.
        LockstepError: other users can write to the folder.
    """
    if not published:
        return private_folders.make_random_folder(layout.parent(), token)
    folder = Path(published)
    if not folder.name.startswith("lockstep") or not private_folders.is_private(folder):
        raise LockstepError(
            f"{folder} is not a private folder of this user, as flight recorders need"
        )
    return folder


def remove(job: Path) -> None:
    """Remove a job's folder, and its parent if that was made for it."""
    shutil.rmtree(job, ignore_errors=True)
    private_folders.remove_if_random(job.parent)


def write_description(folder: Path, job: JobDescription) -> None:
    """Write the description of a job into its `folder`."""
    notes.write(folder / _NAME, job)


def find_jobs() -> dict[Path, JobDescription]:
    """Return the running jobs of this user by folder, the oldest first."""
    running = []
    for job_folder in _jobs():
        for folder in _inside(job_folder):
            job = notes.read(folder / _NAME, JobDescription)
            if job is not None and _is_running(folder, job):
                running.append((folder, job))
    return dict(sorted(running, key=lambda entry: entry[1].started))


def remove_dead() -> None:
    """Remove the folders of jobs that were killed before they could do so themselves."""
    for job in _jobs():
        if is_abandoned(job):
            remove(job)


def _jobs() -> list[Path]:
    bases = private_folders.find_folders(layout.parent(), environment.runtime_dir())
    return [job for base in bases for job in _inside(base)]


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # another job has removed it at this moment
        return []


def _is_running(folder: Path, job: JobDescription) -> bool:
    """Return whether the launcher or a rank is alive: without a launcher, other ranks may outlive
    the first one.
    """
    if _is_alive(job.pid):
        return True
    ranks = open_job(folder).values()
    pids = [reader.pid for reader in ranks]
    for reader in ranks:
        reader.close()
    return any(map(_is_alive, pids))


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (
        OSError,
        OverflowError,
    ):
        # it does not exist, or belongs to another user, as the process id was reused
        return False
    return True
