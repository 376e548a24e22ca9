"""Wrong types and values: the constructor finds them, and one line says what was expected."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import callbacks
from lockstep.errors import ConfigError

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 3
DATA = TensorDataset(INPUTS, LABELS)
NOTHING: Any = object()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def parts() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss()}


def trainer(**options: Any) -> Any:
    return lockstep.Trainer(**{**parts(), "global_batch_size": 8, "callbacks": [], **options})


def step(**options: Any) -> Any:
    return lockstep.TrainStep(**{**parts(), **options})


def loader(**options: Any) -> Any:
    return lockstep.Loader(**{"dataset": DATA, "global_batch_size": 8, **options})


def prepare(**options: Any) -> Any:
    own = parts()
    return lockstep.prepare(own["model"], own["optimizer"], DataLoader(DATA, 8), **options)


def fit(**options: Any) -> Any:
    return trainer().fit(DATA, **{"epochs": 1, **options})


def evaluate(**options: Any) -> Any:
    given = {
        "model": net(),
        "loader": loader(shuffle=False),
        "loss_fn": nn.CrossEntropyLoss(),
        **options,
    }
    return lockstep.evaluate(**given)


def samples(**options: Any) -> Any:
    return callbacks.TextSamples(**{"prompts": [[1, 2]], "decode": str, "context": 4, **options})


def launch(**options: Any) -> Any:
    return lockstep.launch(**{"fn": print, **options})


COUNT = (None, True, 0, -1, 1.5, "3", [3], NOTHING)
FLAG = ("False", "", 2, 0.5, [], {}, NOTHING)
NUMBER = (True, "1", [], {}, NOTHING, float("nan"), -1)
TEXT = (True, 3, b"x", [], {}, NOTHING, "")
FUNCTION = (True, False, 3, "", "name", [], {}, NOTHING, lambda: None)

WRONG: list[tuple[Callable[..., Any], str, tuple[Any, ...]]] = [
    (trainer, "model", (None, net, nn.Linear, "net", {})),
    (trainer, "optimizer", (None, torch.optim.SGD, "adam", [], (1, 2))),
    (trainer, "loss_fn", (True, 3, "mse", nn.MSELoss, lambda output: output)),
    (trainer, "global_batch_size", COUNT),
    (trainer, "seed", (None, True, -1, 1.5, "3")),
    (trainer, "run_dir", (True, 3, 1.5, b"runs", "", "a\0b", [], NOTHING)),
    (trainer, "keep_checkpoints", COUNT),
    (trainer, "callbacks", (True, 3, "csv", callbacks.CSVLog(), callbacks.CSVLog, NOTHING)),
    (trainer, "strategy", (True, 3, [], {}, NOTHING, "", "no")),
    (trainer, "devices", (True, 2, "cpu", ["cpu"], NOTHING)),
    (trainer, "metrics", (True, 3, "accuracy", [F.mse_loss], {"f1": "f1"}, NOTHING)),
    (trainer, "num_workers", (None, True, -1, 1.5, "3")),
    (trainer, "max_steps_in_flight", COUNT),
    (trainer, "async_save", FLAG),
    (trainer, "allow_different_hardware", FLAG),
    (trainer, "save_frozen", FLAG),
    (trainer, "precision", (None, True, 8, "fp8", b"bf16", [])),
    (trainer, "gradient_accumulation_steps", COUNT),
    (trainer, "max_grad_norm", (*NUMBER, 0)),
    (trainer, "schedule", ("cosine", 3, [], lambda: 1.0)),
    (trainer, "scheduler", ("cosine", 3, [], torch.optim.lr_scheduler.StepLR)),
    (trainer, "scheduler_interval", ("step", 3)),
    (trainer, "scheduler_metric", ("val_loss", 3)),
    (trainer, "forward", FUNCTION),
    (trainer, "virtual_workers", COUNT[1:]),
    (trainer, "threads", (2, "2")),
    (trainer, "replica_check", (None, True, -1, 1.5, "3")),
    (fit, "epochs", COUNT),
    (fit, "validate", ("test", b"test", True, 0.1)),
    (fit, "resume", (True, False, 3, b"latest", "", [], NOTHING)),
    (fit, "max_steps", COUNT[1:]),
    (fit, "validate_every", COUNT[1:]),
    (step, "model", (None, nn.Linear)),
    (step, "optimizer", (None, torch.optim.SGD)),
    (step, "strategy", (True, 3, "sharded", NOTHING)),
    (step, "seed", (None, 1.5, "3", NOTHING)),
    (step, "forward", FUNCTION),
    (loader, "global_batch_size", COUNT),
    (loader, "seed", (None, True, -1, 1.5, "3")),
    (loader, "shuffle", (*FLAG, None)),
    (loader, "drop_last", (*FLAG, None)),
    (loader, "num_workers", (None, True, -1, 1.5, "3")),
    (loader, "prefetch", COUNT[1:]),
    (loader, "comm", (True, 3, "comm", lockstep.Communicator, NOTHING)),
    (loader, "collate_fn", FUNCTION),
    (loader, "virtual_workers", COUNT[1:]),
    (loader, "batch_sampler", (True, 3, NOTHING)),
    (prepare, "virtual_workers", COUNT[1:]),
    (prepare, "max_grad_norm", (*NUMBER, 0)),
    (prepare, "precision", (None, True, 16, "fp8")),
    (prepare, "seed", (None, True, -1, 1.5, "3")),
    (prepare, "threads", (2, "2")),
    (evaluate, "model", (None, nn.Linear, 3)),
    (evaluate, "precision", ("bf16", True, 3)),
    (evaluate, "forward", FUNCTION),
    (evaluate, "strategy", (True, "sharded", NOTHING)),
    (callbacks.AveragedWeights, "decay", (*NUMBER, 1)),
    (callbacks.AveragedWeights, "start", COUNT),
    (callbacks.AveragedWeights, "every", COUNT),
    (callbacks.AveragedWeights, "results", (None, "loss", 3, [1])),
    (callbacks.Checkpoints, "every", (None, True, 3, 0, 1.5, b"1", "", "often", [])),
    (callbacks.Checkpoints, "best", TEXT),
    (functools.partial(callbacks.Checkpoints, best="val_loss"), "higher_is_better", FLAG),
    (callbacks.EarlyStopping, "metric", (*TEXT, None)),
    (callbacks.EarlyStopping, "patience", COUNT),
    (callbacks.EarlyStopping, "higher_is_better", FLAG),
    (callbacks.EarlyStopping, "min_delta", (*NUMBER, None)),
    (callbacks.GradientNoise, "every", COUNT),
    (callbacks.LearningRates, "names", (None, "head", 3, [1])),
    (functools.partial(callbacks.LearningRates, ["a"]), "momentum", (*FLAG, None)),
    (callbacks.Profile, "steps", (None, 3, True, "12", [], [0], ["1"], [1, 3])),
    (callbacks.Profile, "memory", (*FLAG, None)),
    (callbacks.Progress, "tokens", (*NUMBER, 0)),
    (callbacks.TokenColumns, "tokens", (*NUMBER, None, 0)),
    (samples, "prompts", (None, "text", ["text"], [[1], [1, 2]], [[]], [[0.5]], 3)),
    (samples, "decode", FUNCTION),
    (samples, "context", COUNT),
    (samples, "length", (None, True, -1, 1.5)),
    (samples, "temperature", (*NUMBER, None)),
    (samples, "top_k", COUNT[1:]),
    (samples, "seed", (None, 1.5, "3")),
    (samples, "show", (*FLAG, None)),
    (lockstep.init, "device", (None, True, 3, "gpu", "cuda:1", "")),
    (lockstep.init, "timeout", (True, 3, 1.5, "3", NOTHING)),
    (lockstep.init, "transport", (True, 3, "nccl", "", NOTHING)),
    (launch, "fn", (None, 3, "train")),
    (launch, "workers", (*COUNT, 121)),
    (launch, "threads", COUNT[1:]),
    (launch, "grace", (None, True, -1, "3")),
    (launch, "network", (True, 3, [], NOTHING, "fast")),
    (functools.partial(lockstep.make_schedule, "cosine"), "total_steps", (None, True, "3", [])),
    (functools.partial(lockstep.make_schedule, total_steps=3), "name", (None, True, 3, "cos")),
    (functools.partial(lockstep.make_schedule, "cosine", 3), "warmup_start", (None, True, "1", -1)),
]


@pytest.mark.parametrize(("call", "name", "values"), WRONG)
def test_a_wrong_value_is_one_line_that_names_the_argument(
    call: Callable[..., Any], name: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            call(**{name: value})
        text = str(caught.value)
        assert len(text.splitlines()) == 1, value
        assert ": expected " in text, value
        assert ", got " in text, value
        assert caught.value.argument == {"name": "schedule"}.get(name, name), value


def test_hints_say_what_to_write() -> None:
    def of(call: Callable[..., Any], **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            call(**options)
        return str(caught.value)

    said = of(trainer, callbacks=callbacks.CSVLog())
    assert said.startswith(
        "callbacks: expected a list of callbacks, got a single CSVLog. Put it into a list"
    )
    assert 'resume="latest" continues' in of(fit, resume=True)
    assert 'A text says what is counted: "3epochs" or "3steps".' in of(
        callbacks.Checkpoints, every=3
    )
    assert of(trainer, optimizer=torch.optim.SGD).endswith(
        "got the class SGD. Create an instance: SGD(...)."
    )
    assert "lockstep.prepare" in of(trainer, optimizer=[parts()["optimizer"]])
    assert "scheduler=" in of(
        trainer, schedule=torch.optim.lr_scheduler.StepLR(parts()["optimizer"], 1)
    )
    assert "lockstep run -np N" in of(trainer, devices=2)
    assert "datetime.timedelta(seconds=30)" in of(lockstep.init, timeout=30)


def test_values_that_are_right_are_taken() -> None:
    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return function(*arguments, None)

        return call

    @wrapped
    def loss_fn(output: Any, target: Any, _: None) -> Any:  # the decorator gives the third
        return F.cross_entropy(output, target)

    made = trainer(
        loss_fn=loss_fn,
        allow_different_hardware=None,
        save_frozen=np.bool_(True),
        callbacks=(callback for callback in ()),
        forward=lambda model, data, *more: (model(data[0]), data[1]),
        schedule=lambda step, scale=1.0: scale,
        max_grad_norm=np.float64(1.0),
        metrics={},
    )
    made.fit(loader(shuffle=np.bool_(False), drop_last=1), 1)
    callbacks.Checkpoints("3", best="val_f1", higher_is_better=np.bool_(True))
    callbacks.Profile(iter(range(2, 4)))
    callbacks.TokenColumns(12.5)
    lockstep.init("cpu", timeout=datetime.timedelta(seconds=3), transport="gloo")


# --- losses, labels and frozen models
# ---------------------------------------------------------------------------------


def frozen() -> nn.Module:
    model = net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "a float": (
        {"loss_fn": lambda o, t: F.cross_entropy(o, t).item()},
        "loss_fn: .* got a float. .*item",
    ),
    "a whole number": ({"loss_fn": lambda o, t: 1}, r"loss_fn: .* got a whole number \(int\)"),
    "detached": (
        {"loss_fn": lambda o, t: F.cross_entropy(o, t).detach()},
        "loss_fn: .* got one without a gradient",
    ),
    "of detached outputs": (
        {"loss_fn": lambda o, t: F.mse_loss(o.detach()[:, 0], t * 1.0)},
        "without a gradient",
    ),
    "a sum and a count": ({"loss_fn": lambda o, t: (o.sum().item(), 8)}, "loss_fn: .* got a float"),
    "a frozen model": (
        {"model": frozen()},
        "model: expected at least one parameter that is trained, got none of 4",
    ),
    "a single tensor": (
        {"forward": lambda m, d: m(d[0])},
        r"forward: .*\(output, target\), got a tensor of shape \[\d, 3\]",
    ),
    "two rows": (
        {"forward": lambda m, d: m(d[0])[:2]},
        r"forward: .* got a tensor of shape \[2, 3\]",
    ),
    "nothing": ({"forward": lambda m, d: None}, "forward: .* got NoneType"),
    "three": ({"forward": lambda m, d: (m(d[0]), d[1], 0)}, "forward: .* got tuple of 3"),
    "no loss": (
        {"loss_fn": None},
        "loss_fn: .* got no loss_fn, and a model that does not take the batch",
    ),
    "float labels": (
        {"data": LABELS.float()},
        r"data: .*dtype torch.int64, or probabilities .* got torch.float32 of",
    ),
    "double labels": (
        {"data": LABELS.double()},
        r"data: .* got torch.float64 of shape \[\d\]. .*labels.long\(\)",
    ),
    "negative labels": (
        {"data": LABELS - 1},
        "data: expected class labels from 0 to 2, for 3 outputs, got labels from -",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("virtual_workers", [None, 2])
def test_a_loss_without_a_gradient_and_the_like_are_named(
    name: str, virtual_workers: int | None
) -> None:
    options, said = LOSSES[name]
    options = dict(options)
    data = TensorDataset(INPUTS, options.pop("data", LABELS))
    if "model" in options:
        options["optimizer"] = torch.optim.SGD(options["model"].parameters(), 0.1)
    with pytest.raises(ConfigError, match=said):
        trainer(**options, virtual_workers=virtual_workers).fit(data, 1)


def test_a_frozen_model_that_is_thawed_before_it_trains_is_right() -> None:
    model = frozen()
    made = trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    model[2].weight.requires_grad_(True)  # type: ignore[union-attr, operator]
    assert len(made.fit(DATA, 1)) == 1


def test_probabilities_as_targets_are_right() -> None:
    data = TensorDataset(INPUTS, F.one_hot(LABELS, 3).float())
    assert len(trainer().fit(data, 1)) == 1


def test_a_constant_loss_may_be_evaluated() -> None:
    assert evaluate(loss_fn=lambda output, target: 0.5)["loss"] == 0.5
