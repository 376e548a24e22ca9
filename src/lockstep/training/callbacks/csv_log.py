"""A callback that writes the history of a run to `metrics.csv`."""

from __future__ import annotations

import csv
import io

from ...system import atomic_files
from .base import Callback, Row, TrainingContext
from .writing import WriteGuard


class CSVLog(Callback):
    """Writes one line for each row of the history to `metrics.csv` in the run directory.

    The whole file is replaced atomically each time, so that a resumed run leaves no duplicate line.
    If it cannot be written, a warning is logged once and the training continues.
    """

    needs_run_dir = True

    def __init__(self) -> None:
        self._write_guard = WriteGuard()

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Write all rows so far."""
        if trainer.run_dir is not None:
            path = trainer.run_dir / "metrics.csv"
            with self._write_guard.to(path):
                atomic_files.write_text(path, as_csv(trainer.history))


def as_csv(history: list[Row]) -> str:
    """Format the rows as CSV with a header; columns are in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{value:.8g}" for name, value in row.items()} for row in history)
    return text.getvalue()
