"""A callback that writes losses and metrics as TensorBoard events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import arguments
from .base import Callback, Row, TrainingContext
from .writing import WriteGuard

if TYPE_CHECKING:
    from ..step.step_result import StepResult

# Columns of the history → tags; metrics of validations become "accuracy/val" and so on.
_TAGS = {
    "train_loss": "loss/train_epoch",
    "lr": "learning_rate",
    "samples_per_second": "samples_per_second",
}


class TensorBoard(Callback):
    """Writes scalars to `tensorboard` in the run directory, with steps on the x axis.

    During an epoch: ``loss/train``, and ``gradient_norm`` if the trainer has `max_grad_norm`. At
    the end of an epoch and at validations: ``loss/train_epoch``, ``loss/val``, each metric as
    ``accuracy/val``, ``learning_rate`` and ``samples_per_second``. If they cannot be written, a
    warning is logged once and the training continues.

    Args:
        every_steps: steps between two values of ``loss/train``.

    Raises:
        ConfigError: if the package tensorboard is not installed, or `every_steps` is below 1; when
            `fit` starts, without a run directory.
    """

    needs_run_dir = True

    def __init__(self, every_steps: int = 10) -> None:
        arguments.require_package("tensorboard", "TensorBoard()", "tensorboard")
        self._every = arguments.whole("every_steps", every_steps, least=1)
        self._write_guard = WriteGuard()
        self._writer: Any = None
        # Where another worker may take over: the events of the latest step, and the first step that
        # is replaced then. A writer that is killed loses what it has not flushed, or has written
        # what nobody knows of.
        self._moves = False
        self._latest: list[tuple[str, float, int]] = []
        self._first = -1

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Open the event file; events of steps that a resumed run repeats are replaced."""
        from torch.utils.tensorboard.writer import SummaryWriter

        if trainer.run_dir is None:
            return
        self._moves = not trainer.step.recovery.has_fixed_workers
        if self._first < 0 or not self._moves:
            self._first = trainer.step.steps_done + 1
            self._latest = []
        folder = trainer.run_dir / "tensorboard"
        again = self._latest
        with self._write_guard.to(folder):
            self._writer = SummaryWriter(str(folder), purge_step=self._first)
            for tag, value, step in again:
                self._writer.add_scalar(tag, value, step)

    def on_loss(self, trainer: TrainingContext, result: StepResult, loss: float) -> None:
        """Write the loss of a step, and the norm of its gradient."""
        if (result.step + 1) % self._every == 0:
            norm = {} if result.grad_norm is None else {"gradient_norm": float(result.grad_norm)}
            self._write({"loss/train": loss, **norm}, result.step + 1)

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Write a scalar for each value of the row."""
        named = {
            name: f"{name.removeprefix('val_')}/val" for name in row if name.startswith("val_")
        } | _TAGS
        self._write({tag: row[name] for name, tag in named.items()}, int(row["step"]))

    def _write(self, scalars: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            with self._write_guard.to(Path(self._writer.log_dir)):
                if self._moves:
                    self._note(scalars, step)
                for tag, value in scalars.items():
                    self._writer.add_scalar(tag, value, step)

    def _note(self, scalars: Mapping[str, float], step: int) -> None:
        """Note events that are written again if this worker is lost, and let go those that are in
        the file for good.
        """
        if self._latest and self._latest[-1][2] != step:
            self._writer.flush()
            self._latest = []
        self._first = step
        self._latest += [(tag, float(value), step) for tag, value in scalars.items()]

    def state_dict(self) -> dict[str, Any]:
        """Return the events of the latest step, for a worker that takes over in an elastic job."""
        return (
            {"first": self._first, "latest": [list(event) for event in self._latest]}
            if self._moves
            else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._first = int(state["first"])
        self._latest = [(str(tag), float(value), int(step)) for tag, value, step in state["latest"]]

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            with self._write_guard.to(Path(self._writer.log_dir)):
                self._writer.close()
            self._writer = None
