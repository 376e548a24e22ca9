"""Every option arrives where it acts: at the trainer, the optimizer, the model or the callbacks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lockstep.errors import ConfigError
from lockstep.training import training_run
from lockstep.training.callbacks import Checkpoints, CSVLog, Curve, Progress, TensorBoard
from lockstep.training.options import TrainOptions

SAMPLES = 40  # 4 steps of 10


class Digits(torch.utils.data.Dataset[Any]):
    classes = 10

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 28, 28), index / SAMPLES), index % 10


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Options → what `make_trainer` hands to `Trainer`, and to `prepare_model`."""

    def prepare(model: nn.Module, comm: Any, **how: Any) -> nn.Module:
        prepared.update(how)
        return model

    def trainer(
        model: nn.Module, optimizer: Any, loss_fn: Any, global_batch_size: int, **rest: Any
    ) -> Any:
        return SimpleNamespace(
            model=model,
            optimizer=optimizer,
            loss_fn=loss_fn,
            global_batch_size=global_batch_size,
            prepared=prepared,
            **rest,
        )

    def make(**given: Any) -> Any:
        values: dict[str, Any] = {"model": "mlp", "global_batch_size": 10, "epochs": 5, **given}
        return training_run.make_trainer(TrainOptions(**values), Digits(), ["callbacks"])  # type: ignore[list-item]

    prepared: dict[str, Any] = {}
    monkeypatch.setattr(training_run, "Trainer", trainer)
    monkeypatch.setattr(training_run, "prepare_model", prepare)
    return make


@pytest.mark.parametrize(
    ("option", "value", "argument"),
    [
        ("global_batch_size", 20, "global_batch_size"),
        ("seed", 7, "seed"),
        ("run_dir", "somewhere", "run_dir"),
        ("keep_checkpoints", 5, "keep_checkpoints"),
        ("strategy", "sharded", "strategy"),
        ("loader_workers", 3, "num_workers"),
        ("precision", "bf16", "precision"),
        ("gradient_accumulation_steps", 4, "gradient_accumulation_steps"),
        ("max_grad_norm", 1.5, "max_grad_norm"),
        ("virtual_workers", 4, "virtual_workers"),
        ("threads", 2, "threads"),
        ("allow_different_hardware", True, "allow_different_hardware"),
        ("async_save", True, "async_save"),
    ],
)
def test_options_of_the_trainer(made: Any, option: str, value: Any, argument: str) -> None:
    assert getattr(made(), argument) != value
    assert getattr(made(**{option: value}), argument) == value


def test_the_rest_of_the_trainer(made: Any) -> None:
    assert isinstance(made().loss_fn, nn.CrossEntropyLoss)
    assert made().callbacks == ["callbacks"]


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("sync_batchnorm", "sync_batchnorm"),
        ("channels_last", "channels_last"),
        ("compile", "compile_model"),
    ],
)
def test_options_of_the_model(made: Any, option: str, argument: str) -> None:
    for value in (False, True):
        asked = made(**{option: value}).prepared
        none = dict.fromkeys(
            ("sync_batchnorm", "channels_last", "compile_model", "fixed_shapes"), False
        )
        assert asked == {**none, "compile_mode": "default", argument: value}
    assert (
        made(compile=True, compile_mode="reduce-overhead").prepared["compile_mode"]
        == "reduce-overhead"
    )
    assert made(virtual_workers=4).prepared["fixed_shapes"]


def test_the_seed_makes_the_weights(made: Any) -> None:
    first, same, other = (next(made(seed=seed).model.parameters()) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("name", "kind"), [("sgd", SGD), ("adam", Adam), ("adamw", AdamW)])
def test_optimizers(made: Any, name: str, kind: type[Any]) -> None:
    trainer = made(optimizer=name, lr=0.3, momentum=0.7, weight_decay=0.2)
    (group,) = trainer.optimizer.param_groups
    assert type(trainer.optimizer) is kind
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    assert group.get("momentum") == (0.7 if name == "sgd" else None)
    assert {id(p) for p in group["params"]} == {id(p) for p in trainer.model.parameters()}


def test_parameters_have_groups_by_their_names(made: Any) -> None:
    trainer = made(
        param_groups="*.bias:weight_decay=0;*:lr=0.01",
        lr=0.3,
        weight_decay=0.2,
        base_batch_size=None,
    )
    biases, rest = trainer.optimizer.param_groups
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    assert all(names[id(p)].endswith(".bias") for p in biases["params"]) and (
        biases["weight_decay"],
        biases["lr"],
    ) == (
        0,
        0.3,
    )
    assert not any(names[id(p)].endswith(".bias") for p in rest["params"]) and (
        rest["weight_decay"],
        rest["lr"],
    ) == (
        0.2,
        0.01,
    )
    assert len(names) == len(biases["params"]) + len(rest["params"])


