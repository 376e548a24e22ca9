"""The job that this process takes part in since `init()`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lockstep
from lockstep import Communicator
from lockstep.errors import ConfigError

from .engine import Engine
from .group import with_sockets

__all__ = ["Job", "current", "find_ranks", "is_initialized", "open_job", "shut_down"]


@dataclass
class Job:
    """What is known of a job.

    Attributes:
        engine: the operations of all ranks.
        places: (node, local rank) of every rank.
        sets: the ranks of the process sets by number, and their engines, None for sets that this rank is not in; 0 is
            that of all ranks.
        created: how many process sets there have been, 0 counted.
    """

    engine: Engine
    places: list[tuple[int, int]]
    sets: dict[int, tuple[tuple[int, ...], Engine | None]] = field(default_factory=dict)
    created: int = 1

    @property
    def comm(self) -> Communicator:
        """All ranks; only the engine sends anything with it."""
        return self.engine.comm

    @property
    def is_homogeneous(self) -> bool:
        """Whether all machines have as many ranks."""
        nodes = [node for node, _ in self.places]
        return len({nodes.count(node) for node in nodes}) == 1

    @property
    def cross(self) -> list[int]:
        """The machines that have a rank with this rank's local rank, in order."""
        return [node for node, local in self.places if local == self.comm.local_rank]


_job: Job | None = None  # one process is one rank of one job


def is_initialized() -> bool:
    """Whether there is a job."""
    return _job is not None


def current(what: str) -> Job:
    """The job.

    Raises:
        ConfigError: when there is none.
    """
    if _job is None:
        raise ConfigError(what, "a call of hvd.init() before", found="none", hint="Horovod has not been initialized.")
    return _job


def open_job(comm: Communicator) -> None:
    """Make the job of the ranks of `comm`, which nobody else uses from now on; each of them calls this."""
    global _job
    places: list[tuple[int, int]] = comm.allgather_object((comm.node, comm.local_rank))
    _job = Job(Engine(comm), places)
    _job.sets[0] = (tuple(range(comm.size)), _job.engine)


def shut_down() -> None:
    """Leave the job, if there is one, without waiting for the other ranks."""
    global _job
    job, _job = _job, None
    if job is not None:
        for _, engine in reversed(job.sets.values()):
            if engine is not None:
                engine.close()


def find_ranks(comm: Any = None) -> Communicator:
    """A new communicator of all ranks, of those in a list of their numbers, or of those of one of mpi4py, in its order.

    Raises:
        ConfigError: for something else.
    """
    found = lockstep.init("auto" if _has_gpus() else "cpu")
    if comm is None:
        return with_sockets(found.dup)
    if hasattr(comm, "Get_rank"):
        comm = comm.allgather(found.rank)  # its members, in its order
    if not isinstance(comm, Sequence) or found.rank not in comm:
        hint = "Every rank passes a list in which it is."
        raise ConfigError("comm", "a list of ranks, this one among them, or a communicator of mpi4py", comm, hint)
    ranks = [int(rank) for rank in comm]
    return with_sockets(lambda: found.split(min(ranks), ranks.index(found.rank)))


def _after_fork() -> None:
    """A forked child is no rank: what it does must not end the job of its parent."""
    global _job
    _job = None


os.register_at_fork(after_in_child=_after_fork)


def _has_gpus() -> bool:
    """Whether each rank of this machine has a GPU; where they do not, the script may still use those there are."""
    import torch

    from lockstep.environment import find_world

    return torch.cuda.is_available() and torch.cuda.device_count() >= find_world().local_world_size
