"""scikit-learn's handwritten digits: real data that need no network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from .images import ImageSet

__all__ = ["digits"]

_TEST = 360
_SIDE = 28
# Computed over all pixels of the training part that digits() makes.
_MEAN, _STD = (0.3049,), (0.3242,)


def digits() -> tuple[ImageSet, ImageSet]:
    """1797 handwritten digits, 8x8 pixels enlarged to 28x28, as 1437 images to train on and 360 to test with.

    The split is the same for everyone: no seed goes into it. Both parts hold the ten classes in the same shares.

    Source: "Optical Recognition of Handwritten Digits", Alpaydin and Kaynak, UCI Machine Learning Repository, 1998;
    the copy that comes with scikit-learn.

    Raises:
        ConfigError: when scikit-learn is not installed.
    """
    images, labels = _load()
    large = _enlarge(images)
    in_test = _test_part(labels)
    train, test = (
        ImageSet(large[part], labels[part], [str(n) for n in range(10)], "digits", _MEAN, _STD)
        for part in (~in_test, in_test)
    )
    return train, test


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "data",
            "scikit-learn to be installed, which holds the digits",
            found="no such package",
            hint="Install lockstep-train[demo].",
        ) from None
    found = load_digits()
    return torch.from_numpy(found.images).to(torch.float64), torch.from_numpy(found.target).to(torch.int64)


def _enlarge(images: Tensor) -> Tensor:
    """From (n, 8, 8) on the scale 0 to 16 to uint8 of shape (n, 1, 28, 28) on the scale 0 to 255."""
    large = F.interpolate(images.unsqueeze(1) * (255 / 16), size=(_SIDE, _SIDE), mode="bilinear")
    # Two thousand exact values end in .5; the small amount sends them all the same way, on every machine.
    return (large + 0.5 + 1e-6).floor().to(torch.uint8)


def _test_part(labels: Tensor) -> Tensor:
    """Which samples are for testing: evenly spaced ones in the order of the classes, so every class gives its share."""
    by_class = torch.argsort(labels, stable=True)
    places = (torch.arange(_TEST) * 2 + 1) * len(labels) // (2 * _TEST)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[by_class[places]] = True
    return chosen
