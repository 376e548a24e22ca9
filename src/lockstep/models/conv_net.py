"""A convolutional network with two wide convolutions and dropout."""

from __future__ import annotations

from torch import nn

from ..errors import ConfigError


def convnet(
    classes: int = 10, shape: tuple[int, ...] = (1, 28, 28), dropout: float = 0.5
) -> nn.Module:
    """Build convolutions of 64 and 128 channels (3×3), max-pooling, 1,024 units, dropout: (n,
    *shape) → (n, classes).

    Args:
        classes: number of classes.
        shape: channels, height and width of an image.
        dropout: probability that a value is set to zero in training.

    Raises:
        ConfigError: if images are smaller than 2×2.
    """
    channels, height, width = shape
    if min(height, width) < 2:
        raise ConfigError("shape", "images of at least 2×2 for convnet", found=f"{height}×{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * (height // 2) * (width // 2), 1024),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(1024, classes),
    )
