"""The environment variables by which torchrun, Horovod, MPI and Slurm give a worker its position in
the job.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..system.processes import has_variables, read_status
from ..topology import World
from .variable_table import LAUNCHED

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "expand_nodes",
    "expand_tasks",
    "find_launcher",
    "launcher_identity",
    "read_world",
]


# an entry between two commas: names, and brackets with lists of numbers
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(text: str) -> list[str]:
    """Return the names in a node list such as ``node[01-03,7],gpu4``, in order.

    Raises:
        ValueError: the text is invalid.
    """
    names = _NAME.findall(text)
    if ",".join(names) != text or not names:
        raise ValueError(f"not a list of nodes: {text!r}")
    return [node for name in names for node in _expand_name(name)]


def _expand_name(name: str) -> list[str]:
    fields = re.split(r"\[(.+?)\]", name)  # text and the inside of brackets alternate
    choices = [_expand_numbers(part) if i % 2 else [part] for i, part in enumerate(fields)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"not a range of numbers: {part!r}")
        first = match[1]
        last = match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node, from a text such as ``2(x3),1``.

    Raises:
        ValueError: the text is invalid.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"not a list of numbers of tasks: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables by which a launcher gives a process its position in the job.

    Attributes:
        source: its short name, the value of `World.source`.
        title: its name in errors.
        rank, size: variables of the rank and the number of ranks; either identifies the launcher.
        local_rank, local_size: variables of the rank among the ranks of its host, and their number.
        node, nodes: variables of the node's number and the number of nodes; "" if there are none.
        incomplete: whether all variables but the first two are optional.
    """

    source: str
    title: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    nodes: str = ""
    incomplete: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All of its variables."""
        names = (self.rank, self.size, self.local_rank, self.local_size, self.node, self.nodes)
        return tuple(name for name in names if name)


_TORCH = functools.partial(
    Launcher,
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
    nodes="GROUP_WORLD_SIZE",
    incomplete=True,  # many scripts set only these two
)
_LOCKSTEP = _TORCH("lockstep", "Lockstep's launcher")
_TORCHRUN = _TORCH("torchrun", "torchrun")

_HOROVOD = Launcher(
    "horovod",
    "horovodrun",
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)

_OPENMPI = Launcher(
    "openmpi",
    "Open MPI's mpirun",
    *(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # OMPI_COMM_WORLD_NODE_RANK is also a local rank, over all jobs; no variable holds the node's
    # number
)

_MPICH = Launcher(
    "mpich",
    "mpiexec of MPICH (Hydra) or Intel MPI",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)

_SLURM = Launcher(
    "slurm",
    "Slurm's srun",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
)

LAUNCHERS = (_LOCKSTEP, _TORCHRUN, _HOROVOD, _OPENMPI, _MPICH, _SLURM)
"""In order of precedence: a launcher that starts processes inside a job of another one precedes
that one.

mpiexec or srun start torchrun once per node. mpiexec starts its own daemons by srun, and the
processes that these start inherit the daemons' Slurm variables, which say nothing about ranks.
"""


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started the process with the environment `env`; None if none did."""
    return next((launcher for launcher in LAUNCHERS if _has_started(launcher, env)), None)


def _has_started(launcher: Launcher, env: Mapping[str, str]) -> bool:
    if launcher is _SLURM:
        # A batch script, and the shell of salloc, have SLURM_PROCID=0 and SLURM_NTASKS, but no
        # variables of a step; the shell of `srun --pty` or of an interactive step is a step of one
        # task. Users start jobs from these; they are not workers.
        return env.get(launcher.size, "1") != "1"
    if launcher is _LOCKSTEP and LAUNCHED.name not in env:
        return False
    if launcher is _MPICH and "MPI_LOCALRANKID" not in env and "SLURM_STEP_ID" in env:
        return False  # set by srun --mpi=pmi2
    return launcher.rank in env or launcher.size in env


