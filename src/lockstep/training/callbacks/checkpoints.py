"""A callback that saves checkpoints at intervals of epochs or steps."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ... import arguments
from ...errors import ConfigError
from .base import Callback, Row, TrainingContext
from .columns import check_column, is_higher_better

if TYPE_CHECKING:
    from ..step.step_result import StepResult

__all__ = ["Checkpoints", "parse_interval"]


def parse_interval(text: str, argument: str = "checkpoint_every") -> tuple[int, str]:
    """Parse an interval: "2epochs" → (2, "epochs"), "500steps" → (500, "steps"); "3" means epochs,
    "0" never.

    Args:
        text: the interval.
        argument: its name in errors.

    Raises:
        ConfigError: for anything else.
    """
    match = (
        re.fullmatch(r"(\d+)\s*(epochs?|steps?)?", text.strip()) if isinstance(text, str) else None
    )
    if match is None:
        hint = ""
        if isinstance(text, int) and not isinstance(text, bool):
            hint = f'A text says what is counted: "{text}epochs" or "{text}steps".'
        expected = "a number of epochs or steps, e.g. 1epoch, 500steps, or 0 for never"
        raise ConfigError(argument, expected, text, hint)
    return int(match[1]), "steps" if (match[2] or "").startswith("step") else "epochs"


class Checkpoints(Callback):
    """Saves a checkpoint at each interval of epochs or steps, and at the end, in the trainer's
    `run_dir`.

    It is called after all other callbacks, so that checkpoints include their changes.

    Args:
        every: "1epoch", "500steps", …; "0" saves only when the run is interrupted.
        best: a column of the history, e.g. "val_accuracy"; the checkpoint of the row with the best
            value is saved and kept besides the newest ones, and the link ``checkpoints/best`` leads
            to it. None keeps the newest only.
        higher_is_better: whether higher values of `best` are better; when None, by the name, see
            `is_higher_better`.

    Raises:
        ConfigError: for an interval of another form, or a name that does not say which values are
            better; when `fit` starts, for a column that the history will not have, or without a run
            directory.
    """

    every_rank = True

    def __init__(
        self, every: str = "1epoch", best: str | None = None, higher_is_better: bool | None = None
    ) -> None:
        self._count, self._unit = parse_interval(every, "every")
        if best is not None:
            arguments.text("best", best, 'the name of a column of the history, such as "val_loss"')
        arguments.flag(
            "higher_is_better", higher_is_better, none="what the name of the column says"
        )
        self._best = best
        self._higher = best is not None and is_higher_better(best, higher_is_better)
        self.needs_columns = () if best is None else (best,)
        self.needs_run_dir = bool(self._count) or best is not None

    @property
    def saves_at_end(self) -> bool:
        """Whether the end of the run is saved as well."""
        return self._count > 0

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """Save at each interval of steps."""
        if self._count and self._unit == "steps" and trainer.step.steps_done % self._count == 0:
            trainer.save()

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Save the best checkpoint at a validation within an epoch."""
        if not trainer.epoch_ended and self._is_best(trainer.history):
            trainer.save(best=True)

    def on_train_epoch_end(self, trainer: TrainingContext, row: Row) -> None:
        """Save at each interval of epochs, and after the best epoch so far."""
        best = self._is_best(trainer.history)
        if best or (
            self._count and self._unit == "epochs" and (trainer.epoch + 1) % self._count == 0
        ):
            trainer.save(best=best)

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Save if the run ended without an error and this step has no checkpoint yet."""
        if (
            self._count
            and error is None
            and trainer.newest_checkpoint_step != trainer.step.steps_done
        ):
            trainer.save()

    def _is_best(self, history: list[Row]) -> bool:
        """Return whether the last row is better than all earlier ones; NaN is worse than any
        value.
        """
        if self._best is None:
            return False
        check_column("Checkpoints", self._best, history[-1])
        *earlier, last = [row.get(self._best, math.nan) for row in history]
        known = [value for value in earlier if not math.isnan(value)]
        if math.isnan(last) or not known:
            return not math.isnan(last)
        return last > max(known) if self._higher else last < min(known)
