"""A multi-layer perceptron."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn


def mlp(
    classes: int = 10, shape: tuple[int, ...] = (1, 28, 28), hidden: tuple[int, ...] = (256, 128)
) -> nn.Module:
    """Build fully connected layers with ReLU between them: (n, *shape) → (n, classes).

    Args:
        classes: number of classes.
        shape: channels, height and width of an image.
        hidden: units of each layer but the last.
    """
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
