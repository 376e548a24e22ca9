"""What all ports have in common: data, model and sizes."""

import torch
from torch.utils.data import Dataset

import lockstep

BATCH = 64
EPOCHS = 2


def data() -> tuple[Dataset, Dataset]:
    """Return the training and the test set: images and labels of handwritten digits."""
    return lockstep.data.digits()


def make_model() -> torch.nn.Module:
    """Return the model to train."""
    return lockstep.models.mlp()
