"""Callbacks of a training run, one file each; a run needs none."""

from __future__ import annotations

from .averaged_weights import AveragedWeights
from .base import Callback, TrainingContext
from .checkpoints import Checkpoints
from .csv_log import CSVLog
from .curve import Curve, curve_by_default
from .early_stopping import EarlyStopping
from .gradient_noise import GradientNoise
from .language import TextSamples, TokenColumns
from .learning_rates import LearningRates
from .pretrained import Pretrained
from .profile import Profile
from .progress import Progress
from .tensorboard import TensorBoard
from .trackers import MLflow, WandB

__all__ = [
    "AveragedWeights",
    "CSVLog",
    "Callback",
    "Checkpoints",
    "Curve",
    "EarlyStopping",
    "GradientNoise",
    "LearningRates",
    "MLflow",
    "Pretrained",
    "Profile",
    "Progress",
    "TensorBoard",
    "TextSamples",
    "TokenColumns",
    "TrainingContext",
    "WandB",
    "defaults",
]


def defaults(with_folder: bool, pretrained: bool = False) -> list[Callback]:
    """Return a progress display and, for a run with a run directory, a CSV log, a plot and
    checkpoints by epoch.

    Args:
        with_folder: whether the run has a run directory.
        pretrained: whether to save the model with its own ``save_pretrained`` as well, at the end.
    """
    if not with_folder:
        return [Progress()]
    own = [Pretrained()] if pretrained else []
    return [Progress(), CSVLog(), curve_by_default(), Checkpoints(), *own]
