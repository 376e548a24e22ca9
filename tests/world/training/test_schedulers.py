"""Schedulers of torch in `Trainer.fit`: the learning rates of torch's own loop, on any number of
workers, resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Callback, Checkpoints
from lockstep.errors import ConfigError
from support.pool import Pool

DATA = TensorDataset(torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 3)
STEPS_IN_EPOCH, EPOCHS = 5, 3

Make = Callable[[torch.optim.Optimizer], Any]

PER_STEP: dict[str, Make] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 9], gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 11),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, 2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=16),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[4],
    ),
    "swa": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=8),
}


class Rates(Callback):
    """Notes the learning rate and the momentum of each step."""

    every_rank = True

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_step_start(self, trainer: Any, batch: Any) -> None:
        group = trainer.optimizer.param_groups[0]
        self.seen.append((group["lr"], group["momentum"]))


def made(
    make: Make, run_dir: Path | None = None, *others: Callback, lr: float = 0.2, **options: Any
) -> tuple[Any, Rates]:
    torch.manual_seed(0)
    lockstep.init("cpu")
    model, rates = nn.Linear(4, 3), Rates()
    optimizer = SGD(model.parameters(), lr, momentum=0.9)
    callbacks = [rates, *([Checkpoints()] if run_dir else []), *others]
    scheduler = make(optimizer)
    loss = nn.CrossEntropyLoss()
    options |= {"run_dir": run_dir, "callbacks": callbacks, "scheduler": scheduler}
    return lockstep.Trainer(model, optimizer, loss, 4, **options), rates


def by_torch(make: Make, interval: int, lr: float = 0.2) -> list[tuple[float, float]]:
    """What a loop without Lockstep has at each step."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = SGD([parameter], lr, momentum=0.9)
    scheduler, seen = make(optimizer), []
    for step in range(1, EPOCHS * STEPS_IN_EPOCH + 1):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        if step % interval == 0:
            scheduler.step()
    return seen


@pytest.mark.parametrize("name", PER_STEP)
def test_each_step_has_the_learning_rate_of_torchs_own_loop_and_so_has_a_resumed_run(
    name: str, tmp_path: Path
) -> None:
    make, expected = PER_STEP[name], by_torch(PER_STEP[name], 1)
    assert len(set(expected)) > 2
    trainer, rates = made(make, tmp_path)
    trainer.fit(DATA, max_steps=7)
    assert rates.seen == expected[:7]
    assert trainer.history[-1]["lr"] == expected[6][0]
    again, rates = made(make, tmp_path)
    again.fit(DATA, EPOCHS, resume="latest")
    assert rates.seen == expected[7:]
    straight, _ = made(make)
    straight.fit(DATA, EPOCHS)
    assert lockstep.fingerprint(straight.model, straight.optimizer) == lockstep.fingerprint(
        again.model, again.optimizer
    )


def test_a_scheduler_of_epochs_is_stepped_between_them_and_resumed(tmp_path: Path) -> None:
    make = PER_STEP["lambda"]
    trainer, rates = made(make, tmp_path, scheduler_interval="epoch")
    trainer.fit(DATA, max_steps=STEPS_IN_EPOCH)
    again, later = made(make, tmp_path, scheduler_interval="epoch")
    again.fit(DATA, EPOCHS, resume="latest")
    assert rates.seen + later.seen == by_torch(make, STEPS_IN_EPOCH)


def test_more_workers_do_not_multiply_the_steps_of_a_scheduler(pool: Pool) -> None:
    def run() -> Any:
        trainer, rates = made(PER_STEP["one cycle"])
        history = trainer.fit(DATA, 2)
        plateau, of_plateau = made(
            lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.99)
        )
        plateau.fit(DATA, EPOCHS, validate=DATA)
        return rates.seen, [row["lr"] for row in history], of_plateau.seen

    one, two = pool.run(run, workers=1), pool.run(run, workers=2)
    assert two == [one[0], one[0]]
    assert one[0][0] == by_torch(PER_STEP["one cycle"], 1)[:10]
    rates = [rate for rate, _ in one[0][2]]
    assert rates[::STEPS_IN_EPOCH] == pytest.approx(
        [0.2, 0.2, 0.02]
    )  # the loss never gets better by so much


def test_a_learning_rate_that_is_constructed_anew_keeps_the_schedulers_factor(
    tmp_path: Path,
) -> None:
    for name in ("lambda", "cosine", "sequential"):
        trainer, _ = made(PER_STEP[name], tmp_path / name, lr=0.2)
        trainer.fit(DATA, max_steps=7)
        again, rates = made(PER_STEP[name], tmp_path / name, lr=0.4)
        again.fit(DATA, EPOCHS, resume="latest")
        assert [rate for rate, _ in rates.seen] == pytest.approx(
            [rate for rate, _ in by_torch(PER_STEP[name], 1, 0.4)[7:]]
        )


class Private(lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {"of": object()}


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            lambda optimizer: 1.0,
            {},
            "scheduler: expected a scheduler of torch.optim.lr_scheduler, got float",
        ),
        (lambda optimizer: math.sqrt, {}, "given as schedule="),
        (
            lambda _: lr_scheduler.ConstantLR(Adam([torch.ones(1)])),
            {},
            "the optimizer that is given, got ConstantLR of an",
        ),
        (
            PER_STEP["cosine"],
            {"schedule": lambda step: 1.0},
            "either schedule= or scheduler=, got both",
        ),
        (PER_STEP["cosine"], {"scheduler_interval": "batch"}, "scheduler_interval: "),
        (
            PER_STEP["cosine"],
            {"scheduler_metric": "val_loss"},
            "scheduler_metric: expected none with CosineAnnealingLR",
        ),
        (
            lr_scheduler.ReduceLROnPlateau,
            {"scheduler_interval": "step"},
            'expected "epoch" with ReduceLROnPlateau',
        ),
        (
            lambda optimizer: Private(optimizer, lambda step: 1.0),
            {},
            "state_dict.. has plain values only .here of., got Priv",
        ),
        (
            lambda optimizer: None,
            {"scheduler_interval": "epoch"},
            "scheduler_interval: expected none without scheduler=",
        ),
    ],
)
def test_what_is_refused(make: Make, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(make, **options)


def test_a_metric_that_no_row_will_have_is_refused_before_the_first_step() -> None:
    trainer, rates = made(lr_scheduler.ReduceLROnPlateau, scheduler_metric="val_f1")
    with pytest.raises(
        ConfigError, match=r"scheduler_metric: expected one of epoch, .*val_loss.*, got 'val_f1'"
    ):
        trainer.fit(DATA, 1, validate=DATA)
    assert rates.seen == []
