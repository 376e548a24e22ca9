"""Synthetic images: the same for the same seed, and learnable."""

from __future__ import annotations

import pytest
import torch

from lockstep.data.sets import synthetic
from lockstep.errors import ConfigError


def test_the_default_sizes() -> None:
    train, test = synthetic()
    assert (len(train), len(test)) == (2048, 512)
    assert train.shape == test.shape == (1, 28, 28)
    assert len(train.classes) == 10


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 6), (2, 1, 3)])
def test_any_shape_and_number_of_classes(shape: tuple[int, int, int]) -> None:
    train, test = synthetic(shape, classes=3, train=10, test=4)
    assert train.shape == test.shape == shape
    assert torch.bincount(train.labels).sort().values.tolist() == [3, 3, 4]
    assert torch.bincount(test.labels, minlength=3).sort().values.tolist() == [1, 1, 2]


def test_the_seed_decides_everything() -> None:
    torch.manual_seed(1)
    first = synthetic(train=20, test=10, seed=3)
    torch.manual_seed(2)
    again = synthetic(train=20, test=10, seed=3)
    other = synthetic(train=20, test=10, seed=4)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        assert not torch.equal(a.images, c.images)


def test_the_test_images_are_others() -> None:
    train, test = synthetic(train=10, test=10)
    assert not torch.equal(train.images, test.images)


def test_the_patterns_distinguish_the_classes_also_in_the_test_images() -> None:
    train, test = synthetic(train=200, test=100)
    means = torch.stack(
        [train.images[train.labels == c].float().mean(0) for c in range(10)]
    ).flatten(1)
    nearest = torch.cdist(test.images.float().flatten(1), means).argmin(1)
    assert (nearest == test.labels).float().mean() > 0.95
    inputs, _ = train.collated_batch(range(len(train)))
    assert abs(inputs.mean()) < 0.2 and abs(inputs.std() - 1) < 0.2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"classes": 0}, "classes"),
        ({"train": 0}, "train"),
        ({"test": -1}, "test"),
        ({"shape": (1, 0, 2)}, "shape"),
    ],
)
def test_sizes_below_one_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        synthetic(**arguments)  # type: ignore[arg-type]
    assert caught.value.argument == named
