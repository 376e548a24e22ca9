"""Process sets: subsets of the ranks, to which operations can be limited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep import arguments
from lockstep.errors import ConfigError

from ..engine.engine import Engine
from ..engine.job import Job, current, is_initialized
from ..engine.request import Request

__all__ = [
    "ProcessSet",
    "add_process_set",
    "checked_process_set",
    "global_process_set",
    "remove_process_set",
]


class ProcessSet:
    """A subset of the ranks of the job; usable once it has been passed to `init` or
    `add_process_set`.

    Args:
        ranks_or_comm: global ranks, in any order; or a communicator of mpi4py, for the ranks of its
            members.

    Attributes:
        ranks: the global ranks, in ascending order; the rank of a process in the set is its index
            in this list.
        process_set_id: the ID of the set; None if it has not been added. 0 is the ID of the set of
            all ranks.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            ranks_or_comm = _global_ranks(ranks_or_comm)
        expected = "different whole numbers, or a communicator of mpi4py"
        listed = ranks_or_comm if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
        ranks = [arguments.whole("ranks", rank, expected=expected) for rank in listed]
        if len(set(ranks)) < len(ranks) or not isinstance(ranks_or_comm, Iterable):
            raise ConfigError("ranks", expected, ranks_or_comm)
        self.ranks: list[int] = sorted(ranks)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return (self.process_set_id, self.ranks) == (other.process_set_id, other.ranks)

    def __hash__(self) -> int:
        return hash(tuple(self.ranks))

    def size(self) -> int:
        """Return the number of ranks in the set.

        Raises:
            ConfigError: the set has not been added.
        """
        return len(self._ranks_and_engine()[0])

    def rank(self) -> int:
        """Return the rank of this process in the set.

        Raises:
            ConfigError: this process is not in the set, or the set has not been added.
        """
        return self.engine.comm.rank

    def included(self) -> bool:
        """Return whether this process is in the set.

        Raises:
            ConfigError: the set has not been added.
        """
        return self._ranks_and_engine()[1] is not None

    @property
    def engine(self) -> Engine:
        """The engine of the set.

        Raises:
            ConfigError: this process is not in the set, or the set has not been added.
        """
        ranks, engine = self._ranks_and_engine()
        if engine is None:
            this_rank = current("process_set").comm.rank
            raise ConfigError(
                "process_set",
                f"one with this rank, {this_rank}",
                found=f"one of ranks {list(ranks)}",
            )
        return engine

    def root_of(self, root_rank: int) -> int:
        """Return the rank in the set of the global rank `root_rank`.

        Raises:
            ConfigError: `root_rank` is not in the set, or the set has not been added.
        """
        ranks = self._ranks_and_engine()[0]
        if root_rank not in ranks:
            raise ConfigError(
                "root_rank", f"a global rank of the process set, one of {list(ranks)}", root_rank
            )
        return ranks.index(root_rank)

    def _ranks_and_engine(self) -> tuple[tuple[int, ...], Engine | None]:
        job = current("process_set")
        if self.process_set_id is None or self.process_set_id not in job.process_sets:
            hint = "Pass it to hvd.init(process_sets=...) or to hvd.add_process_set()."
            raise ConfigError("process_set", "one that has been added", self, hint)
        return job.process_sets[self.process_set_id]


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks, which is always usable in a job."""

    process_set_id = 0

    def __init__(self) -> None:
        """Create the set before there is a job."""

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """All ranks; none before `init`."""
        return list(current("global_process_set").process_sets[0][0]) if is_initialized() else []

    @property
    def engine(self) -> Engine:
        """The engine of all ranks."""
        return current("the operation").engine

    __hash__ = ProcessSet.__hash__


def _global_ranks(comm: Any) -> list[int]:
    """Return the ranks in MPI.COMM_WORLD of the members of `comm`."""
    from mpi4py import MPI  # optional, but present if the program has a communicator

    group = comm.Get_group()
    return [
        int(rank)
        for rank in group.Translate_ranks(range(group.Get_size()), MPI.COMM_WORLD.Get_group())
    ]


global_process_set: ProcessSet = _GlobalProcessSet()

_added: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set to the running job; all ranks of the job call this, with the same set.

    Raises:
        ConfigError: a set with these ranks exists, or they are not ranks of the job.
        HorovodInternalError: ranks pass different sets.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    job = current("add_process_set")
    _check_new(added, job)
    engine = job.engine
    name = engine.name_for("add_process_set")
    signature = (("ranks", tuple(added.ranks)),)
    members = engine.run(
        Request("add_process_set", name, options={"ranks": added.ranks}, signature=signature)
    )
    title = f"ranks {', '.join(map(str, added.ranks))}"
    set_engine = None if members is None else Engine(members, title)
    job.process_sets[job.next_set_id] = (tuple(added.ranks), set_engine)
    added.process_set_id = job.next_set_id
    job.next_set_id = job.next_set_id + 1
    _added.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call this.

    Returns:
        Whether the set has been removed: False if it has not been added, or is the set of all
        ranks.

    Raises:
        HorovodInternalError: ranks pass different sets.
    """
    job = current("remove_process_set")
    set_id = checked_process_set(process_set).process_set_id
    if not set_id or set_id not in job.process_sets:
        return False
    name = job.engine.name_for("remove_process_set")
    signature = (("process set", set_id),)
    job.engine.run(Request("remove_process_set", name, signature=signature))
    _, engine = job.process_sets.pop(set_id)
    if engine is not None:
        engine.close("the process set has been removed")
    process_set.process_set_id = None
    _added.remove(process_set)
    return True


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each set, by ID; Horovod's own tests use it by this name."""
    return {
        set_id: list(ranks) for set_id, (ranks, _) in current("process sets").process_sets.items()
    }


def checked_process_set(process_set: Any) -> ProcessSet:
    """Check that `process_set` is a `ProcessSet`, and return it.

    Raises:
        ConfigError: it is not.
    """
    checked: ProcessSet = arguments.instance(
        "process_set", process_set, ProcessSet, "a hvd.ProcessSet"
    )
    return checked


def forget_process_sets() -> None:
    """Remove the IDs of all sets, at the end of the job."""
    for process_set in _added:
        process_set.process_set_id = None
    _added.clear()


def _check_new(process_set: ProcessSet, job: Job) -> None:
    size = job.comm.size
    ranks = process_set.ranks
    if not ranks or not 0 <= ranks[0] <= ranks[-1] < size:
        raise ConfigError("process_set", f"some of the ranks 0 to {size - 1}", ranks)
    for set_id, (existing, _) in job.process_sets.items():
        if list(existing) == ranks:
            raise ConfigError(
                "process_set", "ranks that no other process set has", found=f"those of set {set_id}"
            )
