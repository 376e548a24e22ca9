"""Writes the epochs' numbers to `metrics.csv`."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from ... import atomic
from .base import Callback, Row
from .writing import Writing

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["CSVLog"]


class CSVLog(Callback):
    """One line an epoch in `metrics.csv` of the run folder.

    The file is written anew each time, whole or not at all, so that a resumed run leaves no line twice. Where it cannot
    be written, the log says so once and the training goes on.
    """

    def __init__(self) -> None:
        self._writing = Writing()

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """Write all epochs so far."""
        if trainer.out is not None:
            path = trainer.out / "metrics.csv"
            with self._writing.to(path):
                atomic.write_text(path, as_csv(trainer.history))


def as_csv(history: list[Row]) -> str:
    """The rows as CSV with a header; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{value:.8g}" for name, value in row.items()} for row in history)
    return text.getvalue()
