"""A job as a scheduler gets it, whichever it is, and the way of its file to the scheduler's own
tool (`hand_over`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError, LockstepError
from .options import SubmitOptions

END_MARGIN_S = 30
"""Seconds after those in which workers save until the job ends: the launcher ends, and logs are
written.
"""

_TOOL_LIMIT_S = 60.0


@dataclass(frozen=True)
class Job:
    """What a scheduler has to run, and what the job needs.

    Attributes:
        request: what the user has asked for.
        command: the command line that says so, for the head of the file.
        name: of the job: lower-case letters, digits and hyphens.
        options: of `lockstep run`, as words, without those of the nodes.
        program: the program's file or module, and its arguments.
        workers: on each node.
        cpus: cores of each node.
        grace: seconds that workers may take to save.
        elastic: whether the job goes on when nodes are lost.
        folder: in which the program runs, the same on all nodes.
        python: the interpreter there.
        variables: NAME=VALUE, or NAME for one whose value is not in the file.
    """

    request: SubmitOptions
    command: str
    name: str
    options: tuple[str, ...]
    program: tuple[str, ...]
    workers: int
    cpus: int
    grace: int
    elastic: bool
    folder: str
    python: str
    variables: tuple[str, ...]

    @property
    def lead(self) -> int:
        """Seconds before the end of the job at which its workers are told to save."""
        return self.grace + END_MARGIN_S

    def run_words(self, *more: str) -> list[str]:
        """Return the words of `lockstep run` for one node, with `more` of its options."""
        return [self.python, "-m", "lockstep", "run", *more, *self.options, *self.program]

    def check_limit(self) -> None:
        """Raise ConfigError if the time limit leaves no time to train."""
        limit = self.request.time
        if limit is not None and limit <= self.lead:
            expected = (
                f"more than {self.lead} s: workers are told to save {self.grace} + {END_MARGIN_S} "
                "s before the end"
            )
            raise ConfigError(
                "time", expected, found=f"{limit} s", hint="--grace S gives them less time."
            )


class Scheduler(Protocol):
    """A scheduler: how its file is written, checked and handed over.

    Attributes:
        title: its name in messages, and the group of the options that only it has.
        suffix: of the file's name.
        tool: the program to which the file is handed.
        local_python: whether jobs run in the Python and the folder in which the command is given.
    """

    title: str
    suffix: str
    tool: str
    local_python: bool

    def write(self, job: Job) -> str:
        """Return the file's text (pure).

        Raises:
            ConfigError: the scheduler cannot run such a job, or lacks a setting.
        """

    def check_here(self, job: Job) -> None:
        """Ask the scheduler's own tools, where they are installed, whether it can run the job.

        Raises:
            ConfigError: it cannot.
        """

    def submit_words(self, path: str) -> list[str]:
        """Return the command that hands over the file at `path`."""

    def prepare(self, job: Job, path: str) -> None:
        """Do what must be done before the file is handed over, and let the tool check it."""


def split_variables(variables: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables whose values are in the file, and the names of the others.

    Raises:
        ConfigError: one has no valid name.
    """
    values: dict[str, str] = {}
    names: list[str] = []
    for text in variables:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError("env", "NAME or NAME=VALUE", text)
        if equals:
            values[name] = value
        else:
            names.append(name)
    return values, names


_LOCAL_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "overlay")
_OWN_FOLDERS = tuple(Path(name) for name in ("/tmp", "/var/tmp", "/dev/shm", "/run"))


def check_script_is_shared(script: Path, folder: Path, shared: str, mounts: str) -> None:
    """Check that nodes other than this host will find the program, as far as that can be known
    here.

    Args:
        script: the program's file.
        folder: in which the job runs.
        shared: the folder that the user says all nodes see; "" if he has not.
        mounts: the content of /proc/mounts.

    Raises:
        ConfigError: they will not.
    """
    hint = "Move it there, or name the folder that all nodes see: --shared-folder DIR."
    for path in (script, folder):
        if shared:
            if not path.is_relative_to(Path(shared)):
                raise ConfigError(
                    "script", f"a file in the shared folder {shared}", found=str(path), hint=hint
                )
            continue
        of_host = next((str(folder) for folder in _OWN_FOLDERS if path.is_relative_to(folder)), "")
        system = _file_system(path, mounts)
        if of_host or system in _LOCAL_SYSTEMS:
            found = f"{path}, where each host has a folder of its own ({of_host or system})"
            raise ConfigError(
                "script", "a file on a folder that all nodes share", found=found, hint=hint
            )


def _file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that `path` is on."""
    rows = [line.split() for line in mounts.splitlines()]
    points = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    return max(
        ((len(point), kind) for point, kind in points if path.is_relative_to(point)),
        default=(0, ""),
    )[1]


def run_tool(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a scheduler's tool, and return its exit code, output and error message in one line.

    Returns:
        The exit code is 127 if it is not installed, and 124 if it does not answer.
    """
    if shutil.which(words[0]) is None:
        return 127, "", f"there is no {words[0]} on the PATH"
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"`{shlex.join(words)}` does not answer within {_TOOL_LIMIT_S:g} s"
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return done.returncode, done.stdout, "; ".join(lines[-3:])


def hand_over(scheduler: Scheduler, job: Job, path: Path) -> str:
    """Hand the file at `path` to the scheduler's own tool, and return what that says.

    Raises:
        ConfigError: the tool is not here, or the job does not fit.
        LockstepError: the tool refuses it.
    """
    if shutil.which(scheduler.tool) is None:
        hint = "Run it where jobs are submitted from; --dry-run prints the file anywhere."
        expected = (
            f"a scheduler that can be reached from here: {scheduler.title} is by `{scheduler.tool}`"
        )
        raise ConfigError("to", expected, found=f"no {scheduler.tool} on the PATH", hint=hint)
    scheduler.check_here(job)
    scheduler.prepare(job, str(path))
    words = scheduler.submit_words(str(path))
    code, output, error = run_tool(words)
    if code:
        why = error or f"exit code {code}"
        raise LockstepError(f"`{shlex.join(words)}` has failed: {why}. The file is {path}.")
    return output.strip()
