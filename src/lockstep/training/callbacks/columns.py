"""Columns of the history that callbacks read: which there are, and which of two values is the
better one.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ConfigError, unknown_name
from ..run.epoch_totals import COLUMNS
from .base import Callback

_LOWER = ("loss", "error")
_HIGHER = ("accuracy", "acc", "f1", "auc")


def is_higher_better(column: str, chosen: bool | None) -> bool:
    """Return whether higher values of a column are better.

    Args:
        column: its name. Lower values are better if it ends in "loss" or "error", higher ones if it
            ends in "accuracy", "acc", "f1" or "auc".
        chosen: what the user says, which counts more than the name; None if nothing.

    Raises:
        ConfigError: if `chosen` is None, for any other name.
    """
    if chosen is not None:
        return chosen
    if column.endswith(_LOWER + _HIGHER):
        return column.endswith(_HIGHER)
    description = (
        f"neither, and the name of the column {column} does not say which values are better"
    )
    hint = "Pass higher_is_better=, or correct the name if it is misspelled."
    raise ConfigError("higher_is_better", "True or False", found=description, hint=hint)


class RowColumns:
    """The columns that rows of the history will have, as far as they are known before the first
    row.

    Args:
        metrics: the names of results of a validation; None for a run without validation.
        several: the names of those metrics which may give several results, each in a column
            NAME_KEY.
        callbacks: the callbacks of the run, on all ranks.
    """

    def __init__(
        self, metrics: Iterable[str] | None, several: Iterable[str], callbacks: Iterable[Callback]
    ) -> None:
        self.names = [*COLUMNS, *(f"val_{name}" for name in metrics or ())]
        self.names += [
            name
            for callback in callbacks
            for name in callback.adds_columns
            if name not in self.names
        ]
        self._validated = metrics is not None
        self._several = tuple(f"val_{name}_" for name in several) if self._validated else ()

    def check(self, callback: str, column: str) -> None:
        """Check that the rows may have the `column` that a callback of the name `callback` reads.

        Raises:
            ConfigError: if they will not.
        """
        if not (self._several and column.startswith(self._several)):
            check_column(callback, column, self.names, self._validated)


def check_column(
    callback: str, column: str, columns: Iterable[str], validated: bool = True
) -> None:
    """Check that `columns` has the one that a callback of the name `callback` reads.

    Args:
        callback: the name of the callback.
        column: the column that it reads.
        columns: the columns of a row.
        validated: whether there is validation data; if not, the error says how to give it.

    Raises:
        ConfigError: if it has not.
    """
    names = list(columns)
    if column in names:
        return
    error = unknown_name(
        f"callbacks.{callback}", column, names, expected=f"one of {', '.join(names)}"
    )
    hint = error.hint or "A callback that adds a column to the rows names it in adds_columns."
    if not validated:
        hint = "Pass validate= to fit() for those of a validation."
    raise ConfigError(error.argument, error.expected, column, hint)
