"""A job as its user describes it, whatever scheduler gets it, and the way of its file to the scheduler's own tool."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError, LockstepError

__all__ = [
    "START_LIMIT_S",
    "Job",
    "Scheduler",
    "check_script_is_shared",
    "hand_over",
    "in_lines",
    "parse_gigabytes",
    "parse_name",
    "parse_time",
    "quoted",
    "run_tool",
    "split_variables",
]

END_MARGIN_S = 30
"""Seconds after those in which workers save until the job ends: the launcher ends, and logs are written."""

START_LIMIT_S = 900
"""Seconds for which nodes that start in containers wait for each other: an image with CUDA takes minutes to pull."""

_TOOL_LIMIT_S = 60.0


# --- The job (data only) ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a scheduler has to run, and what the job needs.

    Attributes:
        command: the command line that has described it, for the head of the file.
        name: of the job: lower-case letters, digits and hyphens.
        options: of `lockstep run`, as words, without those of the nodes.
        program: the program's file or module, and its arguments.
        nodes: how many.
        workers: on each node.
        gpus: on each node; 0 for none.
        gpu_type: their model, such as H100; "" for any.
        cpus: cores of each node.
        memory: gigabytes of each node; None for the scheduler's default.
        limit: seconds after which the scheduler ends the job; None for its default.
        grace: seconds that workers may take to save.
        elastic: whether the job goes on when nodes are lost.
        restarts: how often what was lost is started again, where the scheduler counts that.
        folder: in which the program runs, the same on all nodes.
        python: the interpreter there.
        setup: lines of shell before the program starts.
        variables: NAME=VALUE, or NAME for one whose value is not in the file.
        settings: options that only some schedulers have, by name.
    """

    command: str
    name: str
    options: tuple[str, ...]
    program: tuple[str, ...]
    nodes: int = 1
    workers: int = 1
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 1
    memory: int | None = None
    limit: int | None = None
    grace: int = 120
    elastic: bool = False
    restarts: int = 3
    folder: str = ""
    python: str = "python"
    setup: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def lead(self) -> int:
        """Seconds before the end of the job at which its workers are told to save."""
        return self.grace + END_MARGIN_S

    def run_words(self, *more: str) -> list[str]:
        """Return the words of `lockstep run` for one node, with `more` of its options."""
        return [self.python, "-m", "lockstep", "run", *more, *self.options, *self.program]

    def setting(self, name: str, needed_by: str = "", example: str = "") -> str:
        """Return one of `settings`; "" if it is not given.

        Raises:
            ConfigError: it is not given, and `needed_by` names who needs it.
        """
        value = self.settings.get(name, "")
        if not value and needed_by:
            raise ConfigError(name, f"{example}, which {needed_by} needs", found="nothing")
        return value

    def check_installed(self, title: str) -> None:
        """Raise ConfigError if nothing installs the program's packages on nodes that begin empty."""
        if not self.setup and not self.setting("image"):
            expected = (
                f"commands that install Lockstep and the program's packages on the nodes, which {title} gives empty"
            )
            hint = "For example --setup 'pip install -r requirements.txt', or --image NAME for an image that has them."
            raise ConfigError("setup", expected, found="nothing", hint=hint)

    def check_limit(self) -> None:
        """Raise ConfigError if the time limit leaves no time to train."""
        if self.limit is not None and self.limit <= self.lead:
            expected = (
                f"more than {self.lead} s: workers are told to save {self.grace} + {END_MARGIN_S} s before the end"
            )
            raise ConfigError("time", expected, found=f"{self.limit} s", hint="--grace S gives them less time.")


class Scheduler(Protocol):
    """A scheduler: how its file is written, checked and handed over.

    Attributes:
        title: its name in messages.
        suffix: of the file's name.
        tool: the program to which the file is handed.
        settings: the names in `Job.settings` that it has a use for.
        local_python: whether jobs run in the Python and the folder in which the command is given.
    """

    title: str
    suffix: str
    tool: str
    settings: tuple[str, ...]
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

    def submit_words(self, job: Job, path: str) -> list[str]:
        """Return the command that hands over the file at `path`."""

    def prepare(self, job: Job, path: str) -> None:
        """Do what must be done before the file is handed over, and let the tool check it."""


