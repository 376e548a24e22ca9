"""Small training runs, and callbacks that disturb them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.parallel.fingerprints import fingerprint
from lockstep.training.callbacks import Callback
from lockstep.training.step.step_result import StepResult
from lockstep.training.trainer import Trainer

__all__ = ["At", "fit", "images", "make", "model", "send", "timeless"]

GLOBAL_BATCH = 16


def images(n: int = 67, seed: int = 5) -> TensorDataset:
    """67 samples in batches of 16: five steps an epoch."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=generator)
    return TensorDataset(
        torch.randn(n, 1, 8, 8, generator=generator) + labels[:, None, None, None], labels
    )


def model(width: int = 16, dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 4)
    )


class At(Callback):
    """Does something at one step."""

    every_rank = True

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.step:
            self.action(trainer)


def make(
    out: Path | None, callbacks: list[Callback], optimizer: Any = torch.optim.AdamW, **options: Any
) -> Trainer:
    """A trainer; `optimizer` takes parameters and a learning rate."""
    lockstep.init("cpu")
    net = model(options.pop("width", 16), options.pop("dropout", 0.2))
    made = optimizer(net.parameters(), options.pop("lr", 0.01))
    loss_fn = options.pop("loss_fn", None) or nn.CrossEntropyLoss()
    return Trainer(net, made, loss_fn, GLOBAL_BATCH, run_dir=out, callbacks=callbacks, **options)


def fit(
    out: Path | None,
    *callbacks: Callback,
    epochs: int = 3,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """(fingerprint, history) of a run with an evaluation after each epoch."""
    trainer = make(out, list(callbacks), **options)
    history = trainer.fit(images(), epochs, validate=images(31, seed=6), resume=resume)
    return fingerprint(trainer.model, trainer.optimizer), history


def timeless(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")}
        for row in history
    ]


def send(number: int, only: int) -> Any:
    """An action that sends a signal to the process of one rank."""

    def action(trainer: Trainer) -> None:
        if trainer.comm.rank == only:
            os.kill(os.getpid(), number)

    return action
