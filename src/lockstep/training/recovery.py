"""What a training does when its workers change: nothing in a job of fixed size, else it repeats
what was in flight.

An *operation* (a step, an evaluation, a save) is done by all workers or by none. A *commit* is the
number of operations that a training has done. After a loss those that are left repeat the operation
in flight in place, where it was called: nothing else is interrupted. They are at most one operation
apart: who is behind gets what the operation has changed, and its result, and its program goes on
from there. Who joins does so at a boundary, where no program is within an operation or between two
that belong together, and gets what the program has changed as well.

For that, all communication of a training is within its operations, no worker can complete one
before all have begun it, and which one comes next follows from the state alone.

A program may have several trainings, of one model or of several. If the workers change in one of
them, another one *follows* when it is used next, before anything else.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from signal import SIGTERM, Signals
from typing import Any, NoReturn, Protocol, TypeVar, cast
from weakref import WeakMethod

import torch
from typing_extensions import override

from .. import interruption
from ..checkpoint.serialization import pack, unpack
from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator, failure_reason
from ..data.loader import Batch
from ..elastic.client import MembershipClient
from ..elastic.membership import NO_STATE, Commit, View
from ..errors import ConfigError, InterruptedRunError, LockstepError, MembershipChangedError
from ..flight_recorder import named
from ..parallel.nested import map_tensors
from ..parallel.optimizer_shards import LostStateError
from .stop_signals import StopSignals

__all__ = [
    "REGROUP",
    "STOP",
    "ElasticRecovery",
    "MissingRecovery",
    "Recovery",
    "TrainingState",
    "as_bytes",
    "from_bytes",
    "interrupt",
    "recovery_of",
    "repeat_by",
    "repeated",
    "share",
]

T = TypeVar("T")

STOP = 1.0
REGROUP = 65536.0
"""What a worker adds to the sum of a step's requests if it requests a stop, or to regroup; no job
has more workers.
"""


_OUTSIDE = -1  # in place of the number of a training: the loss of a worker is not survived

# What a worker has of the state of a model that it is about to use: the values of all workers;
# those that its program has made alone, before it joined; or those although the others have trained
# the model meanwhile.
_SAME, _AS_MADE, _MISSED = range(3)


class TrainingState(Protocol):
    """What the workers of a training have alike; its methods are called between operations.

    Attributes:
        result: of the whole training, for workers that join the job in a later one.
    """

    result: Any

    def part_of(self, batch: Batch) -> Batch:
        """Return what of a global batch this worker has now, given what it had before its workers
        changed.
        """

    def begin(self) -> None:
        """An operation begins, which may not be done."""

    def note_seen(self, note: Callable[[bytes | None], None]) -> None:
        """All hooks of rank 0 were called.

        Args:
            note: called on rank 0 if it has callbacks of its own, with their states if these have
                changed.
        """

    def undo(self) -> None:
        """Restore what the operation that has begun last has changed: it was not done."""

    def commit(self, result: Any) -> None:
        """An operation was done, or the training begins: note what the program may change before
        the next one.
        """

    def for_others(self, result: Any) -> Any:
        """Return the result of an operation as another worker can be given it: tensors on the CPU,
        without graphs.
        """

    def from_others(self, result: Any) -> Any:
        """Return what `for_others` returned on another worker as this one has it."""

    def of_operations(self) -> dict[str, Any]:
        """Return what operations change, as the last one has left it; tensors are not copied."""

    def load_operations(self, state: dict[str, Any]) -> None:
        """Load what `of_operations` returned on another worker."""

    def of_program(self) -> dict[str, Any]:
        """Return what the program changes between operations, as it is now."""

    def load_program(self, state: dict[str, Any]) -> None:
        """Load what `of_program` returned on another worker."""

    @property
    def divides_state(self) -> bool:
        """Whether each worker has a part of the state only, see
        `lockstep.parallel.optimizer_shards`.
        """

    def finish_update(self) -> None:
        """Give all workers the values of an update that others have made, in the place of those
        that were lost; called by all workers.

        Raises:
            LostStateError: if a part of the state is lost.
        """

    def hand_over(self, leaving: bool) -> None:
        """Give those that stay the parts of the state of those that leave; called by all workers.

        Args:
            leaving: whether this worker leaves.
        """

    def leave(self) -> None:
        """This worker leaves its group: let go what belongs to it."""

    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        """Adapt to the communicator's new workers, which have the same state by now.

        Args:
            states: those of rank 0's callbacks, as rank 0 sent them last.
            all_seen: whether these have seen all events before the last operation that was done,
                and after it.
        """


class Recovery:
    """The recovery of a job of fixed size: every operation is done once, and an error ends the
    training.

    Attributes:
        has_fixed_workers: whether the workers of a training are the same from its beginning to its
            end.
        is_missing: whether this is so although the workers of the job change: this training cannot
            go on with others.
    """

    has_fixed_workers = True
    is_missing = False

    @property
    def is_running(self) -> bool:
        """Whether a training of it runs."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether operations are repeated after a loss."""
        return False

    @property
    def is_behind(self) -> bool:
        """Whether the workers have changed in another training than those of this recovery, so that
        `follow` is due; the same on all workers.
        """
        return False

    def follow(self, state: Callable[[], TrainingState]) -> None:
        """Adapt a state to the workers that there are now, and give it to those that lack it.

        Called by all workers, outside of a training, where `is_behind`. A loss meanwhile starts all
        workers again.

        Args:
            state: returns what the workers have alike.

        Raises:
            ConfigError: on all workers, if it cannot be used by others than before.
            LockstepError: on all workers, if nobody is left who has it.
        """

    @property
    def requests(self) -> float:
        """What this worker adds to the requests of a step, see `STOP` and `REGROUP`."""
        return 0.0

    @property
    def stop_signal(self) -> int:
        """The signal after which the whole job stops, as far as this worker knows; 0 if there is
        none.
        """
        return 0

    def stop_signals(self, signals: StopSignals) -> StopSignals:
        """Return the signals after which all workers stop, given those that this worker
        receives.
        """
        return signals

    @contextmanager
    def training(
        self,
        state: TrainingState,
        most: int,
        folder: str = "",
        signals: StopSignals | None = None,
        repeats: bool = True,
        is_one_of_many: bool = False,
    ) -> Iterator[bool]:
        """Return a context in which operations are repeated; its value is whether this worker takes
        part.

        Args:
            state: what the workers have alike.
            most: the largest number of workers that it can have.
            folder: of the run; "" without one.
            signals: those that this worker receives.
            repeats: whether operations are repeated from the beginning on, and not only after
                `resume`.
            is_one_of_many: whether the program soon begins another one, such as the next epoch.
                Then a worker goes on with the result as soon as the others have completed this one
                before it could join; else it waits for the next one, or for the end of the job.

        Raises:
            WorkerLeft: this worker has left the job, which goes on.
        """
        yield True

    @contextmanager
    def until_all_have_ended(self) -> Iterator[None]:
        """Return a context for all operations of a training, at whose end this worker waits for all
        others.
        """
        yield

    def part_of(self, batch: Batch) -> Batch:
        """Return what of a global batch this worker has now."""
        return batch

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Return a context for what a program does before its first step, also on a worker that
        joins later.

        The results of its operations are kept: such a worker gets them, as nobody else does them
        with it.
        """
        yield

    def run(self, operation: Callable[..., T], *args: Any, meets: bool = True) -> T:
        """Return the result of an operation; it is called again after a loss, unless others have
        done it.

        Args:
            operation: computes, communicates, and changes the state at its end.
            args: its arguments.
            meets: whether no worker can complete it before all have begun it, as a sum over all
                workers.
        """
        return operation(*args)

    @property
    def is_updating(self) -> bool:
        """Whether the step in progress is completed rather than repeated, see `update`."""
        return False

    def update(
        self,
        meet: Callable[[], torch.Tensor | None],
        update: Callable[[torch.Tensor | None], None],
        give_out: Callable[[], None],
    ) -> None:
        """Make the update of a step of which each worker makes a part; the rest of the step does
        not communicate.

        As soon as one worker has the result of `meet`, all can make their parts, and no loss takes
        the step back: those that are left complete it.

        Args:
            meet: exchanges something between all workers, each of which has by then all that its
                own part needs; returns the same tensor on all.
            update: makes this worker's part, with that.
            give_out: gives all workers what the others have updated.
        """
        update(meet())
        give_out()

    def run_only(self, operation: Callable[[], T]) -> T:
        """Return the result of the only operation of a training, see `run`; a worker that joins
        after the others have done it gets theirs.

        Args:
            operation: computes, and changes no state.
        """
        return operation()

    def attempt(self, operation: Callable[..., T], *args: Any) -> T | None:
        """Return the result of an operation, which is not None; None after a loss, unless others
        have done it.

        The caller then prepares another attempt, with what this worker has to do now.

        Args:
            operation: see `run`; no worker can complete it before all have begun it.
            args: its arguments.
        """
        return operation(*args)

    def leave_out(self, rank: int) -> None:
        """Repeat the operation in flight without a worker that computes wrong numbers: it leaves
        the job, which starts no other one on its device. Called by all workers within the
        operation.

        In a job of fixed size, and where operations are not repeated, nothing happens.

        Raises:
            MembershipChangedError: on all workers, so that the operation is repeated.
        """

    def suspend(self) -> None:
        """From here on nothing is repeated: a loss ends the training, and no worker joins or leaves
        it.
        """

    def resume(self) -> None:
        """From here on, again, operations are repeated; called by all workers between two of
        them.
        """

    def read(self, load: Callable[[], T]) -> T:
        """Return what `load` returns, which changes nothing that workers have alike; called again
        after a loss.
        """
        return load()

    def once(self, hook: Callable[..., object], *args: Any) -> None:
        """Call something that may communicate, and is not called again: a loss ends it."""
        hook(*args)

    def boundary(self, requests: float) -> None:
        """Let workers join and leave between two operations, if the sum of a step's requests says
        so.
        """


class MissingRecovery(Recovery):
    """The recovery of a training that cannot go on with other workers, in a job whose workers
    change.

    Args:
        comm: the communicator of the job's workers.
    """

    is_missing = True

    def __init__(self, comm: ElasticCommunicator) -> None:
        self._client = comm.client
        self._generation = comm.client.generation

    @property
    @override
    def is_behind(self) -> bool:
        return self._generation != self._client.generation

    @override
    def follow(self, state: Callable[[], TrainingState]) -> None:
        hint = (
            "Make it after the other training, or use strategy='distributed', or prepare() with "
            "one optimizer and its loader."
        )
        raise ConfigError(
            "strategy",
            "a training that other workers can go on with, if the workers of an elastic job change "
            "in another one",
            found="one that was made before they did, and has a part of its state on each worker "
            "or none to give to others",
            hint=hint,
        )


class _Update:
    """An update in progress of which each worker makes a part.

    Args:
        make: makes this worker's part.

    Attributes:
        is_made: whether that is done.
    """

    def __init__(self, make: Callable[[torch.Tensor | None], None]) -> None:
        self._make = make
        self.is_made = False

    def make(self, agreed: torch.Tensor | None) -> None:
        """Make this worker's part with what all have agreed upon."""
        self._make(agreed)
        self.is_made = True


