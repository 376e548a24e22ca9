"""A callback that adds the learning rate of each group of parameters to the history."""

from __future__ import annotations

from collections.abc import Sequence

from ... import arguments
from ...errors import ConfigError, counted
from .base import Callback, Row, TrainingContext


class LearningRates(Callback):
    """Adds the columns `lr_NAME` for each group of parameters, and with `momentum` those of
    `momentum_NAME`.

    Pass it before callbacks that show or write rows. The column `lr`, which each row has, is that
    of the first group.

    Args:
        names: a name for each group of the optimizer.
        momentum: whether to add `momentum` or, of optimizers like Adam, the first of `betas`.

    Raises:
        ConfigError: when `fit` starts, for another number of groups, or for an optimizer without
            momentum.
    """

    every_rank = True

    def __init__(self, names: Sequence[str], momentum: bool = False) -> None:
        self._names = arguments.texts(
            "names", names, "a list of names, one for each group of parameters"
        )
        self._momentum = arguments.flag("momentum", momentum)
        kinds = ["lr", *(["momentum"] if momentum else [])]
        self.adds_columns = tuple(f"{kind}_{name}" for kind in kinds for name in self._names)

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Check that there is a name for each group."""
        groups = trainer.optimizer.param_groups
        if len(groups) != len(self._names) or len(set(self._names)) != len(self._names):
            raise ConfigError(
                "names",
                f"{counted(len(groups), 'name')}, one for each group of parameters",
                self._names,
            )
        if self._momentum and not all("momentum" in group or "betas" in group for group in groups):
            raise ConfigError(
                "momentum", f"False for {type(trainer.optimizer).__name__}, which has none", True
            )

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Add the columns."""
        for name, rate in zip(self._names, trainer.step.learning_rates, strict=True):
            row[f"lr_{name}"] = rate
        for name, group in (
            zip(self._names, trainer.optimizer.param_groups, strict=True) if self._momentum else ()
        ):
            row[f"momentum_{name}"] = float(
                group["momentum"] if "momentum" in group else group["betas"][0]
            )
