"""ResNet-18 for small images."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm, added to the input: (n, in, h, w) → (n, out, h/stride,
    w/stride).

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, kernel_size=3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, kernel_size=1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x`."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


def resnet18(classes: int = 10, shape: tuple[int, ...] = (1, 28, 28)) -> nn.Module:
    """Build ResNet-18 with a 3×3 first convolution of stride 1 and no max-pooling: (n, *shape) →
    (n, classes).

    The adaptation to small images follows "Dive into Deep Learning", section 13.6; its convolutions
    have biases.

    Args:
        classes: number of classes.
        shape: channels, height and width of an image.
    """
    widths = (64, 64, 128, 256, 512)
    blocks: list[nn.Module] = []
    for number, (width_in, width_out) in enumerate(pairwise(widths)):
        blocks += [
            Residual(width_in, width_out, stride=1 if number == 0 else 2),
            Residual(width_out, width_out),
        ]
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
