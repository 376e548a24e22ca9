"""The options of `lockstep submit` beside those of `lockstep run`: what a job needs, and what a
scheduler asks for.

An option that only one scheduler has is in the group of the help that is named after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError
from ..option_table import choice, integer, option, text

_TIME = re.compile(
    r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)|(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?", re.ASCII
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)
_GIGABYTES = re.compile(r"([1-9]\d{0,5})\s*(?:gi?b?)?", re.IGNORECASE | re.ASCII)


def parse_time(name: str, value: str) -> int:
    """Return the seconds in a time limit such as 90m, 4h, 2d12h, 4:00:00 or 2-12:00:00.

    Raises:
        ConfigError: it is none.
    """
    match = _TIME.fullmatch(value.strip())
    numbers = [int(number or 0) for number in match.groups()] if match else [0]
    seconds = sum(
        n * unit for n, unit in zip(numbers, (86400, 3600, 60, 1, 86400, 3600, 60), strict=False)
    )
    if not 60 <= seconds < 1000 * 86400:
        raise ConfigError(
            name, "a time limit of at least a minute, such as 90m, 4h, 2d or 1-12:00:00", value
        )
    return seconds


def fit_name(text: str) -> str:
    """Return a name for the job of a program, made of its file's or module's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "train"


def _name(name: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ConfigError(
            name,
            "up to 40 lower-case letters, digits and hyphens, as all schedulers take them",
            value,
        )
    return value


def _gigabytes(name: str, value: str) -> int:
    match = _GIGABYTES.fullmatch(value.strip())
    if match is None:
        raise ConfigError(name, "gigabytes on each node, such as 64G", value)
    return int(match[1])


def _word(name: str, value: str) -> str:
    """Return what becomes part of a line of the file."""
    if not value.isprintable() or value != value.strip():
        raise ConfigError(name, "a word without control characters", value)
    return value


def _folder(name: str, value: str) -> str:
    return text(name, _word(name, value))


def _volume(name: str, value: str) -> tuple[str, str]:
    claim, colon, path = _word(name, value).rpartition(":")
    if not colon or not path.startswith("/"):
        raise ConfigError(name, "CLAIM:/PATH, a persistent volume claim and its place", value)
    return claim, path


def _lines(_: str, lines: list[str]) -> tuple[str, ...]:
    return tuple(lines)


_NUMBER = integer(1, 1 << 16)
_COUNT = integer(0, 1 << 16)


RESOURCES = "resources"
PLACE = "place"
SLURM = "Slurm"
KUBERNETES = "Kubernetes"


@dataclass(frozen=True)
class SubmitOptions:
    """The options of ``lockstep submit``, without those that it passes on to ``lockstep run``."""

    to: str | None = option(None, metavar="SCHEDULER", help="slurm or kubernetes")
    yes: bool = option(False, "-y", "--yes", help="hand the file to the scheduler without asking")
    dry_run: bool = option(False, "--dry-run", help="only print the file")
    output: str | None = option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="write the file there (default: when it is handed over, into the current folder, "
        "under the job's name)",
    )
    debug: bool = option(False, help="print the traceback of an error")

    nodes: int = option(
        1,
        group=RESOURCES,
        metavar="N",
        parse=_NUMBER,
        help="number of nodes, with a launcher on each",
    )
    gpus: int = option(
        0,
        group=RESOURCES,
        metavar="G",
        parse=_COUNT,
        help="GPUs of each node; without -np there is a worker for each",
    )
    gpu_type: str | None = option(
        None,
        group=RESOURCES,
        metavar="NAME",
        parse=_word,
        help="their model, such as H100, as the scheduler calls it",
    )
    cpus: int | None = option(
        None,
        group=RESOURCES,
        metavar="N",
        parse=_NUMBER,
        help="cores of each node (default: one for each worker, with GPUs four)",
    )
    memory: int | None = option(
        None,
        group=RESOURCES,
        metavar="GB",
        parse=_gigabytes,
        help="memory of each node, such as 64G (default: the scheduler's)",
    )
    time: int | None = option(
        None,
        group=RESOURCES,
        metavar="T",
        parse=parse_time,
        help="time limit, such as 90m, 4h, 2d or 1-12:00:00; workers are told to save before it",
    )
    retries: int = option(
        3,
        group=RESOURCES,
        metavar="N",
        parse=_COUNT,
        help="how often nodes that fail are started again, not counting preemptions; Slurm does "
        "not count",
    )

    name: str | None = option(
        None,
        group=PLACE,
        metavar="NAME",
        parse=_name,
        help="of the job (default: the program's)",
    )
    folder: str | None = option(
        None,
        group=PLACE,
        metavar="DIR",
        help="in which the program runs (default: this one, or that of the container image)",
    )
    python: str | None = option(
        None,
        group=PLACE,
        metavar="PATH",
        help="interpreter on the nodes (default: with Slurm this one, with Kubernetes `python`)",
    )
    setup: tuple[str, ...] = option(
        (),
        group=PLACE,
        metavar="COMMAND",
        parse=_lines,
        repeats=True,
        help="line of shell before the program, such as 'module load cuda'; may be repeated",
    )

    partition: str | None = option(
        None,
        group=SLURM,
        metavar="NAME",
        parse=_word,
        help="partition (default: the default one)",
    )
    account: str | None = option(None, group=SLURM, metavar="NAME", parse=_word, help="account")
    qos: str | None = option(
        None, group=SLURM, metavar="NAME", parse=_word, help="quality of service"
    )
    constraint: str | None = option(
        None,
        group=SLURM,
        metavar="LIST",
        parse=_word,
        help="features that the nodes must have",
    )
    log_dir: str = option(
        "logs", group=SLURM, metavar="DIR", parse=_folder, help="folder of the job's output"
    )
    shared_folder: str | None = option(
        None,
        group=SLURM,
        metavar="DIR",
        parse=_word,
        help="a folder that all nodes see, in which the program is (default: any that is not "
        "obviously one of this host alone, such as /tmp)",
    )

    image: str | None = option(
        None, group=KUBERNETES, metavar="NAME", parse=_word, help="container image"
    )
    volume: tuple[str, str] | None = option(
        None,
        group=KUBERNETES,
        metavar="V:/PATH",
        parse=_volume,
        write=":".join,
        help="persistent volume claim, and its place in the container, for checkpoints",
    )
    shm: int = option(8, group=KUBERNETES, metavar="GB", parse=_NUMBER, help="size of /dev/shm")
    kind: str = option(
        "job",
        group=KUBERNETES,
        metavar="KIND",
        parse=choice(("job", "jobset")),
        help="job, or jobset, for which the cluster needs JobSet",
    )
    namespace: str | None = option(
        None, group=KUBERNETES, metavar="NAME", parse=_word, help="namespace"
    )
