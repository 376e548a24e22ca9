"""What would not give the same bits at any number of workers is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError
from lockstep.training.step.train_step import TrainStep
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.sharded import momentum, named, pictures, run


def test_more_workers_than_shards(pool: Pool) -> None:
    def refused() -> str:
        with pytest.raises(ConfigError) as caught:
            TrainStep(
                nn.Linear(1, 1),
                momentum(nn.Linear(1, 1).parameters()),
                F.mse_loss,
                virtual_workers=2,
            )
        with pytest.raises(
            ConfigError, match="virtual_workers: expected at least one for each of 3 workers, got 2"
        ):
            Loader(pictures(), 12, virtual_workers=2)
        return str(caught.value)

    assert pool.run(refused, workers=3)[2].startswith(
        "virtual_workers: expected at least one for each of 3 workers, got 2"
    )


def test_a_batch_that_is_cut_by_workers(pool: Pool) -> None:
    def refused() -> None:
        model = named("lenet")()
        step = TrainStep(model, momentum(model.parameters()), F.cross_entropy, virtual_workers=8)
        with pytest.raises(
            ConfigError, match="batch: expected one in 8 virtual workers, got one in none"
        ):
            step(next(Loader(pictures(), 12).epoch(0)))
        with pytest.raises(
            ConfigError, match="batch: expected one in 8 virtual workers, got one in 4"
        ):
            step(next(Loader(pictures(), 12, virtual_workers=4).epoch(0)))

    pool.run(refused, workers=2)


def test_workers_under_other_conditions(pool: Pool) -> None:
    def refused() -> None:
        model = named("lenet")()
        threads = 1 + lockstep.init("cpu").rank
        with pytest.raises(
            ConfigError, match="workers: expected the same threads on all, got 1 on rank 0, 2 on 1"
        ):
            TrainStep(
                model,
                momentum(model.parameters()),
                F.cross_entropy,
                virtual_workers=8,
                threads=threads,
            )

    pool.run(refused, workers=2)


class Normed(nn.Module):
    """Changes a parameter in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(784, 10)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.line.weight /= self.line.weight.norm()
        return self.line(x.flatten(1))


def test_a_forward_pass_that_changes_a_parameter() -> None:
    with pytest.raises(
        ConfigError,
        match=r"forward passes that change no parameter, got one that changes line\.weight",
    ):
        run(Normed)

    def known_better() -> nn.Module:
        model = Normed()
        model.line.same_bits = True  # type: ignore[assignment]
        return model

    run(known_better, steps=1)


def test_a_loader_with_other_shards_than_the_trainer() -> None:
    model = named("lenet")()
    trainer = Trainer(
        model,
        momentum(model.parameters()),
        nn.CrossEntropyLoss(),
        12,
        callbacks=[],
        virtual_workers=8,
    )
    expected = "virtual_workers: expected 8, the trainer's, in the Loader as well, got None"
    with pytest.raises(ConfigError, match=expected):
        trainer.fit(Loader(pictures(), 12), 1)
