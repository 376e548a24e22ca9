"""Options have types and limits, from flags and from files."""

from __future__ import annotations

import datetime
from dataclasses import fields
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.training.formats import PRECISIONS
from lockstep.training.options import TrainOptions, from_mapping, parse_text
from lockstep.training.precision import Precision

BY_NAME = {option.name: option for option in fields(TrainOptions)}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", "1e-3", 0.001),  # a text to YAML 1.1
        ("lr", 1, 1.0),
        ("lr", "0.1", 0.1),
        ("epochs", 3, 3),
        ("epochs", "3", 3),
        ("warmup-epochs", 2, 2.0),
        ("global-batch", 64, 64),
        ("workers", 2, "2"),
        ("workers", "auto", "auto"),
        ("checkpoint-every", 2, "2"),
        ("compile", True, True),
        ("quiet", False, False),
        ("clip_norm", None, None),
        ("data-dir", None, None),
        ("out", "somewhere", "somewhere"),
        ("resume", "latest", "latest"),
    ],
)
def test_values_of_files(name: str, value: Any, expected: Any) -> None:
    (found,) = from_mapping({name: value}, "a.yaml").items()
    assert found == (name.replace("-", "_"), expected)
    assert type(found[1]) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("epochs", "three", "a.yaml: epochs: expected a whole number, got 'three'"),
        ("epochs", 1.5, "a.yaml: epochs: expected a whole number, got 1.5"),
        ("epochs", True, "a.yaml: epochs: expected a whole number, got True"),
        ("epochs", None, "a.yaml: epochs: expected a whole number, got None"),
        ("global-batch", [1], r"a.yaml: global-batch: expected a whole number, got \[1\]"),
        ("lr", "fast", "a.yaml: lr: expected a number, got 'fast'"),
        ("lr", None, "a.yaml: lr: expected a number, got None"),
        ("lr", False, "a.yaml: lr: expected a number, got False"),
        ("compile", "maybe", "a.yaml: compile: expected true or false, got 'maybe'"),
        ("compile", 1, "a.yaml: compile: expected true or false, got 1"),
        ("compile", None, "a.yaml: compile: expected true or false, got None"),
        ("model", None, "a.yaml: model: expected a text, got None"),
        ("out", datetime.date(2026, 1, 2), "a.yaml: out: expected a text, got .*Put it in quotes."),
        ("out", 1.10, "a.yaml: out: expected a text, got 1.1. Put it in quotes."),
        ("out", "", "a.yaml: out: expected a text, got ''"),
        ("out", "a\0b", r"a.yaml: out: expected a text, got 'a\\x00b'"),
        ("epoch", 3, "a.yaml: expected options of a run.*got 'epoch'. Did you mean epochs"),
        ("global_bach", 3, "Did you mean global_batch"),
    ],
)
def test_bad_values_of_files_name_file_and_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_mapping({key: value}, "a.yaml")


def test_a_key_comes_once() -> None:
    with pytest.raises(ConfigError, match=r"a.yaml: global_batch: expected each option once"):
        from_mapping({"global-batch": 3, "global_batch": 4}, "a.yaml")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("epochs", "", "epochs: expected a whole number"),
        ("lr", "1,5", "lr: expected a number, got '1,5'"),
        ("out", "", "out: expected a text, got ''"),
        ("out", "  ", "out: expected a text"),
    ],
)
def test_bad_texts_of_flags(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_text(BY_NAME[name], text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("global_batch", "accumulate", "epochs", "keep", "base_batch", "workers")),
        *((name, 0.0) for name in ("lr", "clip_norm")),
        *((name, -1.0) for name in ("momentum", "weight_decay", "warmup_epochs")),
        *((name, float("inf")) for name in ("lr", "momentum", "weight_decay", "clip_norm")),
        *((name, float("nan")) for name in ("lr", "momentum", "weight_decay", "clip_norm", "warmup_epochs")),
        ("accumulate", 257),  # more than there are samples in a step
        ("loader_workers", -1),
        ("epochs", True),
    ],
)
def test_limits(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        TrainOptions(**{name: value}).check()


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds(seed: int) -> None:
    TrainOptions(seed=seed).check()


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed: expected a whole number from 0 to {2**63 - 1}, got {seed}"):
        TrainOptions(seed=seed).check()


@pytest.mark.parametrize(
    ("given", "lr"),
    [({}, 0.05), ({"optimizer": "adam"}, 0.001), ({"optimizer": "adamw"}, 0.001), ({"optimizer": "adam", "lr": 1}, 1)],
)
def test_the_learning_rate_suits_the_optimizer(given: dict[str, Any], lr: float) -> None:
    assert TrainOptions(**given).lr == lr


def test_what_is_written_down_can_be_read_and_says_no_place() -> None:
    options = TrainOptions(out="somewhere", resume="somewhere/else", lr=0.3, workers="2", compile=True)
    written = options.as_dict()
    assert set(written) == set(BY_NAME) - {"out", "resume", "allow_different"}
    assert TrainOptions(**from_mapping(written, "config.yaml")) == TrainOptions(lr=0.3, workers="2", compile=True)


def test_the_formats_offered_are_those_there_are() -> None:
    assert [Precision(name, torch.device("cpu")).name for name in PRECISIONS] == list(PRECISIONS)
