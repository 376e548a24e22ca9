"""What happens beside the training: each callback is one file, and a training run without any is whole."""

from __future__ import annotations

from .base import Callback
from .checkpoints import Checkpoints
from .csv_log import CSVLog
from .curve import Curve
from .early_stopping import EarlyStopping
from .progress import Progress
from .tensorboard import TensorBoard

__all__ = ["CSVLog", "Callback", "Checkpoints", "Curve", "EarlyStopping", "Progress", "TensorBoard", "defaults"]


def defaults(with_folder: bool) -> list[Callback]:
    """A progress display, and for a run with a folder its table, its picture and a checkpoint after each epoch."""
    return [Progress(), *([CSVLog(), Curve(), Checkpoints()] if with_folder else [])]
