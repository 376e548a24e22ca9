"""The membership of an elastic job as a state machine: who is in the group, and what each worker is
told (pure).

A **generation** is a group of workers that train together. The coordinator, in the launcher, opens
the next generation when the membership changes: at once after a loss, and between two steps when a
worker joins or leaves. Each member then leaves its process group and *arrives* with its **commit**,
the position of its last complete step. When all have arrived, the coordinator sends the **view**:
the members in order of seniority, which is the order of ranks, and who has the most advanced state.
With that the members form a process group. A loss meanwhile opens the next generation.

Workers join at **boundaries** only, where the program of no member is within a step: a view after a
loss consists of those that are left, which agree, with its first step, to let others join after it.
Below the minimum number of workers the members wait at a boundary as well.

There is no clock and no time limit here: a worker counts until its process has ended or it says
that it leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import structs

from ..job.messages import Hello
from ..messages import Integer, List, Tagged
from .keys import Answer, Keys, StoreRequest

__all__ = [
    "LEASE_S",
    "NO_STATE",
    "Commit",
    "Coordinator",
    "CoordinatorMessage",
    "Down",
    "Finish",
    "HostMemory",
    "HostReport",
    "Keep",
    "Lease",
    "Regroup",
    "Up",
    "View",
    "WorkerState",
]


Commit = List[Integer]
"""The position of a worker's last complete step: (fit, steps done, rows of the history). A later
one is greater.
"""

NO_STATE: Commit = ()
"""The commit of a worker that has not been given the training's state yet."""

UNLIMITED = 1 << 30  # workers


class WorkerState(Tagged, frozen=True):
    """All that a worker says of itself, at each change: the newest one replaces those before.

    Attributes:
        phase: "starts"; "ready" to become a member; "member" of a group, or forms it; "left": it
            has left its group before the next generation was open; "arrived": it has left it, and
            waits for the next view; "done": its training is complete, and it stays until that of
            all others is, because they may need its state.
        generation: whose group or view that is; 0 before the first.
        commit: of its last complete step, when it left its group.
        fit: the number of the training in its program, in which it survives the loss of others; -1
            outside of one.
        most: the largest number of workers that this training can have.
        folder: of the run; "" without one.
        leaving: whether it wants to leave after the step in progress.
        failed: why its group has failed, if it has "left" and does not know the cause; None if it
            is between two steps, where all members have agreed to regroup.
        faulty: whether it leaves because it computes wrong numbers, so that no other worker may be
            started on its device.
        hands_over: whether it has a part of the state that it hands over to others before it
            leaves, which it can do between two steps only.
    """

    phase: Literal["starts", "ready", "member", "left", "arrived", "done"] = "starts"
    generation: Integer = 0
    commit: Commit = NO_STATE
    fit: Integer = -1
    most: Integer = UNLIMITED
    folder: str = ""
    leaving: bool = False
    failed: str | None = None
    faulty: bool = False
    hands_over: bool = False


class Keep(Tagged, frozen=True):
    """What rank 0 has sent to all before the training, the result of a training, or what its
    callbacks have seen: all hosts keep it, and give it to their workers that join later.

    Attributes:
        value: pickled; of callbacks their states, None if these have not changed.
        request: a number of 0 or more is answered when all hosts have kept the value.
        training: the number of the training whose result it is, which the next rank 0 sends again
            if it does not know that it was sent; -1 for another value.
        commit: up to which rank 0's callbacks have seen all; None for another value.
        worker: the number of the worker that has sent it, which who leads fills in.
    """

    value: bytes | None
    request: Integer = -1
    training: Integer = -1
    commit: Commit | None = None
    worker: Integer = -1

    @property
    def name(self) -> tuple[int, int]:
        """What the message has in common with one of the same value alone: its worker, and the
        number of the worker's request.
        """
        return self.worker, self.request

    @property
    def is_of_callbacks(self) -> bool:
        """Whether it says what rank 0's callbacks have seen: of these the newest counts."""
        return self.commit is not None

    def after(self, earlier: Keep | None) -> Keep:
        """Return what is to be kept of rank 0's callbacks after what was kept `earlier`."""
        value = earlier.value if self.value is None and earlier is not None else self.value
        return structs.replace(self, value=value)


