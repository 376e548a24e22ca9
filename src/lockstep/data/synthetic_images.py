"""Labelled random images that a model can learn, made on the spot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ..shards import mix
from .images import ImageSet

__all__ = ["synthetic"]

_PATTERNS, _TRAIN, _TEST = range(3)  # what a draw is for goes into its key, so that the draws are unrelated
# Half a pattern and half noise, each even over 0 to 255: variance 2 / 12 / 4 on the scale 0 to 1.
_MEAN, _STD = 0.5, 0.2


def synthetic(
    shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    train: int = 2048,
    test: int = 512,
    seed: int = 0,
) -> tuple[ImageSet, ImageSet]:
    """Images that are one half the pattern of their class and one half noise.

    The same arguments give the same bytes on every machine with the same version of torch. All classes are equally
    frequent, to one image.

    Args:
        shape: channels, height and width of an image.
        classes: how many classes, each with a random pattern of blocks.
        train: images to train on.
        test: images to test with; other noise, the same patterns.
        seed: what patterns, noise and order are drawn from.

    Raises:
        ConfigError: for a size below 1.
    """
    for argument, value in (("classes", classes), ("train", train), ("test", test)):
        if value < 1:
            raise ConfigError(argument, "a whole number of at least 1", value)
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError("shape", "channels, height and width, each at least 1", shape)
    patterns = _patterns(shape, classes, seed)
    return _draw(patterns, train, mix((seed, _TRAIN))), _draw(patterns, test, mix((seed, _TEST)))


def _patterns(shape: tuple[int, int, int], classes: int, seed: int) -> Tensor:
    channels, height, width = shape
    # Blocks of about four pixels: single random pixels would not outlive a pooling layer.
    blocks = (classes, channels, max(1, height // 4), max(1, width // 4))
    coarse = torch.randint(0, 128, blocks, dtype=torch.uint8, generator=_generator(mix((seed, _PATTERNS))))
    return F.interpolate(coarse, size=(height, width), mode="nearest")


def _draw(patterns: Tensor, count: int, key: int) -> ImageSet:
    generator = _generator(key)
    classes, channels = patterns.shape[:2]
    labels = torch.randperm(count, generator=generator) % classes
    # Whole numbers only: their sums depend on no machine's rounding.
    noise = torch.randint(0, 128, (count, *patterns.shape[1:]), dtype=torch.uint8, generator=generator)
    names = [f"class {n}" for n in range(classes)]
    return ImageSet(noise.add_(patterns[labels]), labels, names, "synthetic", [_MEAN] * channels, [_STD] * channels)


def _generator(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key)
