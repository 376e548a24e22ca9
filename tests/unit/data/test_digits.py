"""The handwritten digits: size, scale and split."""

from __future__ import annotations

import hashlib

import torch

from lockstep.data import sets
from lockstep.data.sets import digits


def test_sizes_classes_and_scale() -> None:
    train, test = digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.shape == test.shape == (1, 28, 28)
    assert train.classes == tuple("0123456789")
    assert train.images.min() == 0 and train.images.max() > 250
    inputs, _ = train.collated_batch(range(len(train)))
    assert abs(inputs.mean()) < 1e-3 and abs(inputs.std() - 1) < 1e-3


def test_the_split_is_complete_and_every_class_gives_its_share() -> None:
    from sklearn.datasets import load_digits

    train, test = digits()
    every = torch.bincount(torch.from_numpy(load_digits().target))
    tested = torch.bincount(test.labels)
    assert torch.equal(torch.bincount(train.labels) + tested, every)
    assert (tested - every * 360 / 1797).abs().max() < 1


def test_the_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.target)
    is_test = sets._test_mask(labels)
    for part, mask in zip(digits(), (~is_test, is_test), strict=True):
        assert torch.equal(part.images, sets._enlarge(images[mask].unsqueeze(1)))
        assert torch.equal(part.labels, labels[mask])


def test_the_digits_are_those_of_earlier_versions() -> None:
    """Whose fingerprints of runs and checkpoints stay comparable."""
    train, test = (
        hashlib.sha256(part.images.numpy().tobytes() + part.labels.numpy().tobytes())
        for part in digits()
    )
    assert train.hexdigest() == "6b109ea987a6e955f3f78bf4b833aa67e25d183e1ea4bd39d908cf2a315c2c99"
    assert test.hexdigest() == "b5f584ec28901a2e948e39de40175d6f25b074164ecd66b8ed07f1aa7ffc3df7"


def test_no_seed_goes_into_the_split() -> None:
    torch.manual_seed(1)
    first = digits()
    torch.manual_seed(2)
    second = digits()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
