"""The base class of callbacks, and the interface of a training run that they use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..run.epoch_totals import EpochTotals, Row

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ...communicator import Communicator
    from ...data.loader import Batch
    from ..step.step_result import StepResult
    from ..step.train_step import TrainStep

__all__ = ["Callback", "Row", "TrainingContext"]


class TrainingContext(Protocol):
    """The interface of a training run for callbacks; the `Trainer` implements it.

    Other attributes of the trainer are private and may change.
    """

    @property
    def model(self) -> nn.Module:
        """The model; with strategy="sharded", its parameters are this worker's shards."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. A callback that changes it must run on every rank, see
        `Callback.every_rank`.
        """

    @property
    def comm(self) -> Communicator:
        """Communicator over the workers; collectives only from callbacks that run on every rank."""

    @property
    def step(self) -> TrainStep:
        """The training step: `steps_done`, `strategy`, `precision`."""

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None for a run that writes nothing."""

    @property
    def global_batch_size(self) -> int:
        """Samples in one step, over all workers."""

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be queued on an accelerator."""

    @property
    def epoch(self) -> int:
        """The epoch in progress, from 0."""

    @property
    def epochs(self) -> int | None:
        """Epochs of the whole run; None if it ends after a number of steps, with an iterable data
        set.
        """

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch; None for an iterable data set before the end of its first
        epoch.
        """

    @property
    def epoch_ended(self) -> bool:
        """Whether all steps of the epoch in progress are done."""

    @property
    def steps_in_epoch(self) -> int:
        """Steps done of the epoch in progress, or of the one that has just ended."""

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if it ends after a number of epochs of an iterable data
        set.
        """

    @property
    def totals(self) -> EpochTotals:
        """Loss and speed of the epoch in progress; reading the loss waits for the device."""

    @property
    def history(self) -> list[Row]:
        """One row for each completed epoch and for each validation within one, equal on all
        workers.
        """

    @property
    def stop_reason(self) -> str:
        """The reason for an end before the last epoch; "" without one."""

    @property
    def newest_checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint, written or being written; None without one."""

    def save(self, best: bool = False) -> Path:
        """Write a checkpoint, which is kept if it is the `best` one; called by every worker.

        Args:
            best: whether it is kept as the best one, to which `checkpoints/best` leads.
        """

    def stop(self, reason: str) -> None:
        """End the run after this epoch, or after the validation in progress; any worker may call
        it.

        Args:
            reason: why; it becomes `Trainer.stop_reason`.
        """

    def evaluate(self, dataset: Any, model: nn.Module | None = None) -> dict[str, float]:
        """Return loss and metrics of the model, or of another one, over a data set; called by every
        worker.

        Args:
            dataset: a data set, a `Loader` or a `DataLoader`.
            model: the other model; that of the training when None.
        """


class Callback:
    """A callback that does nothing; override the hooks that are needed.

    Attributes:
        every_rank: whether it runs on all workers. If not (the default), it runs on rank 0 only,
            and must not communicate, nor change the model, the loss, the data or the optimizer:
            `fit` refuses that with an error. A callback on every rank must call the same
            collectives and make the same changes on each.
        needs_columns: columns of the history that it reads, such as "val_loss"; `fit` checks before
            the first step that the rows will have them.
        adds_columns: columns that it adds itself to the rows, or to the results of a validation.
        needs_run_dir: whether it writes to the run directory; `fit` checks before the first step
            that there is one.
    """

    every_rank: bool = False
    needs_columns: Sequence[str] = ()
    adds_columns: Sequence[str] = ()
    needs_run_dir: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume in another process: plain values and tensors, by name; empty
        by default.

        Called on rank 0 for each checkpoint. It is stored under the name of the class, with the
        suffix ``-2`` for a second callback of that class, and so on.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; called on each rank on which the callback runs, before
        `on_train_start`.

        An exception here fails the whole job: the run does not resume from that checkpoint.

        Args:
            state: what `state_dict` has returned when the checkpoint was written.
        """

    # Hooks, in the order in which they are called.

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Called before the first step, after a checkpoint was loaded.

        Args:
            trainer: the trainer, as callbacks see it.
        """

    def on_train_epoch_start(self, trainer: TrainingContext) -> None:
        """Called before the first step of each epoch, and before the next step of one that a run
        resumes in.

        Args:
            trainer: the trainer, as callbacks see it.
        """

    def on_train_step_start(self, trainer: TrainingContext, batch: Batch) -> None:
        """Called before each step; `batch` is this worker's part of the global batch.

        Args:
            trainer: the trainer, as callbacks see it.
            batch: this worker's part of the global batch.
        """

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """Called after each step. Reading `result.loss` waits for the device: do so rarely, or use
        `on_loss`.

        Args:
            trainer: the trainer, as callbacks see it.
            result: the result of the step.
        """

    def on_loss(self, trainer: TrainingContext, result: StepResult, loss: float) -> None:
        """Called when the loss of a step is on the host, and finite; it does not wait for the
        device.

        `result.grad_norm` is on the host then, too; it is None if the trainer has no
        `max_grad_norm`.

        Called once for every step with an update, in order, after its `on_train_step_end`: on an
        accelerator up to ``trainer.max_steps_in_flight - 1`` steps later, and for all steps before
        a checkpoint or `on_row`.

        Args:
            trainer: the trainer, as callbacks see it.
            result: the result of the step.
            loss: its loss, the mean over the global batch.
        """

    def on_validation_start(self, trainer: TrainingContext) -> None:
        """Called before each evaluation on the validation data.

        Args:
            trainer: the trainer, as callbacks see it.
        """

    def on_validation_end(self, trainer: TrainingContext, results: dict[str, float]) -> None:
        """Called after each evaluation on the validation data: the loss and the metrics, by
        name.

        Args:
            trainer: the trainer, as callbacks see it.
            results: "loss" and the names of the metrics → values.
        """

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Called when a row was added to `trainer.history`: at the end of an epoch, and at a
        validation within one.

        A run that ends within an epoch, after `max_steps`, adds a row too.

        Args:
            trainer: the trainer, as callbacks see it.
            row: names and values of the columns, such as `train_loss` and `val_loss`.
        """

    def on_train_epoch_end(self, trainer: TrainingContext, row: Row) -> None:
        """Called after each epoch and its validation, after `on_row`; `row` is also the last of
        `trainer.history`.

        Args:
            trainer: the trainer, as callbacks see it.
            row: names and values of the columns of the epoch.
        """

    def on_checkpoint_start(self, trainer: TrainingContext) -> None:
        """Called before a checkpoint is written.

        Args:
            trainer: the trainer, as callbacks see it.
        """

    def on_checkpoint_end(self, trainer: TrainingContext, path: Path) -> None:
        """Called after a checkpoint was written; with `async_save`, when its state was copied, and
        the folder may not be there yet.

        Args:
            trainer: the trainer, as callbacks see it.
            path: the folder of the checkpoint.
        """

    def on_checkpoint_complete(self, trainer: TrainingContext, path: Path) -> None:
        """Called when a checkpoint is complete: all of its files are on disk, so that they can be
        copied elsewhere.

        Called after `on_checkpoint_end`; with `async_save` before the next checkpoint is written,
        and for the last one at the end, after `on_train_end`. A run that ends with an error calls
        it no more. In an elastic job, rank 0 may be another worker by then.

        Args:
            trainer: the trainer, as callbacks see it.
            path: the folder of the checkpoint.
        """

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Called after the last step, or after the error that ended the run; always called if
        `on_train_start` was.

        Args:
            trainer: the trainer, as callbacks see it.
            error: the error that ended the run; None if none did.
        """