class ElasticRecovery(Recovery):
    """The recovery of an elastic job, see `lockstep.elastic.membership` for the protocol.

    A worker's *commit* is (number of the training in the program, operations done), and behind them
    a 1 if it has made its part of the update of a step whose values may not have arrived
    everywhere.

    A subclass may have another way to regroup: it replaces `adapt`, and calls `form_next_group`
    itself.

    Args:
        comm: the communicator of the job's workers.

    Attributes:
        comm: the same.
        client: this worker's membership of the job.
        done: the operations that the training has done.
        has_state: whether this worker has the state of the training.
    """

    has_fixed_workers = False

    def __init__(self, comm: ElasticCommunicator) -> None:
        self.comm = comm
        self.client = comm.client
        self._state: TrainingState | None = None  # of the training that runs
        self._signals = StopSignals()
        self._given_signals: StopSignals | None = None
        self._held = ExitStack()  # the signals, while operations are repeated
        self._most = 1
        self._folder = ""
        self._is_suspended = False
        self._training = -1
        self.done = 0
        self._last: Any = None  # the result of the last operation
        self.has_state = False
        self._is_within = False  # an operation
        self._update: _Update | None = None  # in the operation in progress
        self._agreed: torch.Tensor | None = None  # upon which the last update was made
        self._has_joined = False  # a training in which others have done the first steps
        self._was_left = False  # before its end
        self._is_beginning = False
        self._kept_results: list[Any] = []  # of the operations before the first step
        self._first_results: Iterator[Any] = iter(())
        self._generation = comm.client.generation  # that of the last group of these trainings
        self._has = _AS_MADE if comm.is_joining else _SAME

    @property
    @override
    def is_running(self) -> bool:
        return self._state is not None

    @property
    @override
    def is_behind(self) -> bool:
        is_outside = self._state is None and not self.comm.is_joining
        return is_outside and self._generation != self.client.generation

    @override
    def follow(self, state: Callable[[], TrainingState]) -> None:
        comm = self.comm
        has = comm.allgather_object(self._has)
        source = has.index(min(has))
        if has[source] == _MISSED:
            raise _lost_state()
        shared = state()
        shared.commit(None)
        if any(theirs != _SAME for theirs in has):
            sent: dict[str, Any] | None = None
            if comm.rank == source:
                sent = {"operations": shared.of_operations(), "program": shared.of_program()}
            is_behind = self._has != _SAME and comm.rank != source
            with named("state for workers that have joined meanwhile"):
                received = share(comm, source, sent, is_behind)
            if is_behind:
                shared.load_operations(received["operations"])
                shared.load_program(received["program"])
        try:
            shared.regroup(None, all_seen=True)
        except LostStateError as error:
            raise _lost_state() from error
        self._note_group()

    def _note_group(self) -> None:
        """Note that this worker has the state of these trainings, for the group that it is in."""
        self._generation = self.client.generation
        self._has = _SAME

    @property
    @override
    def repeats(self) -> bool:
        return self._state is not None and not self._is_suspended

    @property
    @override
    def requests(self) -> float:
        if not self.repeats:
            return 0.0
        return STOP * bool(self.client.stop_signal) + REGROUP * self.client.wants_to_regroup

    @property
    @override
    def stop_signal(self) -> int:
        return self.client.stop_signal

    def stop_signals(self, signals: StopSignals) -> StopSignals:
        """Return the job's signals: a signal to this worker alone means that it leaves."""
        return _JobSignals(self.client)

    @contextmanager
    @override
    def training(
        self,
        state: TrainingState,
        most: int,
        folder: str = "",
        signals: StopSignals | None = None,
        repeats: bool = True,
        is_one_of_many: bool = False,
    ) -> Iterator[bool]:
        comm = self.comm
        if self.is_behind:
            self.follow(lambda: state)
        self._training = comm.trainings
        comm.trainings = comm.trainings + 1
        self._state = state
        self.done = 0
        self._last = None
        self.has_state = not comm.is_joining
        self._most = most
        self._folder = folder
        self._given_signals = signals
        self._is_suspended = True
        self.client.hands_over = state.divides_state
        self._has_joined = comm.is_joining
        self._kept_results = []
        self._was_left = False
        if not comm.is_joining:
            comm.publish_results()
        comm.keeps_values = False
        try:
            with self._held:
                takes_part = not comm.is_joining or self._join(state, is_one_of_many)
                if repeats and takes_part:
                    self.resume()
                yield takes_part
                leave_later(self._signals, self.client)
        finally:
            self._state = None
            self.client.hands_over = False
            comm.keeps_values = True
        if takes_part:
            if self.done:
                comm.forget_results(self._training)
            comm.note_result(self._training, state.result)
            if not self._was_left:
                comm.publish_results()

    def _join(self, state: TrainingState, is_one_of_many: bool) -> bool:
        """Become a member at the next boundary; False if the others have completed this training
        before that.
        """
        comm = self.comm
        if comm.joins_before_result() if is_one_of_many else not comm.has_earlier_result:
            self._hold_signals()
            try:
                self.form_next_group()
            except _LateError:
                comm.is_joining = True  # in the training that the others are in
                self._held.close()
            else:
                self._is_suspended = False
                self.client.enter(self._training, self._most, self._folder)
                return True
        state.result = comm.earlier_result()
        self._has = _MISSED
        return False

    def _hold_signals(self) -> None:
        signals = self._given_signals
        self._signals = self._held.enter_context(StopSignals()) if signals is None else signals

    @override
    def suspend(self) -> None:
        if self.repeats:
            self._is_suspended = True
            self.client.enter(_OUTSIDE, self._most, self._folder)
            self._held.close()

    @override
    def resume(self) -> None:
        if self._state is not None and self._is_suspended:
            self._hold_signals()
            self.client.enter(self._training, self._most, self._folder)
            self._is_suspended = False
            self._state.commit(None)

    @contextmanager
    def until_all_have_ended(self) -> Iterator[None]:
        """Return a context at whose end this worker waits for all others, which may need its state
        until they have done as much.
        """
        try:
            yield
        except InterruptedRunError:  # on all workers
            self._complete()
            raise
        # The program has left its loop, or an error has ended that: nobody is waited for. The
        # result counts only if the program goes on.
        except GeneratorExit:
            self._was_left = True
            leave_later(self._signals, self.client)
            self.suspend()
            raise
        self._complete()

    def _complete(self) -> None:
        while self.repeats:
            assert self._state is not None
            with suppress(MembershipChangedError):
                self._state.note_seen(self._note_seen)
                if self.client.complete():
                    return
            self.form_next_group()

    @override
    def part_of(self, batch: Batch) -> Batch:
        return batch if self._state is None else self._state.part_of(batch)

    @override
    def run(self, operation: Callable[..., T], *args: Any, meets: bool = True) -> T:
        # or it is a part of another operation
        if self._state is None or self._is_suspended or self._is_within:
            return operation(*args)
        if self._is_beginning and self._has_joined:
            return cast(T, self._state.from_others(next(self._first_results)))
        number = self.done
        while self.done == number:
            self._try(self._state, operation, args, meets)
        if self._is_beginning:
            self._kept_results.append(self._state.for_others(self._last))
        return cast(T, self._last)

    @override
    def run_only(self, operation: Callable[[], T]) -> T:
        if self.done:  # before this worker joined
            return cast(T, self._last)
        return self.run(operation, meets=False)

    @contextmanager
    @override
    def beginning(self) -> Iterator[None]:
        self._is_beginning = True
        self._first_results = iter(self._kept_results)
        try:
            yield
        finally:
            self._is_beginning = False

    @override
    def attempt(self, operation: Callable[..., T], *args: Any) -> T | None:
        if self._state is None or self._is_suspended or self._is_within:
            return operation(*args)
        number = self.done
        self._try(self._state, operation, args, meets=True)
        return cast(T, self._last) if self.done > number else None

    def _try(
        self, state: TrainingState, operation: Callable[..., Any], args: Any, meets: bool
    ) -> None:
        self._is_within = True
        try:
            self.leave_if_signalled()
            state.begin()
            state.note_seen(self._note_seen)
            self.client.wait_for_lease()
            self.client.check()  # a worker that is alone waits in no collective
            if not meets:
                self._meet()
            result = operation(*args)
            self.client.wait_for_lease()
        except _RepeatError:  # undone, in another group
            self._is_within = False
            return
        except BaseException as error:
            self._is_within = False
            is_made = self._update is not None and self._update.is_made
            self._update = None
            if is_made:  # no other attempt may make it once more
                raise
            state.undo()
            if not isinstance(error, RuntimeError):
                raise
            self.form_next_group(failure_reason(error))
            return
        self._is_within = False
        self._update = None
        self.done += 1
        self._last = result
        state.commit(result)

    @property
    @override
    def is_updating(self) -> bool:
        return self._update is not None

    @override
    def update(
        self,
        meet: Callable[[], torch.Tensor | None],
        update: Callable[[torch.Tensor | None], None],
        give_out: Callable[[], None],
    ) -> None:
        if not self.repeats or not self._is_within:
            super().update(meet, update, give_out)
            return
        self._update = _Update(update)
        try:
            self._agreed = meet()
        except RuntimeError as error:
            self.form_next_group(failure_reason(error))
            if self._update is None:
                raise _RepeatError from None
            return  # it was completed with the others
        self._update.make(self._agreed)
        try:
            give_out()
        except RuntimeError as error:
            self.form_next_group(failure_reason(error))

    @override
    def leave_out(self, rank: int) -> None:
        if not self.repeats:
            return
        if rank == self.comm.rank:
            self.client.leave(is_faulty=True)
        raise MembershipChangedError(self.client.generation)

    def _note_seen(self, states: bytes | None) -> None:
        self.client.note_events(self._commit(), states)

    def _note_all_seen(self) -> None:
        """Note what rank 0's callbacks have seen before other workers join: one of these may be
        rank 0 soon, and cannot call the hooks of what came before.
        """
        if self._state is not None:
            with suppress(MembershipChangedError):
                self._state.note_seen(self._note_seen)

    def _meet(self) -> None:
        with named("meeting of all workers"):
            self.comm.barrier()

    @override
    def read(self, load: Callable[[], T]) -> T:
        while True:
            try:
                return load()
            except RuntimeError as error:
                if not self.repeats or self._is_within:
                    raise
                self._note_all_seen()
                self.form_next_group(failure_reason(error))

    @override
    def once(self, hook: Callable[..., object], *args: Any) -> None:
        try:
            hook(*args)
        except RuntimeError as error:
            if not self.repeats or self._is_within:
                raise
            self.form_next_group(failure_reason(error))

    @override
    def boundary(self, requests: float) -> None:
        if requests < REGROUP:
            return
        self._note_all_seen()
        if self._state is not None and self._state.divides_state:
            try:
                self._state.hand_over(self.client.leaving)
            except RuntimeError as error:
                self.form_next_group(failure_reason(error))
                return
        self.form_next_group(at_boundary=True)

    def leave_if_signalled(self) -> None:
        """Leave the job with the next change of its workers, if a signal to this one says so."""
        if (
            self._signals.received is not None
            and not self.client.leaving
            and not self.client.stop_signal
        ):
            self.client.leave()

    def _commit(self) -> Commit:
        return (self._training, self.done) if self.has_state else NO_STATE

    def _arrive(self) -> Commit:
        assert self._state is not None
        if not self._state.divides_state:  # else it leaves when it has handed over its part
            self.leave_if_signalled()
        is_made = self._update is not None and self._update.is_made
        return (*self._commit(), 1) if is_made else self._commit()

    def form_next_group(self, reason: str = "", at_boundary: bool = False) -> None:
        """Take part in the next view, again and again until its group is complete and all have the
        same state.

        Args:
            reason: why the last group has failed, if it has.
            at_boundary: whether all workers have agreed to regroup here.

        Raises:
            WorkerLeft: this worker leaves the job, or the job ends.
        """
        assert self._state is not None
        self._state.leave()
        self.comm.regroup_until(self._arrive, self.adapt, reason, at_boundary, self._check)
        self._note_group()

    def _check(self, view: View) -> None:
        """Check, before its group is formed, that a view is of the training that this worker is
        about to join.
        """
        if not self.has_state and view.fit > self._training:
            raise _LateError

    def adapt(self, view: View) -> None:
        """Bring all workers of a new group to the same state; called when the group is formed, and
        again in the next one if it fails meanwhile.
        """
        assert self._state is not None
        best = max(view.commits)
        try:
            self._complete_update(self._state, view)
            is_new = NO_STATE in view.commits
            is_complete = len(best) == 2
            if is_new or (is_complete and any(commit != best for commit in view.commits)):
                self._share(self._state, view, best)
            all_seen = tuple(view.events) >= tuple(self._commit())
            self._state.regroup(view.states, all_seen=all_seen)
        except LostStateError:
            self.has_state = False  # as all others say
            raise
        if is_new:
            self._meet()  # before anybody's program goes on, all that join have its state
        self.comm.publish_results()

    def _complete_update(self, state: TrainingState, view: View) -> None:
        """Complete the update of a step, if one of the workers that are left has made its part of
        it; else drop that of this worker.
        """
        commits = {commit for commit in view.commits if commit != NO_STATE}
        is_begun = len(commits) > 1 or any(len(commit) > 2 for commit in commits)
        if not (state.divides_state and is_begun):
            if self._update is not None:
                self._update = None
                state.undo()
            return
        source = view.members.index(view.source)
        with named("norms of gradients"):
            agreed = self.comm.broadcast_object(self._agreed, source)
        if self._update is not None and not self._update.is_made:
            self._agreed = agreed
            self._update.make(agreed)
        state.finish_update()

    def _share(self, state: TrainingState, view: View, best: Commit) -> None:
        """Give the state of the most advanced worker to those behind it."""
        comm = self.comm
        source = view.members.index(view.source)
        is_behind = self._commit() != best and self._update is None
        is_new = not self.has_state
        sent: dict[str, Any] | None = None
        if comm.rank == source:
            sent = {"operations": state.of_operations(), "program": {}}
            if NO_STATE in view.commits:
                sent["program"] = {**state.of_program(), "beginning": as_bytes(self._kept_results)}
        result = state.for_others(self._last) if comm.rank == source else None
        with named("result for workers that are behind"):
            result = comm.broadcast_object(result, source)
        received = share(comm, source, sent, is_behind)
        if not is_behind:
            return
        state.load_operations(received["operations"])
        if is_new:
            state.load_program(received["program"])
            self._kept_results = from_bytes(received["program"]["beginning"], torch.device("cpu"))
        self._last = state.from_others(result)
        self.done = best[1]
        self.has_state = True
        state.commit(None if is_new else self._last)


