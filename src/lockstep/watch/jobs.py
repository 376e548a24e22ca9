"""The jobs whose ranks are recorded on this machine: who they are, and where their recordings lie."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import LockstepError
from ..recorder import open_job, places
from .checked import build

__all__ = ["About", "describe", "find_jobs", "make_base", "remove_dead"]

_NAME = "job.json"


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
    except OSError:  # no Linux
        return ""


@dataclass(frozen=True)
class About:
    """What is said of a job beside its recordings.

    Attributes:
        program: what it runs.
        pid: of its launcher, or of the rank that has made the folder; when it and all ranks have ended, the job has.
        workers: ranks on this machine.
        first_rank: the lowest of them.
        started: seconds since the epoch.
        host: this machine.
        cwd: the folder in which it was started.
        folder: the folder that it was given for its output, "" for none.
        space: in which the process numbers mean something: containers may share the folder of all jobs.
    """

    program: str
    pid: int
    workers: int
    first_rank: int = 0
    started: float = 0.0
    host: str = ""
    cwd: str = ""
    folder: str = ""
    space: str = field(default_factory=_space)


def make_base() -> Path:
    """The folder for all jobs of this user, whose name anybody can guess, in a place where anybody may make folders.

    Raises:
        LockstepError: it is another user's, or open to others.
    """
    folder = places.base()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o170077 != 0o040000:
        raise LockstepError(
            f"{folder} should be a folder of this user's alone, for the recordings of running jobs, and is not. "
            "Remove it, or have it removed; LOCKSTEP_WATCH=off does without it."
        )
    return folder


def describe(folder: Path, about: About) -> None:
    """Say in `folder` what job it belongs to."""
    draft = folder / f".{_NAME}"
    draft.write_text(json.dumps(asdict(about)))
    draft.replace(folder / _NAME)


def find_jobs() -> dict[Path, About]:
    """The jobs that are running, by the folders of their recordings, the oldest first."""
    found = {folder: _read(folder / _NAME) for folder in _folders()}
    running = [(folder, about) for folder, about in found.items() if about is not None and _is_running(folder, about)]
    return dict(sorted(running, key=lambda each: each[1].started))


def remove_dead() -> None:
    """Remove what jobs have left that were killed before they could do so themselves."""
    for folder in _folders():
        about = _read(folder / _NAME)
        if about is not None and about.space == _space() and not _is_running(folder, about):
            shutil.rmtree(folder.parent, ignore_errors=True)


def _folders() -> list[Path]:
    return [folder for job in _inside(places.base()) for folder in _inside(job)]


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # another job has removed it at this moment
        return []


def _read(path: Path) -> About | None:
    try:
        return build(About, json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):  # gone by now, or not written by `describe`
        return None


def _is_running(folder: Path, about: About) -> bool:
    """Whether the launcher, or one of the ranks, lives: a rank without a launcher may outlive the first of them."""
    if _is_there(about.pid):
        return True
    ranks = open_job(folder).values()
    pids = [recording.pid for recording in ranks]
    for recording in ranks:
        recording.close()
    return any(map(_is_there, pids))


def _is_there(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):  # not there, or another user's, as the number has been given out again
        return False
    return True
