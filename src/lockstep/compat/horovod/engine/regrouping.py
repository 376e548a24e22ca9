"""This rank's part in an elastic job: it joins, regroups after a loss, and learns whether ranks
join or leave.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from typing_extensions import override

import lockstep
from lockstep import environment
from lockstep.communicator.elastic_communicator import ElasticCommunicator
from lockstep.data.loader import Batch
from lockstep.elastic.membership import NO_STATE, View
from lockstep.errors import LockstepError
from lockstep.training.recovery import ElasticRecovery, TrainingState, interrupt

from ..as_horovod import FOLDER
from ..common.exceptions import HorovodInternalError

_current: ElasticTraining | None = None
# whether this rank has the training's state: one that has joined later gets it from the others
_has_state = True
# how often the state had been saved that this rank gets when it begins
_first_commits = 0


def join_if_late(comm: Any) -> None:
    """Become a member of the job if this rank was started to join a running one; waits until the
    others regroup.
    """
    if comm.is_joining:
        comm.regroup_until(lambda: NO_STATE, lambda view: _note_first_view(comm, view))


def _note_first_view(comm: ElasticCommunicator, view: View) -> None:
    global _has_state, _first_commits
    _has_state = False
    _first_commits = _commits_of_rank0(view)
    comm.trainings = max((commit[0] for commit in view.commits if commit), default=0)
    _set_variables(comm)


def _commits_of_rank0(view: View) -> int:
    """Return how often the state was saved that `State.sync` sends to all, which is rank 0's."""
    return view.commits[0][1] if view.commits[0] else 0


def _set_variables(comm: ElasticCommunicator) -> None:
    """Correct this rank and the number of ranks in the variables of `horovodrun`, if they are
    set.
    """
    if "HOROVOD_RANK" in environment.variables():
        environment.set_horovod_variables(comm.world, socket.gethostname(), str(FOLDER))


def current_training() -> ElasticTraining | None:
    """Return the training that runs in an elastic job, if any."""
    return _current


class ElasticTraining(ElasticRecovery):
    """A call of a function of `hvd.elastic.run` in an elastic job: where a rank is lost, the others
    regroup.

    It is the recovery of its training with Horovod's own manners: what was in flight is not
    repeated, but the function is called again from the last commit, and the ranks share nothing
    when they regroup, as `State.sync` does that.

    A context, in which SIGTERM lets this rank leave when the state is committed next.

    Args:
        comm: the ranks of the job.
        stop: ends Horovod on this rank.
        start: starts it with the ranks that there are now.

    Attributes:
        commits: how often the state was saved.
    """

    def __init__(
        self, comm: ElasticCommunicator, stop: Callable[[], None], start: Callable[[], None]
    ) -> None:
        super().__init__(comm)
        self._stop = stop
        self._start = start
        self._context = ExitStack()
        self._commits_of_rank0 = 0  # of the state that the next `State.sync` sends to all

    @classmethod
    def in_this_job(
        cls, stop: Callable[[], None], start: Callable[[], None]
    ) -> ElasticTraining | None:
        """Return the training of a job that is elastic; None in any other."""
        comm = lockstep.init()
        return cls(comm, stop, start) if isinstance(comm, ElasticCommunicator) else None

    @property
    def commits(self) -> int:
        """How often the state was saved."""
        return self.done

    @commits.setter
    def commits(self, commits: int) -> None:
        self.done = commits

    def __enter__(self) -> ElasticTraining:
        global _current, _first_commits
        self._context.enter_context(self.training(_NoState(self._stop), 1 << 30))
        self.has_state = _has_state
        self._commits_of_rank0 = _first_commits
        _first_commits = 0  # another training begins without any, on all ranks
        _current = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _current
        _current = None
        self._context.__exit__(kind, error, trace)

    def wants_to_regroup(self) -> bool:
        """Return whether ranks are to join or to leave, as far as this rank knows.

        Raises:
            HorovodInternalError: this rank has to leave its group at once.
        """
        self.client.wait_for_lease()
        if self.client.is_over:  # a rank that is alone waits in no operation
            raise HorovodInternalError("the ranks of the job have changed")
        self.leave_if_signalled()
        return self.client.wants_to_regroup

    def interrupt(self) -> None:
        """End the training, on all ranks, after a signal to the launcher.

        Raises:
            InterruptedRunError: always.
        """
        self.client.complete()
        interrupt(self, f"commit {self.commits}")

    def note_sync(self) -> int:
        """Note that this rank has the training's state; returns how often that was saved.

        That is the same on all ranks. If who has joined later counted from 0, it would be behind
        the others for ever, and none of these could leave.
        """
        global _has_state
        _has_state = self.has_state = True
        self.commits = self._commits_of_rank0
        return self.commits

    def complete(self) -> None:
        """Wait until all ranks have completed the training.

        Raises:
            HorovodInternalError: a rank was lost before, so that the others go back to their last
                commit.
        """
        if not self.client.complete():
            raise HorovodInternalError(
                "a rank was lost before all ranks had completed the training"
            )

    def regroup(self, reason: str = "", at_boundary: bool = False) -> bool:
        """Leave the group, form the next one, and start Horovod on it.

        Args:
            reason: why the group has failed, if it has.
            at_boundary: whether all ranks have agreed to regroup here.

        Returns:
            Whether the group had to be left because the ranks of the job, or the launcher that
            leads it, have changed.

        Raises:
            WorkerLeft: this rank leaves the job, or the job ends.
        """
        before = self.client.members
        was_told = self.client.is_over
        self.form_next_group(reason, at_boundary)
        return was_told or self.client.members != before

    @override
    def adapt(self, view: View) -> None:
        if any(view.commits) and not view.commits[0]:
            raise LockstepError(
                "the ranks before one that had joined were lost before it had the training's state"
            )
        self._commits_of_rank0 = _commits_of_rank0(view)
        self._stop()  # what an interrupted attempt has left
        _set_variables(self.comm)
        self._start()


class _NoState(TrainingState):
    """The state of a training whose ranks share nothing in their recovery: `State.sync` does that.

    Args:
        stop: ends Horovod on this rank.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.result = True
        self._stop = stop

    @property
    @override
    def divides_state(self) -> bool:
        return False

    @override
    def part_of(self, batch: Batch) -> Batch:
        return batch

    @override
    def for_others(self, result: Any) -> Any:
        return None

    @override
    def from_others(self, result: Any) -> Any:
        return None

    @override
    def of_operations(self) -> dict[str, Any]:
        return {}

    @override
    def of_program(self) -> dict[str, Any]:
        return {}

    @override
    def leave(self) -> None:
        self._stop()

    @override
    def begin(self) -> None:
        return

    @override
    def note_seen(self, note: Callable[[bytes | None], None]) -> None:
        return

    @override
    def undo(self) -> None:
        return

    @override
    def commit(self, result: Any) -> None:
        return

    @override
    def load_operations(self, state: dict[str, Any]) -> None:
        return

    @override
    def load_program(self, state: dict[str, Any]) -> None:
        return

    @override
    def finish_update(self) -> None:
        return

    @override
    def hand_over(self, leaving: bool) -> None:
        return

    @override
    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        return
