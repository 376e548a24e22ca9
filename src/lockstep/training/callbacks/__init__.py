"""Callbacks of a training run, one file each; a run needs none."""

from __future__ import annotations

from .base import Callback, TrainingContext
from .checkpoints import Checkpoints
from .csv_log import CSVLog
from .curve import Curve
from .early_stopping import EarlyStopping
from .language import TextSamples, TokenColumns
from .progress import Progress
from .tensorboard import TensorBoard

__all__ = [
    "CSVLog",
    "Callback",
    "Checkpoints",
    "Curve",
    "EarlyStopping",
    "Progress",
    "TensorBoard",
    "TextSamples",
    "TokenColumns",
    "TrainingContext",
    "defaults",
]


def defaults(with_folder: bool) -> list[Callback]:
    """Return a progress display and, for a run with a run directory, a CSV log, a plot and checkpoints by epoch."""
    return [Progress(), *([CSVLog(), Curve(), Checkpoints()] if with_folder else [])]
