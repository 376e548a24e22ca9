"""The loop over epochs: trains, evaluates, and calls the callbacks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGTERM
from typing import NoReturn, Protocol, cast

from .. import interruption
from ..data.loader import Batch, Loader
from ..errors import ConfigError, DivergedError, InterruptedRunError
from .callbacks.base import TrainingContext
from .callbacks.group import CallbackGroup
from .checkpoint_manager import CheckpointManager
from .in_flight import StepsInFlight
from .modes import TrainingModes
from .recovery import REGROUP
from .run_state import EpochTotals, Position, Row, RunState
from .step import StepResult
from .stop_signals import StopSignals
from .stopping import StoppableLoader, StopRequests

__all__ = ["Loop", "Run"]


class Run(TrainingContext, Protocol):
    """What the loop needs of a training run; the `Trainer` has it."""

    state: RunState
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


class Loop:
    """The loop over epochs: trains, evaluates and calls the callbacks.

    Args:
        trainer: the trainer that runs the steps and evaluations, and owns the state.
        callbacks: the callbacks of the run.
        signals: the signals that this worker has received.
    """

    def __init__(self, trainer: Run, callbacks: CallbackGroup, signals: StopSignals) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self.stop_requests = StopRequests(trainer.comm, signals)
        self._active_loader: Loader | None = None
        self._held_out: Loader | None = None
        self._validate_every: int | None = None

    def run(self, loader: Loader, held_out: Loader | None, validate_every: int | None = None) -> None:
        """Run the epochs from the current position up to `trainer.epochs` and `trainer.total_steps`.

        Args:
            loader: of the training data.
            held_out: of the validation data, if any.
            validate_every: steps between validations within an epoch, if any.

        Raises:
            DivergedError: if a loss is not finite, or the weights at the end, naming the last checkpoint.
            InterruptedRunError: after a signal, naming the checkpoint.
        """
        trainer = self._trainer
        state = trainer.state
        state.epoch = state.position.last_epoch
        self._held_out, self._validate_every = held_out, validate_every
        with self._naming_checkpoint():
            with self._callbacks.running(trainer):
                while not self._agree_to_stop():
                    state.epoch = state.position.epoch
                    self._train_epoch(loader)
                    self._end_epoch()
                trainer.step.check_weights()
            if self.stop_requests.agree()[0] is not None:  # all epochs are done, but the program must still stop
                self._interrupt()

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        """Let a DivergedError name the checkpoint to go on from."""
        manager = self._trainer.checkpoint_manager
        try:
            yield
        except DivergedError as error:
            manager.end()
            raise manager.with_advice(error) from None

    def _train_epoch(self, loader: Loader) -> None:
        trainer = self._trainer
        trainer.modes.restore()
        state = trainer.state
        before, state.totals = state.totals, EpochTotals(trainer.comm.device)
        if state.position.step:
            state.totals.load_state_dict(before.state_dict())
        self._active_loader = loader
        trainer.steps_before_epoch = trainer.step.steps_done - state.position.step
        self._callbacks.call("on_train_epoch_start", trainer)
        try:
            if self._validation_is_due():  # of a run that was interrupted during it
                self._validate_within_epoch()
            for batch in () if self._no_more_steps() else loader.epoch(trainer.epoch):
                self._step(loader, batch)
                if self._validation_is_due():
                    self._validate_within_epoch()
                if self._no_more_steps():
                    break
            else:
                state.position.end_steps()
            trainer.steps_per_epoch = loader.steps
        finally:
            self._active_loader = None

    def _step(self, loader: Loader, batch: Batch) -> None:
        trainer = self._trainer
        self._callbacks.call("on_train_step_start", trainer, batch)
        result = self._run_step(batch)
        # Before the callbacks: one of them may save, and the checkpoint must include this step and its loss.
        state = trainer.state
        state.position.advance(loader)
        loss, count, _ = result.on_hand
        state.totals.add(loss, count, batch.global_size)
        trainer.steps_in_flight.add(result)
        self._callbacks.call("on_train_step_end", trainer, result)
        self._settle()

    def _run_step(self, batch: Batch) -> StepResult:
        return self._trainer.step.run(batch, stop=self.stop_requests.signalled)

    def _settle(self) -> None:
        """Check the results that have arrived, and stop if a worker requested it."""
        if self._trainer.steps_in_flight.settle() % REGROUP:
            self._interrupt()

    def _no_more_steps(self) -> bool:
        trainer = self._trainer
        return bool(trainer.stop_reason) or self._has_all_steps()

    def _has_all_steps(self) -> bool:
        total = self._trainer.total_steps
        return total is not None and self._trainer.step.steps_done >= total

    def _validation_is_due(self) -> bool:
        """Return whether there is a validation within the epoch after the step just done."""
        trainer, every = self._trainer, self._validate_every
        done, position = trainer.step.steps_done, trainer.position
        if every is None or done % every or not position.step or position.ended or self._has_all_steps():
            return False
        return not trainer.history or trainer.history[-1]["step"] != done

    def _validate_within_epoch(self) -> None:
        self._add_row()
        _, self._trainer.stop_reason = self.stop_requests.agree()

    def _end_epoch(self) -> None:
        """End an epoch, or the run within one."""
        trainer, within = self._trainer, not self._trainer.position.ended
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
        if self._held_out is None:  # else its evaluation does so, after the callbacks that come before it
            trainer.step.check_replicas()
        row |= self._validate(row["lr"])
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
            what = f"the validation loss is {measured['loss']} after step {trainer.step.steps_done}"
            raise DivergedError(f"{what} with learning rate {learning_rate:g}.")
        return {f"val_{name}": value for name, value in measured.items()}

    def stoppable(self, loader: Loader) -> Loader:
        """Wrap `loader` so that an evaluation over it ends early when a worker has received a signal.

        Raises:
            ConfigError: for the loader that training is iterating over, which would lose its position.
        """
        if loader is self._active_loader:
            hint = "Pass its data set, or another Loader."
            raise ConfigError(
                "dataset", "another Loader than that of the epoch that is being trained", found="it", hint=hint
            )
        return cast(Loader, StoppableLoader(loader, self.stop_requests, self._interrupt))

    def _agree_to_stop(self) -> bool:
        """Return whether the run ends here, the same on all workers; interrupt an unfinished run after a signal."""
        trainer = self._trainer
        number, trainer.stop_reason = self.stop_requests.agree()
        if number is not None and not trainer.done:
            self._interrupt()
        return trainer.done

    def _interrupt(self) -> NoReturn:
        trainer = self._trainer
        number = self.stop_requests.agree()[0] or SIGTERM
        trainer.check_losses()
        of = "" if trainer.epochs is None else f" of {trainer.epochs}"
        where = f"after step {trainer.step.steps_done} (epoch {trainer.epoch + 1}{of})"
        path = None if trainer.run_dir is None else trainer.save()
        trainer.checkpoint_manager.wait()
        saved = "nothing was saved, as the run has no run directory" if path is None else f"saved {path}"
        message = f"stopped by {number.name} {where}; {saved}"
        interruption.install()
        raise InterruptedRunError(message, number, None if path is None else str(path))