_repeat: WeakMethod[Callable[[Callable[[], Any]], Any]] | None = None


def repeat_by(repeat: Callable[[Callable[[], Any]], Any]) -> None:
    """Let a loop of one's own in an elastic job repeat the evaluations that the program calls in
    it, and beside it.

    Args:
        repeat: a method that returns the result of an operation; its object is not kept alive.
    """
    global _repeat
    _repeat = WeakMethod(repeat)


def repeated(operation: Callable[[], T]) -> T:
    """Return the result of an operation that the program calls, on all workers, and that changes
    nothing.
    """
    repeat = None if _repeat is None else _repeat()
    return operation() if repeat is None else cast(T, repeat(operation))


def interrupt(recovery: Recovery, after: str) -> NoReturn:
    """End a loop of one's own after a signal to the job, on all workers.

    Args:
        recovery: of the loop.
        after: what it has done: "step 3".
    """
    number = recovery.stop_signal or SIGTERM
    interruption.install()
    raise InterruptedRunError(f"stopped by {Signals(number).name} after {after}", number)


def _lost_state() -> LockstepError:
    return LockstepError(
        "all workers that had the state of this training have left the elastic job, or were lost, "
        "while another one ran. Save a checkpoint before the other one, and resume from it in a "
        "new Trainer after that."
    )


