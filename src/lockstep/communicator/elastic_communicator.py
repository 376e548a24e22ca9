"""The communicator of an elastic job: its workers change, and one that joins later catches up with
what came before.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from .. import devices, watchdog
from ..elastic.client import MembershipClient
from ..elastic.membership import Commit, Down, View
from ..elastic.store import GenerationStore
from ..environment import ElasticWorker
from ..errors import (
    ConfigError,
    DesyncError,
    MembershipChangedError,
    RankLostError,
    StallError,
    TransportError,
)
from ..gloo import abort_gloo, interruptible_gloo, keep_until_ended
from ..job import client as job_client
from ..job.messages import ToAnyWorker
from ..topology import World
from ..watchdog.delivery import is_transport_error
from .communicator import Communicator
from .groups import world_among

__all__ = ["ElasticCommunicator"]

T = TypeVar("T")

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,misc,assignment"


def failure_reason(error: RuntimeError) -> str:
    """Return why a group has failed, or raise `error` if it is none that others can go on after.

    What the frames of the failed step hold is let go: their tensors, and the wrapped model with its
    buffers.
    """
    # "shm" raises a RankLostError without a report, which may come before the membership's message
    is_report = isinstance(error, RankLostError) and bool(error.report_json)  # of the watchdog
    if is_report or isinstance(error, DesyncError | StallError) or not is_transport_error(error):
        raise error
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__context__
    return str(error)


class ElasticCommunicator(Communicator):
    """The workers of an elastic job. `regroup` replaces them; this object stays.

    A worker that joins a running job has no group until its training begins. Before that it gets
    from `on_rank0`, `rank0_first` and `broadcast_object` what rank 0 sent in the same calls when
    the job began.

    Attributes:
        client: this worker's side of the membership.
        is_joining: whether this worker has not been in a group yet.
        keeps_values: whether what rank 0 sends is kept for workers that join later.
        trainings: the number of trainings that the program has begun.
    """

    client: MembershipClient
    # as in communicators made from this one, which are no members of the job
    keeps_values: bool = False
    trainings: int = 0
    _results: list[tuple[int, bytes]]  # of trainings, which may not be published yet

    @classmethod
    def join(
        cls, worker: ElasticWorker, world: World, device: torch.device, backend: str
    ) -> ElasticCommunicator:
        """Join the job as one of its first workers, or prepare to join it later.

        Args:
            worker: this worker.
            world: its position as the launcher knows it; only where it joins later is that kept for
                a while.
            device: where it computes.
            backend: of the process groups.
        """
        self = cls.at(world, device)
        self._backend = backend
        self.is_joining = worker.joins
        self.keeps_values = True
        self._replayed = 0
        self._results = []
        self._store: GenerationStore | None = None
        self._hooks = sys.excepthook, sys.excepthook
        connection = job_client.current()
        if connection is None:  # a worker that does not begin in `launcher.worker_process.worker`
            connection = job_client.JobClient(worker.socket, worker.number, ToAnyWorker | Down)
        self.client = MembershipClient(connection, self._interrupt)
        if not worker.joins:
            view = self.client.join()
            try:
                self._form(view)
            except TransportError as error:  # before the training nobody survives a loss
                raise TransportError(
                    "a worker was lost while the workers' first group was formed"
                ) from error
        return self

    def regroup(
        self, view_of: Callable[[], View], check: Callable[[View], None] = lambda view: None
    ) -> View:
        """Leave the group, get the next view from `view_of`, and form its group, unless `check`
        raises an error.

        Raises:
            MembershipChangedError, TransportError: the view was over before its group was complete.
            WorkerLeft: this worker is not in the view.
        """
        self.leave_group()
        view = view_of()
        check(view)
        self._form(view)
        self.is_joining = False
        return view

    def regroup_until(
        self,
        commit: Callable[[], Commit],
        adapt: Callable[[View], None],
        reason: str = "",
        at_boundary: bool = False,
        check: Callable[[View], None] = lambda view: None,
    ) -> None:
        """Take part in the next view, again and again until its group is complete and `adapt` has
        returned.

        Args:
            commit: returns the position of this worker's last complete step.
            adapt: gives all members the same state.
            reason: why the group has failed, if it has.
            at_boundary: whether all members have agreed to regroup here.
            check: raises an error for a view whose group this worker does not form.

        Raises:
            WorkerLeft: this worker leaves the job, or the job ends.
        """
        joins = self.is_joining
        while True:
            view_of = partial(self.client.regroup, commit(), reason, at_boundary)
            try:
                adapt(self.regroup(self.client.join if joins else view_of, check))
                return
            except RuntimeError as error:
                reason = failure_reason(error)
                at_boundary = False
                joins = False

    def _form(self, view: View) -> None:
        rank = view.members.index(self.client.number)
        world = world_among(view.hosts, rank, "elastic")
        group = self._make_group(view, rank) if len(view.members) > 1 else None
        self._set_up(replace(world, device=str(self.device)), self.device, group)
        self.client.forget_answers()
        self.client.check()  # the change may have come before there was a group to interrupt

    def _make_group(self, view: View, rank: int) -> dist.ProcessGroup:
        # c10d names groups by how many a process has made, failed ones included, and members differ
        # in that
        c10d._world.group_count = 0
        self._store = GenerationStore(self.client, view.generation)
        bound = devices.bound_to(self.device, self._backend)
        before = sys.excepthook
        try:
            with interruptible_gloo(self.client.check):
                dist.init_process_group(
                    self._backend,
                    store=self._store,
                    rank=rank,
                    world_size=len(view.members),
                    device_id=bound,
                )
        finally:  # the next change may come when torch's hook is in place
            self._hooks = before, sys.excepthook
        return cast(dist.ProcessGroup, dist.group.WORLD)

    def _interrupt(self) -> None:
        """End the waits of this worker; called from the thread of the membership."""
        watchdog.interrupt(MembershipChangedError(self.client.generation))

    def leave_group(self) -> None:
        """Leave the process group without waiting for the others; no operation may follow until
        `regroup`.
        """
        self.group = None
        if not c10d._world.pg_map:
            return
        if not dist.is_initialized():  # the next change came while the group was made
            c10d._update_default_pg(next(iter(c10d._world.pg_map)))
        self._interrupt()
        groups = list(c10d._world.pg_map)  # those of the program as well
        for group in groups:
            abort_gloo(group)
        keep_until_ended(groups, watchdog.unfinished_works())
        del group, groups
        with suppress(RuntimeError):  # it is broken in any case
            dist.destroy_process_group()
        self._store = None
        before, group_hook = self._hooks
        # else each group adds one of torch's to those that an exception passes through
        if sys.excepthook is group_hook:
            sys.excepthook = before

    @override
    def on_rank0(self, fn: Callable[[], T]) -> T:
        if self.is_joining:
            succeeded, value = pickle.loads(self._next_value())
            if not succeeded:
                raise value
            return cast(T, value)
        if self.size > 1:
            return super().on_rank0(fn)
        value = fn()
        self._keep(pickle.dumps((True, value)))
        return value

    @contextmanager
    @override
    def rank0_first(self) -> Iterator[None]:
        if self.is_joining:
            if error := self._next_value():
                raise pickle.loads(error)[1]
            yield
            return
        with super().rank0_first():
            yield
        if self.size == 1:
            self._keep(b"")

    @override
    def broadcast_object(self, value: T | None, root: int = 0) -> T:
        if self.is_joining and root == 0:
            return cast(T, self._next_value())
        if self.rank == root == 0:
            self._keep(value)
        return super().broadcast_object(value, root)

    @override
    def barrier(self) -> None:
        if not self.is_joining:
            super().barrier()

    def note_result(self, training: int, result: object) -> None:
        """Note the result of a training, on all workers: one of them will be rank 0 when it is
        published.

        Args:
            training: its number.
            result: what workers get that join in a later training.
        """
        self._results.append((training, pickle.dumps(result)))

    def forget_results(self, training: int) -> None:
        """Forget the results of the trainings before this one: all workers have begun it, so that
        rank 0 has published them.
        """
        self._results = [result for result in self._results if result[0] >= training]

    def publish_results(self) -> None:
        """Let rank 0 publish the results that it may not have published yet; what fails, as the
        workers change, is published after that.
        """
        if self.rank != 0:
            return
        with suppress(MembershipChangedError):
            while self._results:
                training, result = self._results[0]
                self.client.publish(result, training)
                self._results.pop(0)

    @property
    def has_earlier_result(self) -> bool:
        """Whether this training was complete before this worker came to it."""
        return bool(len(self.client.published) > self._replayed)

    def joins_before_result(self) -> bool:
        """Ask to become a member; returns whether this worker is one before the result of this
        training is there.
        """
        return self.client.joins_before(self._replayed)

    def earlier_result(self) -> Any:
        """Return the result of a training that was complete before this worker joined."""
        return self._next_value()

    def _keep(self, value: object) -> None:
        if self.keeps_values:
            self.publish_results()  # in the order of the program
            self.client.publish(pickle.dumps(value))

    def _next_value(self) -> Any:
        self._replayed += 1
        return pickle.loads(self.client.published_value(self._replayed - 1))

    def _connected(self) -> dist.ProcessGroup:
        if self.is_joining:
            hint = "Move it into the training (a callback), or start the job without --elastic."
            expected = (
                "only on_rank0, rank0_first, broadcast_object and barrier before the training of "
                "an elastic job"
            )
            raise ConfigError(
                "comm", expected, found="a collective in a worker that joins it later", hint=hint
            )
        return super()._connected()
