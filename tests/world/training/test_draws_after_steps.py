"""What a program draws between steps and after a training is the same on every worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from support.pool import Pool


class Draw(lockstep.callbacks.Callback):
    every_rank = True

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        self.drawn.append(torch.rand(()).item())


def draws() -> tuple[list[float], float]:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    data, draw = TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), Draw()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = lockstep.Trainer(model, optimizer, nn.MSELoss(), 8, callbacks=[draw])
    trainer.fit(data, epochs=2)
    return draw.drawn, torch.rand(()).item()


def test_they_do_not_depend_on_the_rank_or_the_number_of_workers(pool: Pool) -> None:
    alone = pool.run(draws, workers=1, init=False)[0]
    assert len(set(alone[0])) == 4
    assert pool.run(draws, workers=2, init=False) == [alone, alone]
