"""The jobs whose ranks are recorded on this machine: who they are, and where their recordings lie."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import environment, private_folders
from ..errors import LockstepError
from ..recorder import open_job, places
from .checked import build

__all__ = ["About", "base_of", "describe", "find_jobs", "make_base", "remove", "remove_dead", "usual_base"]

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
    """The folder for jobs of this user; of a random name where somebody else has taken the usual one's place.

    Raises:
        OSError: none can be made.
    """
    return private_folders.make_folder(places.parent(), environment.runtime_dir())


def usual_base() -> str:
    """The same for `base_of`: "" where there is none but for a random name."""
    return str(private_folders.make_usual(places.parent(), environment.runtime_dir()) or "")


def base_of(said: str, token: str) -> Path:
    """The folder that another rank has chosen.

    Args:
        said: its `usual_base`.
        token: a text that it has drawn, of which a random name is made.

    Raises:
        OSError: it cannot be made.
        LockstepError: it is not this user's alone.
    """
    if not said:
        return private_folders.make_random(places.parent(), token)
    folder = Path(said)
    if not folder.name.startswith("lockstep") or not private_folders.is_private(folder):
        raise LockstepError(f"{folder} is no folder of this user's alone, in which ranks could record what they do")
    return folder


def remove(job: Path) -> None:
    """Remove all of a job, and what was made for it alone."""
    shutil.rmtree(job, ignore_errors=True)
    private_folders.leave(job.parent)


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
            remove(folder.parent)


def _folders() -> list[Path]:
    bases = private_folders.find_folders(places.parent(), environment.runtime_dir())
    return [folder for base in bases for job in _inside(base) for folder in _inside(job)]


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