class Regroup(Tagged, frozen=True):
    """Leave the group, and arrive for `generation`.

    Attributes:
        generation: the new one.
        when: "agreed": it opens after a step on which all members agree, which this worker has to
            ask of the others in each step; "after the step": it is open, and the members are to
            complete the step in progress; "at once": it is open, and this worker leaves wherever it
            waits in its group.
    """

    generation: Integer
    when: Literal["agreed", "after the step", "at once"]


class View(Tagged, frozen=True):
    """The members of `generation`, in the order of their ranks.

    Attributes:
        generation: its number.
        members: the workers' numbers.
        hosts: the number of each one's host.
        commits: the commit of each one.
        source: the member from which those behind get the state.
        events: the commit up to which rank 0's callbacks have seen all.
        states: the states of rank 0's callbacks then.
        fit: the number of the training that they are in; -1 outside of one.
    """

    generation: Integer
    members: List[Integer]
    hosts: List[Integer]
    commits: List[Commit]
    source: Integer
    events: Commit = ()
    states: bytes | None = None
    fit: Integer = -1


LEASE_S = 4.0
"""Seconds for which a worker may complete steps before its launcher has to tell it again."""


class Lease(Tagged, frozen=True):
    """In a job on several hosts: complete no step after this time, of the monotonic clock of the
    worker's host.

    A launcher that is stopped, or that follows such a one, could not tell its workers that others
    have gone on.
    """

    until: float


class Finish(Tagged, frozen=True):
    """What a worker does comes to an end.

    Attributes:
        how: "complete": the training `number` is, on all members; "leave": this worker has left;
            "stop": the whole job saves and ends, as after the signal `number`.
        number: see `how`.
    """

    how: Literal["complete", "leave", "stop"]
    number: Integer = 0


Up = Hello | WorkerState | Keep | StoreRequest
"""From a worker to the coordinator."""

CoordinatorMessage = Regroup | View | Answer | Finish
"""From the coordinator to a worker."""

Down = CoordinatorMessage | Lease | Keep
"""To a worker: from the coordinator, and what the launcher of its host gives it."""


def training_of(state: WorkerState, view: View | None, completed: int) -> int:
    """Return the number of the training that a worker is in; -1 outside of one.

    Args:
        state: the newest that the worker has sent. Before it is given the newest view, it does not
            know of the training of that; and before it is told so, not that its own is complete.
        view: the newest one, which has this worker.
        completed: the last training that is complete everywhere.
    """
    is_older = view is not None and state.generation < view.generation
    training = view.fit if view is not None and is_older else state.fit
    return training if training > completed else -1


class WorkerRecord(msgspec.Struct, frozen=True, array_like=True):
    """One worker: what it has said of itself, and what it has been told.

    Attributes:
        number: of the worker.
        joins: whether there was a group already when it was started.
        state: the newest one that it has sent.
        is_member: whether it has been given a view.
        is_over: whether it has been told that it has left.
        completed: the last training of which it has been told that it is complete everywhere.
    """

    number: Integer
    joins: bool
    state: WorkerState = WorkerState()
    is_member: bool = False
    is_over: bool = False
    completed: Integer = -1


class HostReport(msgspec.Struct, frozen=True, array_like=True):
    """What a host tells a new coordinator.

    Attributes:
        host: its number.
        workers: its living workers.
        view: the newest view that has been sent to one of them.
        generation: the newest one that it has heard of.
        completed: the last training that workers knew to be complete everywhere that have ended.
        finished: those of them whose program has ended in good order after it.
        kept: the names of the values that rank 0 has sent, as far as the host keeps them.
    """

    host: Integer
    workers: List[WorkerRecord]
    view: View | None
    generation: Integer
    completed: Integer = -1
    finished: List[Integer] = ()
    kept: tuple[tuple[Integer, Integer], ...] = ()  # a job may keep more than `List` can have