# --- Values of options (pure) -----------------------------------------------------------------------------------------

_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)|(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?", re.ASCII)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)


def parse_time(text: str) -> int:
    """Return the seconds in a time limit such as 90m, 4h, 2d12h, 4:00:00 or 2-12:00:00.

    Raises:
        ConfigError: it is none.
    """
    match = _TIME.fullmatch(text.strip())
    numbers = [int(number or 0) for number in match.groups()] if match else [0]
    seconds = sum(n * unit for n, unit in zip(numbers, (86400, 3600, 60, 1, 86400, 3600, 60), strict=False))
    if not 60 <= seconds < 1000 * 86400:
        raise ConfigError("time", "a time limit of at least a minute, such as 90m, 4h, 2d or 1-12:00:00", text)
    return seconds


def parse_gigabytes(text: str) -> int:
    """Return the gigabytes in a text such as 64 or 64G.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})\s*(?:gi?b?)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigError("memory", "gigabytes on each node, such as 64G", text)
    return int(match[1])


def parse_name(text: str, given: bool) -> str:
    """Return the name of a job; one that is not `given` by the user but the program's is made to fit.

    Raises:
        ConfigError: it does not fit.
    """
    if not given:
        text = re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "train"
    if not _NAME.fullmatch(text):
        raise ConfigError("name", "up to 40 lower-case letters, digits and hyphens, as all schedulers take them", text)
    return text


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


# --- Pieces of files (pure) -------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """Return `text` as a string of YAML, and of JSON, of which YAML is a superset."""
    return json.dumps(text, ensure_ascii=False)


def in_lines(words: Sequence[str], width: int = 100) -> list[str]:
    """Return a command of sh in lines that end in backslashes; an option stays with its value."""
    lines, line = [], ""
    for number, word in enumerate(words):
        starts = word.startswith("-") or not (number and words[number - 1].startswith("-"))
        text = shlex.quote(word)
        if line and starts and len(line) + len(text) > width:
            lines.append(line + " \\")
            line = "    " + text
        else:
            line = f"{line} {text}" if line else text
    return [*lines, line]


# --- The files on this host -------------------------------------------------------------------------------------------

_LOCAL_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "overlay")
_OWN_FOLDERS = tuple(Path(name) for name in ("/tmp", "/var/tmp", "/dev/shm", "/run"))


def check_script_is_shared(script: Path, folder: Path, shared: str, mounts: str) -> None:
    """Check that nodes other than this host will find the program, as far as that can be known here.

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
                raise ConfigError("script", f"a file in the shared folder {shared}", found=str(path), hint=hint)
            continue
        own = next((str(own) for own in _OWN_FOLDERS if path.is_relative_to(own)), "")
        system = _file_system(path, mounts)
        if own or system in _LOCAL_SYSTEMS:
            found = f"{path}, where each host has a folder of its own ({own or system})"
            raise ConfigError("script", "a file on a folder that all nodes share", found=found, hint=hint)


def _file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that `path` is on."""
    rows = [line.split() for line in mounts.splitlines()]
    points = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    return max(((len(point), kind) for point, kind in points if path.is_relative_to(point)), default=(0, ""))[1]


def run_tool(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a scheduler's tool, and return its exit code, output and error message in one line.

    Returns:
        The exit code is 127 if it is not installed, and 124 if it does not answer.
    """
    if shutil.which(words[0]) is None:
        return 127, "", f"there is no {words[0]} on the PATH"
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TOOL_LIMIT_S
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
        hint = "`lockstep doctor` lists the schedulers that can be reached from here; --dry-run needs none."
        expected = f"a scheduler that can be reached from here: {scheduler.title} is by `{scheduler.tool}`"
        raise ConfigError("to", expected, found=f"no {scheduler.tool} on the PATH", hint=hint)
    scheduler.check_here(job)
    scheduler.prepare(job, str(path))
    words = scheduler.submit_words(job, str(path))
    code, output, error = run_tool(words)
    if code:
        raise LockstepError(f"`{shlex.join(words)}` has failed: {error or f'exit code {code}'}. The file is {path}.")
    return output.strip()
