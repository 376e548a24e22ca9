"""The job that `init()` has joined: its engine and its process sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lockstep
from lockstep import Communicator
from lockstep.communicator.initialization import current as current_communicator
from lockstep.errors import ConfigError

from .engine import Engine
from .regrouping import join_if_late


@dataclass
class Job:
    """A job of Horovod.

    Attributes:
        engine: the engine of all ranks.
        locations: (node, local rank) of every rank.
        process_sets: by ID, the ranks of each process set and its engine; the engine is None if
            this rank is not in the set. ID 0 is the set of all ranks.
        next_set_id: the ID of the next process set.
    """

    engine: Engine
    locations: list[tuple[int, int]]
    process_sets: dict[int, tuple[tuple[int, ...], Engine | None]] = field(default_factory=dict)
    next_set_id: int = 1

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks; only the engine communicates with it."""
        return self.engine.comm

    @property
    def is_homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        nodes = [node for node, _ in self.locations]
        return len({nodes.count(node) for node in nodes}) == 1

    @property
    def cross_nodes(self) -> list[int]:
        """The hosts that have a rank with this rank's local rank, in ascending order of ranks."""
        return [node for node, local_rank in self.locations if local_rank == self.comm.local_rank]


_job: Job | None = None  # a process is one rank of one job


def is_initialized() -> bool:
    """Return whether `init()` has been called."""
    return _job is not None


def current(what: str) -> Job:
    """Return the job.

    Args:
        what: what needs the job, for the error.

    Raises:
        ConfigError: `init()` has not been called.
    """
    if _job is None:
        raise ConfigError(
            what,
            "a call of hvd.init() before",
            found="none",
            hint="Horovod has not been initialized.",
        )
    return _job


def start(comm: Communicator) -> None:
    """Start the job of the ranks of `comm`, which from now on belongs to its engine; every rank
    calls it.
    """
    global _job
    locations: list[tuple[int, int]] = comm.allgather_object((comm.node, comm.local_rank))
    _job = Job(Engine(comm), locations)
    _job.process_sets[0] = (tuple(range(comm.size)), _job.engine)


def shut_down() -> None:
    """Leave the job, if there is one, without waiting for the other ranks."""
    global _job
    job = _job
    _job = None
    if job is not None:
        for _, engine in reversed(job.process_sets.values()):
            if engine is not None:
                engine.close()


def create_communicator(comm: Any = None) -> Communicator:
    """Create a communicator for the engine.

    Args:
        comm: a list of ranks, or a communicator of mpi4py, whose ranks keep their order; None for
            all ranks.

    Raises:
        ConfigError: for any other value.
    """
    has_device = current_communicator() is not None  # which the program has chosen
    world = lockstep.init("auto" if has_device or _has_gpu_per_rank() else "cpu")
    join_if_late(world)
    if comm is None:
        return world.dup()
    if hasattr(comm, "Get_rank"):
        comm = comm.allgather(world.rank)
    if not isinstance(comm, Sequence) or world.rank not in comm:
        hint = "Every rank passes a list in which it is."
        raise ConfigError(
            "comm", "a list of ranks, this one among them, or a communicator of mpi4py", comm, hint
        )
    ranks = [int(rank) for rank in comm]
    return world.split(min(ranks), ranks.index(world.rank))


def _reset_after_fork() -> None:
    """Forget the job: a forked child is not a rank, and must not end the job of its parent."""
    global _job
    _job = None


os.register_at_fork(after_in_child=_reset_after_fork)


def _has_gpu_per_rank() -> bool:
    """Return whether each rank of this host has a GPU; if not, the program may still use the GPUs
    by itself.
    """
    from lockstep import devices
    from lockstep.environment import find_world

    kind = devices.accelerator()
    return kind not in (None, "mps") and devices.count(str(kind)) >= find_world().local_world_size
