"""The epochs and steps of one call of `Trainer.fit`, and what ends them early."""

from __future__ import annotations

import math
from signal import SIGTERM
from typing import TYPE_CHECKING, NoReturn, cast

from ..data.loader import Batch, Loader
from ..errors import ConfigError, DivergedError, InterruptedRunError
from .callbacks.base import Row
from .callbacks.group import CallbackGroup
from .epoch import EpochTotals
from .signals import StopSignals
from .stopping import StoppableLoader, Stopping

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Loop"]


class Loop:
    """Trains, evaluates and tells the callbacks, epoch by epoch.

    Args:
        trainer: whose parts do the work, and whose state this moves on.
        callbacks: told of every moment.
        signals: what this worker has been sent.
    """

    def __init__(self, trainer: Trainer, callbacks: CallbackGroup, signals: StopSignals) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self.stopping = Stopping(trainer.comm, signals)
        self._feeding: Loader | None = None

    def run(self, loader: Loader, held_out: Loader | None) -> None:
        """Make the epochs from where the trainer is to those that it was asked for.

        Raises:
            DivergedError: when a loss is not finite, naming the last checkpoint.
            InterruptedRunError: after a signal, naming the checkpoint.
        """
        trainer = self._trainer
        trainer.epoch = trainer.position.last_epoch
        try:
            with self._callbacks.running(trainer):
                while not self._agree_to_stop():
                    trainer.epoch = trainer.position.epoch
                    self._train_epoch(loader)
                    self._end_epoch(held_out)
            if self.stopping.agree()[0] is not None:  # too late to end it early, but not for what comes after it
                self._interrupt()
        except DivergedError as error:
            trainer.saver.end()
            last = trainer.saver.last_path
            where = f"The last checkpoint is {last}." if last else "There is no checkpoint yet."
            raise DivergedError(f"{error} {where}") from None

    def _train_epoch(self, loader: Loader) -> None:
        trainer = self._trainer
        trainer.modes.restore()
        before, trainer.totals = trainer.totals, EpochTotals(trainer.comm.device)
        if trainer.position.step:
            trainer.totals.load_state_dict(before.state_dict())
        self._feeding = loader
        try:
            for batch in loader.epoch(trainer.epoch):
                self._step(loader, batch)
        finally:
            self._feeding = None

    def _step(self, loader: Loader, batch: Batch) -> None:
        trainer = self._trainer
        result = trainer.step.run(batch, stop=self.stopping.signalled)
        # Before the callbacks: one of them may save, and must then see this step and its loss as well.
        trainer.position.note(loader)
        trainer.totals.add(result.loss, result.count, batch.global_size)
        trainer.unsettled.add(result)
        self._callbacks.on_step(trainer, result)
        if trainer.unsettled.settle():
            self._interrupt()

    def _end_epoch(self, held_out: Loader | None) -> None:
        trainer = self._trainer
        row: Row = {
            "epoch": trainer.epoch + 1,
            "step": trainer.step.steps_done,
            "train_loss": trainer.totals.loss,
            "lr": float(trainer.optimizer.param_groups[0]["lr"]),
            "seconds": trainer.totals.seconds,
            "samples_per_second": trainer.totals.samples_per_second,
        }
        trainer.check_losses()
        trainer.step.check_replicas()
        if held_out is not None:
            measured = trainer.evaluate(held_out)
            row |= {f"test_{name}": value for name, value in measured.items()}
            if not math.isfinite(measured["loss"]):
                what = f"the test loss is {measured['loss']} after step {trainer.step.steps_done}"
                raise DivergedError(f"{what} with learning rate {row['lr']:g}.")
        trainer.position.end_epoch()
        trainer.history.append(row)
        self._callbacks.on_epoch(trainer, row)

    def stoppable(self, loader: Loader) -> Loader:
        """`loader`, for an evaluation that ends early when a worker has been sent a signal.

        Raises:
            ConfigError: for the very loader that training is taking batches from, which would lose its place.
        """
        if loader is self._feeding:
            hint = "Give its data set, or another Loader."
            raise ConfigError(
                "dataset", "another Loader than that of the epoch that is being trained", found="it", hint=hint
            )
        return cast(Loader, StoppableLoader(loader, self.stopping, self._interrupt))

    def _agree_to_stop(self) -> bool:
        """Whether the run is to end here in good order; a signal interrupts one that would go on."""
        trainer = self._trainer
        number, trainer.stop_reason = self.stopping.agree()
        if number is not None and not trainer.done:
            self._interrupt()
        return trainer.done

    def _interrupt(self) -> NoReturn:
        trainer = self._trainer
        number = self.stopping.agree()[0] or SIGTERM
        trainer.check_losses()
        where = f"after step {trainer.step.steps_done} (epoch {trainer.epoch + 1} of {trainer.epochs})"
        path = None if trainer.out is None else trainer.save()
        trainer.saver.wait()
        saved = "nothing was saved, as the run has no folder" if path is None else f"saved {path}"
        message = f"stopped by {number.name} {where}; {saved}"
        raise InterruptedRunError(message, number, None if path is None else str(path))