def test_parameters_without_a_group_come_first_with_the_betas_of_the_options(made: Any) -> None:
    first, second = made(
        optimizer="adamw", beta1=0.8, beta2=0.95, param_groups="*.bias:eps=1e-3"
    ).optimizer.param_groups
    assert first["betas"] == second["betas"] == (0.8, 0.95)
    assert (first["eps"], second["eps"]) == (1e-8, 1e-3)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            "nothing*:lr=0.1",
            r"param_groups: expected patterns of names of parameters, got 'nothing\*'. The model has ",
        ),
        (
            "*:momentun=0.1",
            "param_groups: expected lr, weight_decay or momentum, got 'momentun'. Did you mean",
        ),
    ],
)
def test_groups_that_fit_nothing_are_named(made: Any, groups: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(param_groups=groups)


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    (group,) = training_run.make_optimizer(model, TrainOptions()).param_groups
    assert group["params"] == [model.weight]


def test_the_learning_rate_is_scaled_from_the_base_batch(made: Any) -> None:
    assert made(lr=0.3, global_batch_size=20, base_batch_size=10).optimizer.param_groups[0][
        "lr"
    ] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"schedule": "constant"}, {0: 1.0, 19: 1.0}),
        ({"schedule": "cosine"}, {0: 1.0, 10: 0.5, 20: 0.0}),
        ({"schedule": "step"}, {0: 1.0, 7: 0.1, 19: 0.001}),
        ({"schedule": "constant", "warmup_epochs": 1.0}, {0: 0.2, 3: 0.8, 4: 1.0}),
        # a warm-up begins at the rate that was chosen for the base batch
        (
            {
                "schedule": "constant",
                "warmup_epochs": 2.0,
                "base_batch_size": 5,
                "global_batch_size": 20,
            },
            {0: 0.25 + 0.75 / 5, 4: 1.0},
        ),
        (
            {
                "schedule": "constant",
                "warmup_epochs": 2.0,
                "base_batch_size": 40,
                "global_batch_size": 20,
            },
            {0: 1.0, 4: 1.0},
        ),
        ({"schedule": "cosine", "epochs": 10}, {20: 0.5, 40: 0.0}),
    ],
)
def test_schedules_of_the_learning_rate(
    made: Any, options: dict[str, Any], factors: dict[int, float]
) -> None:
    schedule = made(**options).schedule
    assert {step: schedule(step) for step in factors} == pytest.approx(factors, abs=1e-9)


def test_callbacks() -> None:
    kinds = [type(callback) for callback in training_run.make_callbacks(TrainOptions())]
    assert kinds == [Progress, CSVLog, Curve, Checkpoints]
    assert Progress not in [
        type(callback) for callback in training_run.make_callbacks(TrainOptions(quiet=True))
    ]
    for log in ("tensorboard", "tensorboard,csv"):
        assert [
            type(callback) for callback in training_run.make_callbacks(TrainOptions(log=log))
        ] == [
            *kinds,
            TensorBoard,
        ]


def test_checkpoints_are_made_at_the_given_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(training_run, "Checkpoints", lambda *given: asked.append(given))
    training_run.make_callbacks(TrainOptions(checkpoint_every="7steps"))
    assert asked == [("7steps",)]


class Stub:
    """A trainer that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.closed: list[Any] = []
        self.directory = SimpleNamespace(numbers=True)

    def loader(self, dataset: Any, shuffle: bool = True) -> Any:
        self.asked.append((dataset, shuffle))
        return SimpleNamespace(dataset=dataset, close=lambda: self.closed.append(dataset))

    def fit(self, loader: Any, epochs: int, validate: Any, resume: Any) -> None:
        self.asked.append((loader.dataset, epochs, validate and validate.dataset, resume))


class Folder:
    def __init__(self, options: TrainOptions) -> None:
        self.run_dir = options.run_dir

    def removed_on_failure(self, trainer: Any) -> Any:
        return nullcontext()

    def write_results(self, trainer: Any) -> dict[str, Any]:
        return {"of": trainer, "in": self.run_dir}


def test_the_run_fits_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    devices: list[str] = []
    monkeypatch.setattr(
        training_run, "init", lambda device: devices.append(device) or SimpleNamespace(rank=0)
    )
    monkeypatch.setattr(training_run, "load_data", lambda options: ("train", "test"))
    monkeypatch.setattr(training_run, "make_trainer", lambda *given: stub)
    monkeypatch.setattr(training_run, "RunDirectory", Folder)
    options = TrainOptions(epochs=3, device="cpu", run_dir="somewhere", resume="a/checkpoint")
    assert training_run.run(options) == {"of": stub, "in": "somewhere"}
    assert devices == ["cpu"]
    assert stub.asked == [("train", True), ("test", False), ("train", 3, "test", "a/checkpoint")]
    assert sorted(stub.closed) == ["test", "train"]
