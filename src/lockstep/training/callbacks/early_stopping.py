"""Ends a run whose metric no longer gets better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .base import Callback, Row

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Stops after `patience` epochs in a row without a better value of `metric`.

    Args:
        metric: a column of the history, e.g. "test_loss".
        patience: epochs to wait for a better value.
        higher_is_better: for metrics such as accuracy.
        min_delta: by how much a value must differ from the best to be better. A value that is NaN is worse than any.

    Raises:
        ConfigError: for a patience below 1 or a negative min_delta; at the first epoch, for a metric that the history
            does not have.
    """

    every_rank = True

    def __init__(
        self, metric: str = "test_loss", patience: int = 3, higher_is_better: bool = False, min_delta: float = 0.0
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError("patience", "a whole number of at least 1", patience)
        if not min_delta >= 0:
            raise ConfigError("min_delta", "a number of at least 0", min_delta)
        self.metric, self.patience = metric, patience
        self._sign, self._min_delta = (1.0 if higher_is_better else -1.0), min_delta

    def on_start(self, trainer: Trainer) -> None:
        """A run that goes on from where this has stopped it stays stopped; with more patience it does not."""
        if trainer.history and self.metric in trainer.history[-1]:
            self._look(trainer)

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """Look at the history, which every worker has alike and which survives a resumed run."""
        if self.metric not in row:
            raise ConfigError("metric", f"one of {', '.join(row)}", self.metric, "Pass validate= for test metrics.")
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        if self.waited(trainer.history) >= self.patience:
            trainer.stop(f"{self.metric} has not improved for {self.patience} epochs")

    def waited(self, history: list[Row]) -> int:
        """Epochs since the best one, at the end of `history`."""
        scores = [self._sign * past.get(self.metric, math.nan) for past in history]
        values = [-math.inf if math.isnan(score) else score for score in scores]
        best = 0
        for place, value in enumerate(values):
            if value > values[best] + self._min_delta:
                best = place
        return len(values) - 1 - best
