"""The LeNet of the multi-GPU tutorials."""

from __future__ import annotations

from torch import nn

from ..errors import ConfigError


def lenet(classes: int = 10, shape: tuple[int, ...] = (1, 28, 28)) -> nn.Module:
    """Build two convolutions (20 of 3×3, 50 of 5×5), ReLU, average pooling, 128 units: (n, *shape)
    → (n, classes).

    The widths are those of "Dive into Deep Learning", section 13.5, after LeCun et al.,
    "Gradient-based learning applied to document recognition", 1998. Weights have PyTorch's default
    initialisation: with the tutorial's (normal, standard deviation 0.01) the model learns nothing
    in the first epochs.

    Args:
        classes: number of classes.
        shape: channels, height and width of an image.

    Raises:
        ConfigError: if images are too small for the two convolutions and poolings (less than
            16×16).
    """
    channels, height, width = shape
    pooled = [((side - 2) // 2 - 4) // 2 for side in (height, width)]
    if min(pooled) < 1:
        raise ConfigError("shape", "images of at least 16×16 for lenet", found=f"{height}×{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * pooled[0] * pooled[1], 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
