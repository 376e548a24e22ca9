"""The loop over epochs: trains, evaluates, and calls the callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from signal import SIGTERM, Signals
from typing import Any, NoReturn, Protocol, cast

import torch
from typing_extensions import override

from .. import interruption
from ..data.loader import Loader
from ..errors import (
    ConfigError,
    DivergedError,
    InterruptedRunError,
    MembershipChangedError,
)
from .callbacks.base import TrainingContext
from .callbacks.group import CallbackGroup
from .feed import Feed
from .in_flight import StepsInFlight
from .model_state import StateOfStep
from .modes import TrainingModes
from .recovery import REGROUP, as_bytes, from_bytes
from .run.checkpoint_manager import CheckpointManager
from .run.epoch_totals import EpochTotals, Row
from .run.position import Position
from .run.run_directory import HeldRunDirectory
from .run.run_state import RunState
from .run.saved_state import check_frozen
from .step.step_result import StepResult
from .stop_signals import StopSignals
from .stopping import StoppableLoader, StopRequests


class Run(TrainingContext, Protocol):
    """What the loop needs of a training run; the `Trainer` has it."""

    state: RunState
    directory: HeldRunDirectory
    checkpoint_manager: CheckpointManager
    modes: TrainingModes
    steps_in_flight: StepsInFlight
    stop_reason: str
    steps_before_epoch: int
    steps_per_epoch: int | None

    @property
    def done(self) -> bool:
        """Whether all requested epochs or steps are done, or a stop was requested."""

    @property
    def position(self) -> Position:
        """The position in the training data."""

    def check_losses(self) -> None:
        """Check that the losses of all steps so far are finite; waits for the device."""

    def complete_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, and tell the callbacks of it."""


