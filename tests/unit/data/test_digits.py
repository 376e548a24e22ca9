"""The handwritten digits: size, scale and split."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lockstep.data import sets
from lockstep.data.sets import digits
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


def test_the_digits_are_those_that_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = digits()
    monkeypatch.setattr(sets, "_DIGITS_FILE", "elsewhere.csv.gz")
    for ours, theirs in zip((train, test), digits(), strict=True):
        assert torch.equal(ours.images, theirs.images) and torch.equal(ours.labels, theirs.labels)


def test_no_seed_goes_into_the_split() -> None:
    torch.manual_seed(1)
    first = digits()
    torch.manual_seed(2)
    second = digits()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def test_without_scikit_learn_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Install lockstep-train\[demo\]"):
        digits()