def read_world(env: Mapping[str, str], launcher: Launcher) -> World:
    """Read the worker's position from the variables of `launcher`.

    Raises:
        ConfigError: a variable is missing while others are set, is not an integer, or contradicts
            another.
    """
    read = _Reader(env, launcher)
    size = read.size(launcher.size)
    rank = read.index(launcher.rank, launcher.size, size)
    if launcher is _SLURM:
        return _read_step(read, rank, size)
    local_size = read.size(launcher.local_size, (launcher.size, size), read.default(size))
    local_rank = read.index(
        launcher.local_rank, launcher.local_size, local_size, read.default(rank % local_size)
    )
    # what follows if all nodes have as many ranks, in blocks or round-robin
    nodes = -(-size // local_size)
    node = rank // local_size if rank % local_size == local_rank else rank % nodes
    if launcher.nodes in env:
        nodes = read.size(launcher.nodes, (launcher.size, size))
        node = read.index(launcher.node, launcher.nodes, nodes, read.default(node))
    return World(rank, size, local_rank, local_size, node, nodes, launcher.source)


def _read_step(read: _Reader, rank: int, size: int) -> World:
    nodes = read.size(_SLURM.nodes, (_SLURM.size, size))
    node = read.index(_SLURM.node, _SLURM.nodes, nodes)
    text = read.text(_SLURM.local_size, "the number of tasks on each node, such as 2(x3),1")
    try:
        counts = expand_tasks(text)
        fits = len(counts) == nodes and sum(counts) == size and counts[node] > 0
    except ValueError:
        fits = False
    if not fits:
        expected = f"{size} tasks ({_SLURM.size}) on {nodes} nodes ({_SLURM.nodes})"
        raise read.error(_SLURM.local_size, expected, text)
    local_rank = read.index(_SLURM.local_rank, _SLURM.local_size, counts[node])
    return World(rank, size, local_rank, counts[node], node, nodes, _SLURM.source)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads and checks the variables of one launcher."""

    env: Mapping[str, str]
    launcher: Launcher

    def default(self, value: int) -> int | None:
        """Return `value` as the default if the launcher's variables may be incomplete; else
        None.
        """
        return value if self.launcher.incomplete else None

    def size(
        self, name: str, limit: tuple[str, int] | None = None, default: int | None = None
    ) -> int:
        """Read a number from 1 to `limit`, which is (a variable's name, its value)."""
        value = self._whole_number(name, default)
        if value < 1:
            raise self.error(name, "at least 1", value)
        if limit is not None and value > limit[1]:
            raise self.error(name, f"at most {limit[0]}, which is {limit[1]}", value)
        return value

    def index(self, name: str, size_name: str, size: int, default: int | None = None) -> int:
        """Read a number below `size`, which is the value of the variable `size_name`."""
        value = self._whole_number(name, default)
        if not 0 <= value < size:
            raise self.error(name, f"0 to {size - 1}, as {size_name} gives {size}", value)
        return value

    def text(self, name: str, expected: str) -> str:
        """Return the variable as text."""
        if name not in self.env:
            raise self.error(name, expected, found="nothing: it is not set")
        return self.env[name]

    def error(self, name: str, expected: str, got: object = None, found: str = "") -> ConfigError:
        """Return the error for an invalid variable."""
        rank = self.launcher.rank
        size = self.launcher.size
        hint = (
            f"{self.launcher.title} sets it: start the workers with it, or unset {rank} and "
            f"{size} to run alone."
        )
        return ConfigError(f"environment variable {name}", expected, got, hint, found=found)

    def _whole_number(self, name: str, default: int | None) -> int:
        if name not in self.env and default is not None:
            return default
        text = self.text(name, "a whole number")
        try:
            return int(text)
        except ValueError:
            raise self.error(name, "a whole number", text) from None


def launcher_identity(variables: Mapping[str, str]) -> str:
    """Return an identifier of the process that started this host's ranks, unique over time: its PID
    and start time.

    It is the nearest ancestor that was started without this rank's variables; there may be shells
    in between.
    """
    launcher = find_launcher(variables)
    names = launcher.names if launcher else ()
    rank_variables = {name: variables[name] for name in names if name in variables}
    pid = os.getppid()
    while rank_variables and has_variables(pid, rank_variables):
        status = read_status(pid)
        pid = 0 if status is None else status.parent
    status = read_status(pid)
    return f"{pid} {'' if status is None else status.started}"
