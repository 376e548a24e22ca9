"""The handwritten digits: size, scale and split."""

from __future__ import annotations

import sys

import pytest
import torch

from lockstep.data.digit_images import digits
from lockstep.errors import ConfigError


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


def test_no_seed_goes_into_the_split() -> None:
    torch.manual_seed(1)
    first = digits()
    torch.manual_seed(2)
    second = digits()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"Install lockstep-train\[demo\]"):
        digits()
