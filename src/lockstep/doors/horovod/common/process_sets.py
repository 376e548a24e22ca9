"""Sets of some of the ranks, which operations can be limited to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.errors import ConfigError

from ..engine.engine import Engine
from ..engine.job import Job, current, is_initialized
from ..engine.request import Request

__all__ = ["ProcessSet", "add_process_set", "checked_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the ranks of the job, which can be used when it has been given to `init` or to `add_process_set`.

    Args:
        ranks_or_comm: global ranks, in any order; or a communicator of mpi4py, with those of its members.

    Attributes:
        ranks: the global ranks, in ascending order; a rank's place in it is its rank in the set.
        process_set_id: its number; None when it cannot be used. 0 is that of all ranks.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            ranks_or_comm = _members_of(ranks_or_comm)
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if not all(isinstance(rank, int) for rank in ranks) or len(set(ranks)) != len(ranks):
            raise ConfigError("ranks", "whole numbers, all different, or a communicator of mpi4py", ranks_or_comm)
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
        """The number of ranks in it.

        Raises:
            ConfigError: when it cannot be used.
        """
        return len(self._entry()[0])

    def rank(self) -> int:
        """This rank's number in it.

        Raises:
            ConfigError: when this rank is not in it, or it cannot be used.
        """
        return self.engine.comm.rank

    def included(self) -> bool:
        """Whether this rank is in it.

        Raises:
            ConfigError: when it cannot be used.
        """
        return self._entry()[1] is not None

    @property
    def engine(self) -> Engine:
        """Where its operations go."""
        ranks, engine = self._entry()
        if engine is None:
            me = current("process_set").comm.rank
            raise ConfigError("process_set", f"one with this rank, {me}", found=f"one of ranks {list(ranks)}")
        return engine

    def root_of(self, root_rank: int) -> int:
        """The number in it of the global rank `root_rank`.

        Raises:
            ConfigError: when that is not in it.
        """
        ranks = self._entry()[0]
        if root_rank not in ranks:
            raise ConfigError("root_rank", f"a global rank of the process set, one of {list(ranks)}", root_rank)
        return ranks.index(root_rank)

    def _entry(self) -> tuple[tuple[int, ...], Engine | None]:
        job = current("process_set")
        if self.process_set_id is None or self.process_set_id not in job.sets:
            hint = "Give it to hvd.init(process_sets=...) or to hvd.add_process_set()."
            raise ConfigError("process_set", "one that has been added", self, hint)
        return job.sets[self.process_set_id]


class _All(ProcessSet):
    """The set of all ranks, which can be used whenever there is a job."""

    process_set_id = 0

    def __init__(self) -> None:
        """Nothing to keep."""

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """All of them; none before `init`."""
        return list(current("global_process_set").sets[0][0]) if is_initialized() else []

    @property
    def engine(self) -> Engine:
        """Where operations of all ranks go."""
        return current("the operation").engine

    __hash__ = ProcessSet.__hash__


def _members_of(comm: Any) -> list[int]:
    from mpi4py import MPI  # optional; whoever has a communicator has it

    group = comm.Get_group()
    return [int(rank) for rank in group.Translate_ranks(range(group.Get_size()), MPI.COMM_WORLD.Get_group())]


global_process_set: ProcessSet = _All()

_known: list[ProcessSet] = []  # those that have a number


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set usable, while the job runs; all ranks of the job call this, with the same set.

    Raises:
        ConfigError: when there is a set of these ranks already, or they are not ranks of the job.
        HorovodInternalError: when ranks pass different sets.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    job = current("add_process_set")
    _check(made, job)
    engine = job.engine
    form = (("ranks", tuple(made.ranks)),)
    request = Request("add_process_set", engine.name_for("add_process_set"), options={"ranks": made.ranks}, form=form)
    members = engine.run(request)
    title = f"ranks {', '.join(map(str, made.ranks))}"
    job.sets[job.created] = (tuple(made.ranks), None if members is None else Engine(members, title))
    made.process_set_id, job.created = job.created, job.created + 1
    _known.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a set up; all ranks of the job call this. Whether there was such a set; that of all ranks stays.

    Raises:
        HorovodInternalError: when ranks pass different sets.
    """
    job, number = current("remove_process_set"), checked_set(process_set).process_set_id
    if not number or number not in job.sets:
        return False
    form = (("process set", number),)
    job.engine.run(Request("remove_process_set", job.engine.name_for("remove_process_set"), form=form))
    _, engine = job.sets.pop(number)
    if engine is not None:
        engine.close("the process set has been removed")
    process_set.process_set_id = None
    _known.remove(process_set)
    return True


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each set, by its number; Horovod's own tests ask for it by this name."""
    return {number: list(ranks) for number, (ranks, _) in current("process sets").sets.items()}


def checked_set(process_set: Any) -> ProcessSet:
    """`process_set`.

    Raises:
        ConfigError: when it is something else.
    """
    if not isinstance(process_set, ProcessSet):
        raise ConfigError("process_set", "a hvd.ProcessSet", process_set)
    return process_set


def forget_process_sets() -> None:
    """None of the sets can be used any longer."""
    for each in _known:
        each.process_set_id = None
    _known.clear()


def _check(made: ProcessSet, job: Job) -> None:
    size = job.comm.size
    if not made.ranks or not 0 <= made.ranks[0] <= made.ranks[-1] < size:
        raise ConfigError("process_set", f"some of the ranks 0 to {size - 1}", made.ranks)
    for number, (ranks, _) in job.sets.items():
        if list(ranks) == made.ranks:
            raise ConfigError(
                "process_set", "other ranks than those of the sets there are", found=f"those of set {number}"
            )