@dataclass
class HostMemory:
    """Remembers what the messages from and to the workers of one host say of them; its methods are
    these messages.
    """

    host: int
    view: View | None = None
    generation: int = 0
    _workers: dict[int, WorkerRecord] = field(default_factory=dict)
    _values: list[Keep] = field(default_factory=list)
    _events: Keep | None = None  # what rank 0's callbacks have seen
    _unanswered: dict[int, Keep] = field(default_factory=dict)
    _completed: int = -1
    _finished: list[int] = field(default_factory=list)

    def started(self, number: int, joins: bool) -> None:
        """A worker has been started."""
        self._workers[number] = WorkerRecord(number, joins)

    def ended(self, number: int, in_good_order: bool) -> None:
        """A worker's process has ended."""
        worker = self._workers.pop(number, None)
        self._unanswered.pop(number, None)
        if worker is not None:
            self._completed = max(self._completed, worker.completed)
            has_completed = worker.completed >= 0 and self._training_of(worker) < 0
            if in_good_order and has_completed and not worker.is_over:
                self._finished.append(number)

    def keep(self, message: Keep) -> list[int]:
        """Keep what rank 0 has sent for workers that join later.

        Returns:
            The workers of this host that join just now, and are to be given it.
        """
        if message.is_of_callbacks:
            self._events = message.after(self._events)
            return []
        if message.name in self._names:
            return []
        self._values.append(message)
        return self._joining

    def values_for(self, number: int) -> list[Keep]:
        """Return what rank 0 has sent that a worker is to be given which has just connected."""
        worker = self._workers.get(number)
        return list(self._values) if worker is not None and worker.joins else []

    @property
    def _names(self) -> tuple[tuple[int, int], ...]:
        return tuple(value.name for value in self._values)

    @property
    def _joining(self) -> list[int]:
        """The workers that join later than others, and are not in the newest group."""
        members = () if self.view is None else self.view.members
        return [
            number
            for number, record in self._workers.items()
            if record.joins and not record.is_over and not (record.is_member and number in members)
        ]

    @property
    def kept(self) -> list[Keep]:
        """What is kept, in the order in which it was sent."""
        return self._values if self._events is None else [*self._values, self._events]

    @property
    def unanswered(self) -> list[tuple[int, Keep]]:
        """What workers wait for all hosts to keep, which a new coordinator has to be asked
        again.
        """
        return list(self._unanswered.items())

    @property
    def members(self) -> list[int]:
        """The workers that are in a group."""
        return [
            record.number
            for record in self._workers.values()
            if record.is_member and not record.is_over
        ]

    @property
    def members_in_training(self) -> list[int]:
        """The workers that are in a group and in a training."""
        return [number for number in self.members if self._training_of(self._workers[number]) >= 0]

    def _training_of(self, worker: WorkerRecord) -> int:
        return training_of(worker.state, self.view, worker.completed)

    def report(self) -> HostReport:
        """Return what a new coordinator has to know."""
        workers = tuple(self._workers.values())
        finished = tuple(self._finished)
        return HostReport(
            self.host,
            workers,
            self.view,
            self.generation,
            self._completed,
            finished,
            self._names,
        )

    def note_up(self, number: int, message: Up) -> None:
        """A worker has sent a message."""
        match message:
            case WorkerState():
                self._change(number, state=message)
            case Keep():
                if message.request >= 0:
                    self._unanswered[number] = message

    def note_down(self, number: int, message: CoordinatorMessage) -> None:
        """A worker is sent a message."""
        match message:
            case Regroup(when="agreed"):
                pass  # it is not open yet
            case Regroup():
                self.generation = max(self.generation, message.generation)
            case View():
                self.generation = max(self.generation, message.generation)
                self.view = message
                self._change(number, is_member=True)
            case Answer():
                if (
                    number in self._unanswered
                    and self._unanswered[number].request == message.request
                ):
                    del self._unanswered[number]
            case Finish(how="leave"):
                self._change(number, is_over=True)
            case Finish(how="complete"):
                self._change(number, completed=message.number)

    def _change(self, number: int, **values: Any) -> None:
        if number in self._workers:
            self._workers[number] = structs.replace(self._workers[number], **values)


class _Status(Enum):
    STARTED = "started"  # its program has not asked to become a member yet
    READY = "ready"
    MEMBER = "member"
    OVER = "over"  # it has left in good order


_BEFORE = (_Status.STARTED, _Status.READY)  # a worker is a member


@dataclass
class _Worker:
    number: int
    host: int
    status: _Status = _Status.STARTED
    joins: bool = False  # whether there was a group already when it came
    seniority: int = -1
    state: WorkerState = field(default_factory=WorkerState)  # the newest that it has sent


_OUTSIDE = "a worker was lost outside of the training"
_MOST_BROKEN = (
    5  # groups that fail one after another at the same step, without the loss of a worker
)


