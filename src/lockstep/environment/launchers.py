"""What the variables of torchrun, Horovod, MPI and Slurm say about a worker's place (pure)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..topology import World
from .slurm import expand_tasks

__all__ = ["LAUNCHERS", "Launcher", "find_launcher", "read_world"]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher tells a process its place in the job.

    Attributes:
        source: its short name, as `World.source` has it.
        title: its name in errors.
        rank, size: the variables of the rank and of the number of ranks; either of them gives the launcher away.
        local_rank, local_size: those of the rank among the ranks of one node, and of their number.
        node, nodes: those of the node's number and of the number of nodes; "" where there are none.
        incomplete: whether a process may lack all variables but the first two.
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
    incomplete=True,  # many a script sets these two itself
)
_LOCKSTEP, _TORCHRUN = _TORCH("lockstep", "Lockstep's launcher"), _TORCH("torchrun", "torchrun")

_HOROVOD = Launcher(
    "horovod",
    "horovodrun",
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)

_OPENMPI = Launcher(
    "openmpi",
    "Open MPI's mpirun",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)  # OMPI_COMM_WORLD_NODE_RANK is a rank on the node too, counted over all jobs; no variable has the node's number

_MPICH = Launcher(
    "mpich", "mpiexec of MPICH (Hydra) or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
)

_SLURM = Launcher(
    "slurm",
    "Slurm's srun",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
)

LAUNCHERS = (_LOCKSTEP, _TORCHRUN, _HOROVOD, _OPENMPI, _MPICH, _SLURM)
"""The order in which they are looked for: what starts processes inside a job of the others comes before them.

torchrun is started once on each node by mpiexec or srun. mpiexec starts its own daemons by srun, and what they start
inherits the daemons' variables of Slurm, which say nothing about ranks.
"""


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """The launcher that has started the process with the variables `env`; None where it runs alone."""
    return next((launcher for launcher in LAUNCHERS if _has_started(launcher, env)), None)


def _has_started(launcher: Launcher, env: Mapping[str, str]) -> bool:
    if launcher is _SLURM:
        return _is_step(env)
    if launcher is _LOCKSTEP and "LOCKSTEP_LAUNCHED" not in env:
        return False
    if launcher is _MPICH and "MPI_LOCALRANKID" not in env and "SLURM_STEP_ID" in env:
        return False  # srun --mpi=pmi2 has set the others
    return launcher.rank in env or launcher.size in env


def _is_step(env: Mapping[str, str]) -> bool:
    """Whether srun started several processes, of which this is one.

    A batch script, and the shell of salloc, have SLURM_PROCID=0 and SLURM_NTASKS, but no variables of a step; the
    shell of ``srun --pty`` or of an interactive step is a step of one task. It is a place to start jobs from.
    """
    return env.get(_SLURM.size, "1") != "1"


def read_world(env: Mapping[str, str], launcher: Launcher) -> World:
    """The place that `launcher` has written into `env`.

    Raises:
        ConfigError: when a variable is missing beside the others, or is no whole number, or does not fit.
    """
    read = _Reader(env, launcher)
    size = read.size(launcher.size)
    rank = read.index(launcher.rank, launcher.size, size)
    if launcher is _SLURM:
        return _read_step(read, rank, size)
    local_size = read.size(launcher.local_size, (launcher.size, size), read.default(size))
    local_rank = read.index(launcher.local_rank, launcher.local_size, local_size, read.default(rank % local_size))
    node, nodes = _derive_node(rank, size, local_rank, local_size)
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


def _derive_node(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """The node's number and the number of nodes, where all have as many ranks: dealt out in blocks, or in turn."""
    nodes = -(-size // local_size)
    return rank // local_size if rank % local_size == local_rank else rank % nodes, nodes


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the variables of one launcher."""

    env: Mapping[str, str]
    launcher: Launcher

    def default(self, value: int) -> int | None:
        """`value` as a default, where the launcher's variables may be incomplete."""
        return value if self.launcher.incomplete else None

    def size(self, name: str, most: tuple[str, int] | None = None, default: int | None = None) -> int:
        """A number of at least 1, and of at most that in the variable `most`."""
        value = self._whole(name, default)
        if value < 1:
            raise self.error(name, "at least 1", value)
        if most is not None and value > most[1]:
            raise self.error(name, f"at most {most[0]}, which is {most[1]}", value)
        return value

    def index(self, name: str, of: str, size: int, default: int | None = None) -> int:
        """A number below `size`, which comes from the variable `of`."""
        value = self._whole(name, default)
        if not 0 <= value < size:
            raise self.error(name, f"0 to {size - 1}, as {of} gives {size}", value)
        return value

    def text(self, name: str, expected: str) -> str:
        """The variable as it is."""
        if name not in self.env:
            raise self.error(name, expected, found="nothing: it is not set")
        return self.env[name]

    def error(self, name: str, expected: str, got: object = None, found: str = "") -> ConfigError:
        """The error for a variable that cannot be used."""
        rank, size = self.launcher.rank, self.launcher.size
        hint = f"{self.launcher.title} sets it: start the workers with it, or unset {rank} and {size} to run alone."
        return ConfigError(f"environment variable {name}", expected, got, hint, found=found)

    def _whole(self, name: str, default: int | None) -> int:
        if name not in self.env and default is not None:
            return default
        text = self.text(name, "a whole number")
        try:
            return int(text)
        except ValueError:
            raise self.error(name, "a whole number", text) from None