class _RepeatError(Exception):
    """The operation in progress has been undone, and its workers are others by now."""


class _LateError(Exception):
    """The others are in a later training than this worker, which joins them."""


def recovery_of(comm: Communicator, can_regroup: bool = True) -> Recovery:
    """Return the recovery of a job.

    Args:
        comm: of its workers.
        can_regroup: whether a step can be repeated by other workers.
    """
    if not isinstance(comm, ElasticCommunicator):
        return Recovery()
    return ElasticRecovery(comm) if can_regroup else MissingRecovery(comm)


class _JobSignals(StopSignals):
    """The signals of the whole job."""

    def __init__(self, client: MembershipClient) -> None:
        super().__init__()
        self._client = client

    @property
    def received(self) -> int | None:
        """The signal after which the whole job saves and ends."""
        return self._client.stop_signal or None

    @received.setter
    def received(self, _: int | None) -> None:
        """Ignore what `StopSignals` sets."""


def leave_later(signals: StopSignals, client: MembershipClient) -> None:
    """Note that this worker was told to leave a training that is complete by now: it leaves the
    next one, if any.

    The signal would end the program around the training, while the other workers may need this one.
    """
    if signals.received is not None:
        client.leaving = True
        signals.received = None


# Bytes of one broadcast. Who does not need the state receives each into the same memory, and a
# group that has just been formed needs little of its own. On 4 workers and 2 cores 164 MB took 0.31
# s over shm and 0.44 s over Gloo in whole tensors, 0.21 and 0.36 s in pieces of 4 MiB, and 0.16 and
# 0.30 s in these.
_PIECE = 16 << 20


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def share(
    comm: Communicator, source: int, state: Mapping[str, Any] | None, wanted: bool
) -> dict[str, Any]:
    """Send a state, tensor by tensor, from rank `source` to all; every worker calls this.

    Args:
        comm: of the workers.
        source: the rank that has it.
        state: plain values and tensors; ignored on the others.
        wanted: whether this worker needs it.

    Returns:
        The state; {} where it is not wanted.
    """
    tensors: dict[str, torch.Tensor] = {}
    described: Any = None
    if comm.rank == source:
        values, tensors = pack(dict(state or {}))
        described = values, [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    with named("state for workers that joined"):
        values, layout = comm.broadcast_object(described, source)
        scratch = torch.empty(0 if wanted else _PIECE, dtype=torch.uint8, device=comm.device)
        received: dict[str, torch.Tensor] = {}
        for name, shape, dtype in layout:
            tensor = tensors.get(name)
            if tensor is not None:
                tensor = tensor.detach().to(comm.device).contiguous()
            elif wanted:
                tensor = received[name] = torch.empty(shape, dtype=dtype, device=comm.device)
            size = math.prod(shape) * dtype.itemsize
            for start in range(0, size, _PIECE):
                end = min(size, start + _PIECE)
                comm.broadcast(
                    scratch[: end - start] if tensor is None else _bytes(tensor)[start:end], source
                )
        if comm.rank == source:
            received = tensors
    return dict(unpack(values, received)) if wanted else {}


def as_bytes(value: Any) -> torch.Tensor:
    """Return any value as a tensor of bytes, for `share`, with its own tensors on the CPU."""
    on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), value)
    return torch.frombuffer(bytearray(pickle.dumps(on_cpu)), dtype=torch.uint8)


def from_bytes(data: torch.Tensor, device: torch.device) -> Any:
    """Return what `as_bytes` was given on another worker, with its tensors on a device."""
    value = pickle.loads(data.cpu().numpy().tobytes())
    return map_tensors(lambda tensor: tensor.to(device), value)
