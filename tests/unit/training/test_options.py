"""Options have types and limits, from flags and from files."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.option_table import options_of, values_of
from lockstep.training.formats import PRECISIONS
from lockstep.training.options import TrainOptions, check_names, parse_param_groups
from lockstep.training.step.precision import Precision


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", "1e-3", 0.001),  # a text to YAML 1.1
        ("lr", 1, 1.0),
        ("lr", "0.1", 0.1),
        ("epochs", 3, 3),
        ("epochs", "3", 3),
        ("warmup_epochs", 2, 2.0),
        ("global_batch_size", 64, 64),
        ("workers", 2, "2"),
        ("workers", "auto", "auto"),
        ("checkpoint_every", "2epochs", "2epochs"),
        ("compile", True, True),
        ("quiet", False, False),
        ("max_grad_norm", None, None),
        ("data_dir", None, None),
        ("run_dir", "somewhere", "somewhere"),
        ("resume", "latest", "latest"),
    ],
)
def test_values_of_files(name: str, value: Any, expected: Any) -> None:
    (found,) = values_of(TrainOptions, {name: value}).items()
    assert found == (name, expected)
    assert type(found[1]) is type(expected)


def test_a_null_in_a_file_is_an_option_that_is_not_given() -> None:
    assert TrainOptions.parse({"lr": None, "epochs": None}) == TrainOptions()


def test_a_mode_of_the_compiler_needs_the_compiler() -> None:
    with pytest.raises(
        ConfigError, match="compile_mode: expected default without compile, got 'reduce-overhead'"
    ):
        TrainOptions(compile_mode="reduce-overhead").check()
    TrainOptions(compile=True, compile_mode="reduce-overhead").check()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("epochs", "three", "epochs: expected a whole number of at least 1, got 'three'"),
        ("epochs", 1.5, "epochs: expected a whole number of at least 1, got 1.5"),
        ("epochs", True, "epochs: expected a whole number of at least 1, got True"),
        (
            "global_batch_size",
            [1],
            r"global_batch_size: expected a whole number of at least 1, got \[1\]",
        ),
        ("lr", "fast", "lr: expected a finite number above 0, got 'fast'"),
        ("lr", False, "lr: expected a finite number above 0, got False"),
        ("compile", "maybe", "compile: expected true or false, got 'maybe'"),
        ("compile", 1, "compile: expected true or false, got 1"),
        ("compile", None, "compile: expected true or false, got None"),
        ("model", None, "model: expected a text, got None"),
        ("model", 1.5, "model: expected a text, got 1.5"),
        ("run_dir", datetime.date(2026, 1, 2), "run_dir: expected a text, got .*Put it in quotes."),
        ("run_dir", 1.10, "run_dir: expected a text, got 1.1. Put it in quotes."),
        ("run_dir", "", "run_dir: expected a text, got ''"),
        ("run_dir", "  ", "run_dir: expected a text"),
        ("run_dir", "a\0b", r"run_dir: expected a text, got 'a\\x00b'"),
        ("epochs", "", "epochs: expected a whole number"),
        ("lr", "1,5", "lr: expected a finite number above 0, got '1,5'"),
        ("workers", 1.5, "workers: expected a whole number of at least 1 or auto, got 1.5"),
        ("strategy", "ddp", "strategy: expected distributed, sharded or replicas, got 'ddp'"),
    ],
)
def test_bad_values_are_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        values_of(TrainOptions, {name: value})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("epoch", "a.yaml: expected options of a run.*got 'epoch'. Did you mean epochs"),
        ("global_bach", "Did you mean global_batch_size"),
    ],
)
def test_unknown_keys_name_the_file(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_names({key: 3}, "a.yaml")


def test_a_key_comes_once() -> None:
    with pytest.raises(ConfigError, match=r"a.yaml: global_batch_size: expected each option once"):
        check_names({"global-batch-size": 3, "global_batch_size": 4}, "a.yaml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, 0)
            for name in (
                "global_batch_size",
                "gradient_accumulation_steps",
                "epochs",
                "keep_checkpoints",
                "base_batch_size",
                "workers",
            )
        ),
        *((name, 0.0) for name in ("lr", "max_grad_norm")),
        *((name, -1.0) for name in ("momentum", "weight_decay", "warmup_epochs")),
        *((name, float("inf")) for name in ("lr", "momentum", "weight_decay", "max_grad_norm")),
        *(
            (name, float("nan"))
            for name in ("lr", "momentum", "weight_decay", "max_grad_norm", "warmup_epochs")
        ),
        ("gradient_accumulation_steps", 257),  # more than there are samples in a step
        *((name, value) for name in ("beta1", "beta2") for value in (-0.1, 1.0, float("nan"))),
        *(("param_groups", text) for text in ("lr=0.1", "fc*", "fc*:lr", "fc*:lr=x", "fc*:")),
        ("loader_workers", -1),
        ("epochs", True),
    ],
)
def test_limits(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        TrainOptions.parse({name: value})


def test_small_data_has_defaults_of_its_own() -> None:
    digits, images = TrainOptions(), TrainOptions(data="fashion-mnist")
    assert (digits.global_batch_size, digits.epochs) == (64, 15)
    assert (images.global_batch_size, images.epochs) == (256, 10)
    assert TrainOptions(global_batch_size=100, epochs=2).as_dict()["global_batch_size"] == 100


def test_what_belongs_to_one_call_is_not_kept_for_the_next() -> None:
    assert {"quiet", "resume", "run_dir"}.isdisjoint(
        TrainOptions(quiet=True, run_dir="a").as_dict()
    )


def test_parameter_groups_are_parsed() -> None:
    assert parse_param_groups(" *.bias, bn*:weight_decay=0 ; fc*:lr=1e-2,momentum=0.8;") == [
        (["*.bias", "bn*"], {"weight_decay": 0.0}),
        (["fc*"], {"lr": 0.01, "momentum": 0.8}),
    ]
    assert parse_param_groups("") == []


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds(seed: int) -> None:
    TrainOptions.parse({"seed": seed})


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(
        ConfigError, match=f"seed: expected a whole number from 0 to {2**63 - 1}, got {seed}"
    ):
        TrainOptions.parse({"seed": seed})


@pytest.mark.parametrize(
    ("given", "lr"),
    [
        ({}, 0.05),
        ({"optimizer": "adam"}, 0.001),
        ({"optimizer": "adamw"}, 0.001),
        ({"optimizer": "adam", "lr": 1}, 1),
    ],
)
def test_the_learning_rate_suits_the_optimizer(given: dict[str, Any], lr: float) -> None:
    assert TrainOptions(**given).lr == lr


def test_written_options_can_be_read_and_name_no_folder() -> None:
    options = TrainOptions(
        run_dir="somewhere", resume="somewhere/else", lr=0.3, workers="2", compile=True
    )
    written = options.as_dict()
    names = {entry.name for entry in options_of(TrainOptions)}
    assert set(written) == names - {"run_dir", "resume", "allow_different_hardware", "quiet"}
    assert TrainOptions.parse(written) == TrainOptions(lr=0.3, workers="2", compile=True)


def test_the_formats_offered_are_those_there_are() -> None:
    assert [Precision(name, torch.device("cpu")).name for name in PRECISIONS] == list(PRECISIONS)


def test_what_on_spike_and_cross_check_need() -> None:
    with pytest.raises(ConfigError, match="cross_check: expected virtual_workers with it, got 10"):
        TrainOptions(cross_check=10).check()
    with pytest.raises(ConfigError, match="on_spike: expected the strategy distributed with it"):
        TrainOptions(on_spike="skip", strategy="sharded").check()
    with pytest.raises(ConfigError, match="on_spike: expected stop, skip or rollback, got 'go'"):
        TrainOptions.parse({"on_spike": "go"})
    TrainOptions(cross_check=10, virtual_workers=4, on_spike="rollback").check()