class Loop:
    """The loop over epochs: trains, evaluates and calls the callbacks.

    All communication is within operations of the step's `Recovery`, and which one comes next
    follows from the state: position, history, and whether the epoch has begun.

    Args:
        trainer: the trainer that runs the steps and evaluations, and owns the state.
        callbacks: the callbacks of the run.
        signals: the signals that this worker has received.
        loader: of the training data.
        held_out: of the validation data, if any.
        validate_every: steps between validations within an epoch, if any.

    Attributes:
        stop_requests: the requests of any worker to end the run.
        epoch_has_begun: whether steps of the epoch in progress may be done, and
            `on_train_epoch_start` was called.
        feed: the batches.
    """

    def __init__(
        self,
        trainer: Run,
        callbacks: CallbackGroup,
        signals: StopSignals,
        loader: Loader,
        held_out: Loader | None,
        validate_every: int | None = None,
    ) -> None:
        self._trainer = trainer
        self._callbacks = callbacks
        self._signals = signals
        self._loader = loader
        self._held_out = held_out
        self._validate_every = validate_every
        self._recovery = trainer.step.recovery
        self.stop_requests = StopRequests(trainer.comm, self._recovery.stop_signals(signals))
        self.feed = Feed(loader, self._seek, self._recovery)
        self.epoch_has_begun = False
        self._trains = False  # whether batches of the loader are in use

    def run(self) -> None:
        """Run the epochs from the current position up to `trainer.epochs` and
        `trainer.total_steps`.

        Raises:
            DivergedError: if a loss is not finite, or the weights at the end, naming the last
                checkpoint.
            InterruptedRunError: after a signal, naming the checkpoint.
            WorkerLeft: this worker has left the job, which goes on.
        """
        trainer = self._trainer
        recovery = self._recovery
        trainer.state.epoch = trainer.position.last_epoch
        most = min(
            trainer.global_batch_size,
            trainer.step.strategy.virtual_workers or trainer.global_batch_size,
        )
        folder = "" if trainer.run_dir is None else str(trainer.run_dir.absolute())
        shared = StateOfRun(trainer, self, self._callbacks)
        with recovery.training(shared, most, folder, self._signals) as takes_part:
            if takes_part:
                with recovery.until_all_have_ended(), self._naming_checkpoint():
                    self._run()

    def _run(self) -> None:
        """Run the epochs, each with its validation, and end the run."""
        trainer = self._trainer
        recovery = self._recovery
        with self._callbacks.running(trainer):
            # a worker that joins does so within an epoch
            while self.epoch_has_begun or not self._agree_to_stop():
                self._trains = True
                if not self.epoch_has_begun:
                    self._begin_epoch()
                self._validate_if_due()  # of a run that was interrupted during it
                if not self._no_more_steps():
                    self._train_epoch()
                self._trains = False
                self._end_epoch()
            recovery.run(trainer.step.check_weights, meets=False)
        if self._agree()[0] is not None:  # all epochs are done, but the program must still stop
            self._interrupt()
        trainer.complete_checkpoint()
        if not recovery.has_fixed_workers:
            recovery.run(partial(self._callbacks.keep_states, trainer.comm), meets=False)

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        """Let a DivergedError name the checkpoint to go on from."""
        manager = self._trainer.checkpoint_manager
        try:
            yield
        except DivergedError as error:
            manager.end()
            raise manager.with_advice(error) from None

    def _begin_epoch(self) -> None:
        """Begin an epoch, or go on with one that was interrupted."""
        trainer = self._trainer
        trainer.modes.restore()
        state = trainer.state
        state.epoch = state.position.epoch
        before = state.totals
        state.totals = EpochTotals(trainer.comm.device)
        if state.position.step:
            state.totals.load_state_dict(before.state_dict())
        trainer.steps_before_epoch = trainer.step.steps_done - state.position.step
        self.epoch_has_begun = True
        self._callbacks.call("on_train_epoch_start", trainer)

    def _train_epoch(self) -> None:
        """Do the steps that are left of the epoch, with the validations between them, or up to the
        end of the run.
        """
        trainer = self._trainer
        state = self._trainer.state
        callbacks = self._callbacks
        for batch in self.feed.epoch(trainer.epoch):
            callbacks.call("on_train_step_start", trainer, batch)
            result = self._recovery.run(self._run_step)
            # Before the callbacks: one of them may save, and the checkpoint must include this step
            # and its loss.
            state.position.advance(self._loader)
            loss, count, _ = result.on_hand
            if not result.is_skipped:
                state.totals.add(loss, count, batch.global_size)
            trainer.steps_in_flight.add(result)
            callbacks.call("on_train_step_end", trainer, result)
            # Results that have arrived are checked; a worker may have requested to stop, to join or
            # to leave.
            requests = trainer.steps_in_flight.settle_at_boundary()
            if requests % REGROUP:
                self._interrupt()
            self._recovery.boundary(requests)
            self._validate_if_due()
            if self._no_more_steps():
                return
        trainer.position.end_steps()

    def _run_step(self) -> StepResult:
        """Do one step, with the part of the batch that this worker has now."""
        return self._trainer.step.run(self.feed.current(), stop=self.stop_requests.signalled)

    def _seek(self, epoch: int) -> bool:
        """Move the loader to the position of the run, if it is one before a batch of `epoch`."""
        position = self._trainer.position
        if position.epoch != epoch or position.ended:
            return False
        position.seek(self._loader)
        return True

    def _no_more_steps(self) -> bool:
        trainer = self._trainer
        return bool(trainer.stop_reason) or self._has_all_steps()

    def _has_all_steps(self) -> bool:
        total = self._trainer.total_steps
        return total is not None and self._trainer.step.steps_done >= total

    def _validate_if_due(self) -> None:
        """Validate within the epoch if that is due after the step just done, and agree whether to
        stop.
        """
        trainer = self._trainer
        every = self._validate_every
        done = trainer.step.steps_done
        position = trainer.position
        if (
            every is None
            or done % every
            or not position.step
            or position.ended
            or self._has_all_steps()
        ):
            return
        if trainer.history and trainer.history[-1]["step"] == done:
            return
        self._add_row()
        _, trainer.stop_reason = self._agree()

    def _end_epoch(self) -> None:
        """End an epoch, or the run within one."""
        trainer = self._trainer
        within = not self._trainer.position.ended
        trainer.steps_per_epoch = self._loader.steps
        self.epoch_has_begun = False
        if within and trainer.history and trainer.history[-1]["step"] == trainer.step.steps_done:
            return  # stopped by a validation
        row = self._add_row(ends_epoch=not within)
        if not within:
            self._callbacks.call("on_train_epoch_end", trainer, row)

    def _add_row(self, ends_epoch: bool = False) -> Row:
        """Validate, and add a row to the history."""
        trainer = self._trainer
        row: Row = {
            "epoch": trainer.epoch + 1,
            "step": trainer.step.steps_done,
            "train_loss": trainer.totals.loss,
            "lr": trainer.step.learning_rates[0],
            "seconds": trainer.totals.seconds,
            "samples_per_second": trainer.totals.samples_per_second,
        }
        trainer.check_losses()
        # else its evaluation does so, after the callbacks that come before it
        if self._held_out is None:
            self._recovery.run(trainer.step.check_replicas, meets=False)
        row |= self._validate(row["lr"])
        since = int(trainer.history[-1]["step"]) if trainer.history else 0
        for guard in trainer.step.guards:
            guard.on_row(row, since)
        if ends_epoch:
            trainer.position.end_epoch()
            trainer.step.end_epoch(row)
        trainer.history.append(row)
        self._callbacks.call("on_row", trainer, row)
        return row

    def _validate(self, learning_rate: float) -> Row:
        """Return the columns of a validation, if there is validation data."""
        trainer = self._trainer
        if self._held_out is None:
            return {}
        self._callbacks.call("on_validation_start", trainer)
        measured = trainer.evaluate(self._held_out)
        self._callbacks.call("on_validation_end", trainer, measured)
        if not math.isfinite(measured["loss"]):
            problem = (
                f"the validation loss is {measured['loss']} after step {trainer.step.steps_done}"
            )
            raise DivergedError(f"{problem} with learning rate {learning_rate:g}.")
        return {f"val_{name}": value for name, value in measured.items()}

    def evaluate(
        self, measure: Callable[[Callable[[Loader], Loader]], dict[str, float]]
    ) -> dict[str, float]:
        """Return the results of an evaluation, which ends early when a worker has received a
        signal.

        Args:
            measure: evaluates, and passes its loader through the function that it is given.

        Raises:
            ConfigError: for the loader that training is iterating over, which would lose its
                position.
            InterruptedRunError: after a signal, naming the checkpoint.
        """

        def attempt() -> dict[str, float] | None:
            self.stop_requests.forget_polls()
            try:
                return measure(self._stoppable)
            except _StoppedError:
                return None

        measured = self._recovery.run(attempt, meets=False)
        if measured is None:
            self._interrupt()
        return dict(measured)

    def _stoppable(self, loader: Loader) -> Loader:
        if self._trains and loader is self._loader:
            hint = "Pass its data set, or another Loader."
            raise ConfigError(
                "dataset",
                "another Loader than that of the epoch that is being trained",
                found="it",
                hint=hint,
            )
        return cast(Loader, StoppableLoader(loader, self.stop_requests, _stop))

    def _agree(self) -> tuple[Signals | None, str]:
        """Exchange the requests to stop; returns (a signal, a reason), equal on all workers."""
        signal, self.stop_requests.reason = self._recovery.run(self.stop_requests.agree)
        return signal, self.stop_requests.reason

    def _agree_to_stop(self) -> bool:
        """Return whether the run ends here, the same on all workers; interrupt an unfinished run
        after a signal.
        """
        trainer = self._trainer
        number, trainer.stop_reason = self._agree()
        if number is not None and not trainer.done:
            self._interrupt()
        return trainer.done

    def _interrupt(self) -> NoReturn:
        trainer = self._trainer
        number = self._agree()[0] or SIGTERM
        trainer.check_losses()
        of = "" if trainer.epochs is None else f" of {trainer.epochs}"
        where = f"after step {trainer.step.steps_done} (epoch {trainer.epoch + 1}{of})"
        path = None if trainer.run_dir is None else trainer.save()
        trainer.complete_checkpoint()
        saved = (
            "nothing was saved, as the run has no run directory"
            if path is None
            else f"saved {path}"
        )
        message = f"stopped by {number.name} {where}; {saved}"
        interruption.install()
        raise InterruptedRunError(message, number, None if path is None else str(path))