@dataclass
class Coordinator:
    """Decides on the membership. Its methods are the events; `take_messages` returns what they have
    to tell.

    Args:
        expected: the number of workers that form the first group.
        minimum: the number of workers below which the training waits.

    Attributes:
        generation: the newest generation that is open.
        formed: the newest one whose view was sent; -1 before the first.
        view: the members of `formed`, in the order of their ranks.
        waiting: whether the members have arrived, and wait because they are fewer than `minimum`.
        failure: why the workers cannot go on from what they have in memory; "" as long as they can.
        complete: whether all members have completed the training that they were in.
        completed: the last training that is complete on all members; -1 before the first.
        most: the largest number of workers that the training can have.
        folder: of the training's run; "" without one.
        is_fenced: whether the first group must wait, as a host that was lost may have formed it
            with others.
        to_keep: what all hosts have to keep.
    """

    expected: int
    minimum: int = 1
    generation: int = 0
    formed: int = -1
    view: tuple[int, ...] = ()
    waiting: bool = False
    failure: str = ""
    complete: bool = False
    completed: int = -1
    most: int = UNLIMITED
    folder: str = ""
    is_fenced: bool = False
    to_keep: deque[Keep] = field(default_factory=deque)
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _messages: deque[tuple[int, CoordinatorMessage]] = field(default_factory=deque)
    _keys: dict[int, Keys] = field(default_factory=dict)
    _seniority: int = 0
    _is_agreeing: bool = False  # whether the members are to agree on a step
    _at_boundary: bool = False  # whether the members regroup between two steps, and not within one
    _newest: View | None = None
    _stop: Finish | None = None
    _events: Keep = field(default_factory=lambda: Keep(None, commit=NO_STATE))
    _broken: tuple[Commit, int] = (NO_STATE, 0)

    def take_messages(self) -> Iterator[tuple[int, CoordinatorMessage]]:
        """Yield the messages to send, each with the number of its worker."""
        while self._messages:
            yield self._messages.popleft()

    @property
    def members(self) -> list[int]:
        """The workers that are in the group, or regroup, in order of seniority."""
        members = [worker for worker in self._workers.values() if worker.status is _Status.MEMBER]
        return [worker.number for worker in sorted(members, key=lambda worker: worker.seniority)]

    @property
    def members_in_training(self) -> list[int]:
        """The members that are in a training, and not outside of one."""
        return [number for number in self.members if self._training_of(self._workers[number]) >= 0]

    @property
    def leaving(self) -> list[int]:
        """The members that have arrived in order to leave, and wait below the minimum for those
        that replace them.
        """
        return [
            number
            for number in self.members
            if self.waiting and self._workers[number].state.leaving
        ]

    @property
    def candidates(self) -> list[int]:
        """The workers that have been started and are not members yet."""
        return [worker.number for worker in self._workers.values() if worker.status in _BEFORE]

    @property
    def progress(self) -> Commit:
        """The greatest commit with which a member has left its group."""
        return max((worker.state.commit for worker in self._workers.values()), default=NO_STATE)

    def _training_of(self, worker: _Worker) -> int:
        return training_of(worker.state, self._newest, self.completed)

    def started(self, number: int, host: int = 0) -> None:
        """A worker has been started on a host."""
        self._workers[number] = _Worker(number, host)

    def lost(self, number: int) -> None:
        """A worker's process has ended."""
        worker = self._workers.pop(number, None)
        for keys in self._keys.values():
            keys.forget(number)
        if worker is None or worker.status is not _Status.MEMBER:
            return
        training = self._training_of(worker)
        trainings = {self._training_of(self._workers[number]) for number in self.members}
        # or it has not told yet what it had to tell at the end of its training
        if trainings - {training} or training < 0:
            self.failure = self.failure or _OUTSIDE
            return
        self._broken = NO_STATE, 0
        self._open_next()

    def left(self, number: int) -> None:
        """A worker's process has ended in good order, after its training was complete or after it
        was told to leave.
        """
        worker = self._workers.get(number)
        is_member = worker is not None and worker.status is _Status.MEMBER
        if worker is not None and is_member and self._training_of(worker) < 0:
            worker.status = _Status.OVER
        self.lost(number)

    def stop(self, signal: int) -> None:
        """The whole job is to save and end, also if it waits for workers."""
        self._tell_stop(signal)
        if self.waiting:
            self._give_view()

    def _tell_stop(self, signal: int) -> None:
        self._stop = Finish("stop", signal)
        for worker in self._workers.values():
            self._send(worker, self._stop)

    def receive(self, number: int, message: Up) -> None:
        """A worker has sent a message; one from a worker that is not known any more is ignored."""
        worker = self._workers.get(number)
        if worker is not None:
            self._handle(worker, message)

    def _handle(self, worker: _Worker, message: Up) -> None:
        match message:
            case Hello():
                self._greet(worker)
            case WorkerState():
                self._take_state(worker, message)
            case Keep():
                self.keep(message)
                self.to_keep.append(structs.replace(message, worker=worker.number))
            case _:
                self._use_keys(worker, message)

    def _greet(self, worker: _Worker) -> None:
        worker.joins = self.formed >= 0
        if self._stop is not None:
            self._send(worker, self._stop)

    def keep(self, message: Keep) -> None:
        """Keep what rank 0's callbacks have seen, for the next view; other values are kept by the
        hosts alone.
        """
        if message.is_of_callbacks:
            self._events = message.after(self._events)

    def answer_kept(self, number: int, request: int) -> None:
        """All hosts have kept what a worker has sent with the number `request`."""
        if number in self._workers and request >= 0:
            self._send(self._workers[number], Answer(request))

    def _take_state(self, worker: _Worker, state: WorkerState) -> None:
        before = worker.state
        training = self._training_of(worker)
        worker.state = state
        if worker.status is _Status.MEMBER and self._training_of(worker) != training:
            self._begin_training(worker)
        if state.leaving and not before.leaving and self._stop is None:
            self._plan()
        match state.phase:
            case "ready" if worker.status is _Status.STARTED:
                self._ready(worker)
            case "left" if worker.status is _Status.MEMBER:
                self._left_group(worker)
            case "arrived" if worker.status is _Status.MEMBER:
                self._arrived(worker)
            case "done" if worker.status is _Status.MEMBER:
                self._end_training()

    def _ready(self, worker: _Worker) -> None:
        worker.status = _Status.READY
        if self.formed < 0 or self.waiting:
            self._give_view()
        else:
            self._plan()

    def _begin_training(self, worker: _Worker) -> None:
        """A member has begun a training, or has left one before it was complete."""
        self.complete = False
        self.most = worker.state.most
        self.folder = worker.state.folder
        if worker.state.fit < 0 and self.generation != self.formed:
            self.failure = self.failure or _OUTSIDE  # it has not met those that were left by then
        if any(other.status is _Status.READY for other in self._workers.values()):
            self._plan()

    def _arrived(self, worker: _Worker) -> None:
        if worker.state.generation > self.generation:
            # its host has let it leave its group: all others have to follow
            self.generation = worker.state.generation - 1
            self._open_next()
        if worker.state.generation == self.generation:
            self._give_view()

    def _left_group(self, worker: _Worker) -> None:
        if not self.generation == self.formed == worker.state.generation:
            return  # others have left it before, and this worker is told so
        if worker.state.failed is None:
            self._open(at_once=False)
            return
        commit, times = self._broken
        self._broken = worker.state.commit, times + 1 if worker.state.commit == commit else 1
        if self._broken[1] > _MOST_BROKEN:
            self.failure = (
                f"the workers' group failed {times} times at the same step: {worker.state.failed}"
            )
        self._open_next()

    def _end_training(self) -> None:
        """End the training if it is complete on all members."""
        members = [self._workers[number] for number in self.members]
        if all(self._is_done(member) for member in members):
            self.complete = True
            self.completed = max(member.state.fit for member in members)
            for member in members:
                self._send(member, Finish("complete", self.completed))

    def _is_done(self, worker: _Worker) -> bool:
        is_now = worker.state.generation == self.generation
        return worker.state.phase == "done" and is_now and self._training_of(worker) >= 0

    def resume(self, reports: Iterable[HostReport]) -> None:
        """Take over from another coordinator, with what the hosts that are left know of their
        workers.

        The members of the newest view that are on none of these hosts are lost. All others regroup.
        """
        reports = list(reports)
        views = [report.view for report in reports if report.view is not None]
        newest = max(views, key=lambda view: view.generation, default=None)
        self.generation = max([self.generation, *(report.generation for report in reports)])
        self._newest = newest
        self.most = min(
            (record.state.most for report in reports for record in report.workers),
            default=self.most,
        )
        for report in reports:
            for record in report.workers:
                self._workers[record.number] = _restored(record, report.host, newest)
        if newest is None:
            if any(worker.joins for worker in self._workers.values()):
                self.failure = "all workers that had the training's state were lost"
            self._give_view()
            return
        self.formed = newest.generation
        self.view = newest.members
        self._seniority = len(newest.members)
        known = [record.completed for report in reports for record in report.workers]
        self._end_completed(max([*known, *(report.completed for report in reports)], default=-1))
        finished = {number for report in reports for number in report.finished}
        lost = [
            number
            for number in newest.members
            if number not in self._workers and number not in finished
        ]
        if self.complete and not self.members and not lost:
            return  # the programs of all members have ended
        if self._in_training():
            self._open_next()
        elif lost or not self.complete:  # a group that is being formed needs keys that are gone
            self.failure = "a host was lost outside of the training"

    def _end_completed(self, completed: int) -> None:
        """Tell the members that the last coordinator could not tell that their training is
        complete, or to leave.
        """
        self.completed = completed
        trainings = []
        for worker in self._workers.values():
            if worker.status is _Status.MEMBER:
                trainings.append(self._training_of(worker))
                if 0 <= worker.state.fit <= completed:
                    self._send(worker, Finish("complete", completed))
            elif worker.status is _Status.OVER:
                self._send(worker, Finish("leave"))
        self.complete = completed >= 0 and all(training < 0 for training in trainings)

    def _in_training(self) -> bool:
        """Return whether all members are in the same training, and not outside of it."""
        trainings = {self._training_of(self._workers[number]) for number in self.members}
        return len(trainings) <= 1 and -1 not in trainings

    def expect(self, workers: int) -> None:
        """Form the first group of so many workers: no more can be started."""
        if self.formed < 0 and 0 < workers != self.expected:
            self.expected = workers
            self._give_view()

    def set_fenced(self, is_fenced: bool) -> None:
        """The first group must wait, or need not any more."""
        before = self.is_fenced
        self.is_fenced = is_fenced
        if before and not is_fenced and self.formed < 0:
            self._give_view()

    def _plan(self) -> None:
        """Open the next generation after a step on which all members agree."""
        if (
            self._is_agreeing
            or self.formed != self.generation
            or not self._in_training()
            or self.complete
        ):
            return  # the next view is followed by another plan, if there is still something to do
        self._is_agreeing = True
        for number in self.members:
            self._send(self._workers[number], Regroup(self.generation + 1, "agreed"))

    def _open_next(self) -> None:
        """Open the next generation at once."""
        if not self.members:
            self.failure = self.failure or "all workers that had the training's state were lost"
            return
        self._open(at_once=True)

    def _open(self, at_once: bool) -> None:
        self._at_boundary = not at_once or self.waiting  # those that wait are still there
        self.generation += 1
        self._is_agreeing = self.waiting = False
        when: Literal["after the step", "at once"] = "at once" if at_once else "after the step"
        for number in self.members:
            self._send(self._workers[number], Regroup(self.generation, when))

    def _give_view(self) -> None:
        """Send the view of the open generation if all of its members have arrived."""
        members = [self._workers[number] for number in self.members]
        ready = [worker for worker in self._workers.values() if worker.status is _Status.READY]
        if self.formed < 0:
            if len(ready) < self.expected or self.is_fenced:
                return
        elif self.generation == self.formed or any(
            not self._has_arrived(member) for member in members
        ):
            return
        elif all(member.state.commit == NO_STATE for member in members):
            self.failure = self.failure or "all workers that had the training's state were lost"
            return
        is_first = self.formed < 0
        is_within_step = self.formed >= 0 and not self._at_boundary
        if is_within_step:
            # who has been given a view, and not the state, joins at the next boundary: those that
            # are left may be within a step that only those who were lost had completed
            for worker in [member for member in members if member.state.commit == NO_STATE]:
                worker.status = _Status.READY
                worker.seniority = -1
                members.remove(worker)
                ready.append(worker)
        stay, leave = self._choose(members, ready, is_within_step)
        ready = ready[: max(0, self.most - len(stay))]
        if is_within_step or (self._stop is not None and not is_first):
            ready = []
        if len(stay) + len(ready) < self.minimum and self._stop is None and not is_within_step:
            self.waiting = True
            return
        for worker in leave:
            worker.status = _Status.OVER
            self._send(worker, Finish("leave"))
        self._send_view(stay, ready)

    def _has_arrived(self, worker: _Worker) -> bool:
        return worker.state.phase == "arrived" and worker.state.generation == self.generation

    def _choose(
        self, members: list[_Worker], ready: list[_Worker], is_within_step: bool
    ) -> tuple[list[_Worker], list[_Worker]]:
        """Return the members that stay, and those that leave now; who alone has the newest state
        hands it over.
        """
        leave = [
            member
            for member in members
            if member.state.leaving
            and (self._stop is None or member.state.faulty)
            and not (is_within_step and member.state.hands_over)
        ]
        stay = [member for member in members if member not in leave]
        if leave and not stay and not ready:
            if self._stop is None and self._is_anybody_starting():
                # Within a step, they complete it first; between two, they wait below the minimum.
                return (members, []) if is_within_step else ([], leave)
            self._tell_stop(_SIGTERM)  # nobody is left to go on: save and end
            return members, []
        newest = max((member.state.commit for member in stay), default=NO_STATE)
        source = max(leave, key=lambda member: member.state.commit, default=None)
        if source is not None and source.state.commit > newest:
            leave.remove(source)
            stay = sorted([*stay, source], key=lambda member: member.seniority)
        return stay, leave

    def _is_anybody_starting(self) -> bool:
        """Return whether a worker was started that has not asked to become a member yet."""
        return any(worker.status is _Status.STARTED for worker in self._workers.values())

    def _send_view(self, stay: list[_Worker], ready: list[_Worker]) -> None:
        if self.formed < 0:
            self.generation = 1
        for worker in ready:
            self._seniority += 1
            worker.status = _Status.MEMBER
            worker.seniority = self._seniority
        new = [*stay, *ready]
        self.formed = self.generation
        self.view = tuple(worker.number for worker in new)
        self.waiting = self._is_agreeing = False
        self._keys = {
            number: keys for number, keys in self._keys.items() if number >= self.generation
        }
        source = max(new, key=lambda worker: worker.state.commit)  # the first of them
        view = View(
            self.generation,
            self.view,
            tuple(worker.host for worker in new),
            tuple(worker.state.commit for worker in new),
            source.number,
            self._events.commit or NO_STATE,
            self._events.value,
            self._training_of(stay[0]) if stay else -1,
        )
        self._newest = view
        for worker in new:
            self._send(worker, view)
        if self._wants_others():
            self._plan()

    def _wants_others(self) -> bool:
        """Return whether the group is to have other members at the next boundary."""
        if self._stop is not None:
            return False
        members = [self._workers[number] for number in self.members]
        is_ready = any(worker.status is _Status.READY for worker in self._workers.values())
        can_join = is_ready and len(members) < self.most
        can_leave = any(member.state.leaving for member in members)
        return can_join or can_leave or len(members) < self.minimum

    def _send(self, worker: _Worker, message: CoordinatorMessage) -> None:
        self._messages.append((worker.number, message))

    def _use_keys(self, worker: _Worker, message: StoreRequest) -> None:
        if message.generation < self.formed:
            return  # the worker is told that it is over, and waits for no answer
        keys = self._keys.setdefault(message.generation, Keys())
        for number, answer in keys.use(worker.number, message):
            self._messages.append((number, answer))


def _restored(record: WorkerRecord, host: int, newest: View | None) -> _Worker:
    """Return a worker as the last coordinator knew it.

    One that the newest view has not any more has left, or waits for a boundary since it had no
    state.
    """
    worker = _Worker(record.number, host, joins=record.joins, state=record.state)
    if (
        newest is not None
        and record.is_member
        and not record.is_over
        and record.number in newest.members
    ):
        worker.status = _Status.MEMBER
        worker.seniority = newest.members.index(record.number)
    elif record.is_member and (record.is_over or record.state.leaving or not record.joins):
        worker.status = _Status.OVER
    elif record.state.phase != "starts":
        worker.status = _Status.READY
    return worker


_SIGTERM = 15
