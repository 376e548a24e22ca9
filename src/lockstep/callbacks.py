"""The callbacks of a training run, under the name by which users import them; they are in
`lockstep.training`.
"""

from __future__ import annotations

from .training.callbacks import (
    AveragedWeights,
    Callback,
    Checkpoints,
    CSVLog,
    Curve,
    EarlyStopping,
    GradientNoise,
    LearningRates,
    MLflow,
    Pretrained,
    Profile,
    Progress,
    TensorBoard,
    TextSamples,
    TokenColumns,
    TrainingContext,
    WandB,
    defaults,
)

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