class _StoppedError(Exception):
    """A worker has received a signal, and all end the evaluation in progress."""


def _stop() -> NoReturn:
    raise _StoppedError


class StateOfRun(StateOfStep):
    """What the workers of a run have alike, see `recovery.TrainingState`.

    Args:
        run: the run.
        loop: its loop; None between two calls of `fit`.
        callbacks: its callbacks.
    """

    def __init__(self, run: Run, loop: Loop | None, callbacks: CallbackGroup) -> None:
        super().__init__(run.step)
        self._run = run
        self._loop = loop
        self._callbacks = callbacks
        self._pretrained = (
            {} if run.state.saves_frozen else {id(p): p._version for p in run.model.parameters()}
        )

    @property
    def result(self) -> list[Row]:
        """The history."""
        return self._run.history

    @result.setter
    def result(self, rows: list[Row]) -> None:
        self._run.state.history = rows

    @override
    def note_seen(self, note: Callable[[bytes | None], None]) -> None:
        if self.step.comm.rank != 0:
            return
        try:
            note(self._callbacks.changed_states())
        except MembershipChangedError:
            self._callbacks.forget_states()  # not all hosts have them
            raise

    @override
    def commit(self, result: Any) -> None:
        super().commit(result)
        self._callbacks.note_commit()

    @override
    def of_operations(self) -> dict[str, Any]:
        state = super().of_operations()
        frozen = self._left_out()
        model = {
            name: value for name, value in state["model"].items() if name not in frozen["names"]
        }
        checkpoints = self._run.checkpoint_manager.state_dict()
        return {**state, "model": model, "frozen": frozen, "checkpoints": checkpoints}

    def _left_out(self) -> dict[str, Any]:
        """Return the parameters that others have: with save_frozen=False, those that were never
        trained.
        """
        nothing: dict[str, Any] = {"names": [], "checksum": ""}
        left_out = nothing if self._run.state.saves_frozen else self._run.state.left_out()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        pretrained = [parameters[name] for name in left_out["names"]]
        is_same = all(self._pretrained.get(id(p)) == p._version for p in pretrained)
        return left_out if is_same else nothing

    def load_operations(self, state: dict[str, Any]) -> None:
        """Load what another worker has sent: the model, without the frozen weights that both have.

        Raises:
            CheckpointError: with save_frozen=False, if this worker has other pretrained weights.
        """
        frozen = state["frozen"]
        check_frozen(self.model, frozen, "the other workers have sent")
        super().load_operations({**state, "model": {**self.model.state_dict(), **state["model"]}})
        self._pretrained |= {
            id(p): p._version
            for name, p in self.model.named_parameters()
            if name in frozen["names"]
        }
        self._run.checkpoint_manager.load_state_dict(state["checkpoints"])

    @override
    def of_program(self) -> dict[str, Any]:
        run = self._run
        state = self._run.state
        return {
            **super().of_program(),
            "position": state.position.state_dict(),
            "totals": state.totals.state_dict(),
            "history": state.history,
            "epoch": [state.epoch, run.steps_before_epoch, self._epoch_has_begun],
            "callbacks": self._callbacks.shared_states(),
            "callbacks of rank 0": as_bytes(self._callbacks.states_of_rank0),
        }

    @override
    def load_program(self, state: dict[str, Any]) -> None:
        super().load_program(state)
        run_state = self._run.state
        run_state.position = Position(state["position"])
        run_state.totals.load_state_dict(state["totals"])
        run_state.history = list(state["history"])
        run_state.epoch, self._run.steps_before_epoch, epoch_has_begun = state["epoch"]
        if self._loop is not None:
            self._loop.epoch_has_begun = epoch_has_begun
        self._callbacks.load_shared_states(state["callbacks"])
        of_rank0 = from_bytes(state["callbacks of rank 0"], torch.device("cpu"))
        self._callbacks.states_of_rank0 = of_rank0

    @property
    def _epoch_has_begun(self) -> bool:
        return self._loop is not None and self._loop.epoch_has_begun

    @override
    def leave(self) -> None:
        super().leave()
        self._run.checkpoint_manager.abandon()
        self._run.directory.leave()
        if self._loop is not None:
            self._loop.stop_requests.forget_polls()

    @override
    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        super().regroup(states, all_seen)
        run = self._run
        loop = self._loop
        rank = self.step.comm.rank
        run.steps_in_flight.regroup()
        if loop is None:
            self._callbacks.take_rank_between(rank)
            return
        loop.feed.regroup()
        self._callbacks.take_rank(rank, run, states, all_seen, loop.epoch_has_begun)
        run.directory.hold()
