"""A callback that ends a run whose metric no longer improves."""

from __future__ import annotations

import math

from ... import arguments
from .base import Callback, Row, TrainingContext
from .columns import check_column, is_higher_better


class EarlyStopping(Callback):
    """Stops a run after `patience` consecutive rows of the history without an improvement of
    `metric`.

    There is a row for each epoch, with its validation if there is one, and for each validation
    within an epoch, see `fit(validate_every=)`.

    Args:
        metric: a column of the history, e.g. "val_loss".
        patience: number of rows to wait for an improvement.
        higher_is_better: whether higher values are better; when None, by the name, see
            `is_higher_better`.
        min_delta: minimum difference from the best value that counts as an improvement. NaN is
            worse than any value.

    Raises:
        ConfigError: for a patience below 1, a negative min_delta, or a name that does not say which
            values are better; when `fit` starts, for a metric that the history will not have.
    """

    every_rank = True

    def __init__(
        self,
        metric: str = "val_loss",
        patience: int = 3,
        higher_is_better: bool | None = None,
        min_delta: float = 0.0,
    ) -> None:
        self.metric = arguments.text(
            "metric", metric, 'the name of a column of the history, such as "val_loss"'
        )
        self.patience = arguments.whole("patience", patience, least=1)
        arguments.flag(
            "higher_is_better", higher_is_better, none="what the name of the column says"
        )
        self._min_delta = arguments.number("min_delta", min_delta, least=0)
        self.needs_columns = (metric,)
        self._sign = 1.0 if is_higher_better(metric, higher_is_better) else -1.0

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Stop again if the run resumes from a row at which it was stopped; with more patience it
        continues.
        """
        if trainer.history and self.metric in trainer.history[-1]:
            self._inspect(trainer)

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Stop if the history, which is equal on all workers and part of checkpoints, has no
        improvement.
        """
        check_column("EarlyStopping", self.metric, row)
        self._inspect(trainer)

    def _inspect(self, trainer: TrainingContext) -> None:
        rows = self.rows_since_best(trainer.history)
        if rows >= self.patience:
            name = self.metric
            least = self._min_delta
            better = f"{name} that is better by more than {least:g}" if least else f"better {name}"
            trainer.stop(f"{rows} {_unit(name, trainer.history, rows)} without a {better}")

    def rows_since_best(self, history: list[Row]) -> int:
        """Return the number of rows in `history` after the best one.

        Args:
            history: rows as of `Trainer.history`.
        """
        scores = [self._sign * row.get(self.metric, math.nan) for row in history]
        values = [-math.inf if math.isnan(score) else score for score in scores]
        best = 0
        for number, value in enumerate(values):
            if value > values[best] + self._min_delta:
                best = number
        return len(values) - 1 - best


def _unit(metric: str, history: list[Row], rows: int) -> str:
    """Return what the last `rows` of `history` are: validations, or for a metric of the training
    epochs or rows.
    """
    if metric.startswith("val_"):
        return "validation" + "s"[: rows != 1]
    of_epochs = len({row.get("epoch") for row in history[-rows - 1 :]}) == rows + 1
    return (
        ("epoch" if of_epochs else "row")
        + "s"[: rows != 1]
        + ("" if of_epochs else " of the history")
    )
