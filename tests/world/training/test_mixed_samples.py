"""Batch norm written by hand is named at the start by a Trainer, a loop of one's own, and an
evaluation.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from support.pool import Pool

MIXES = "an output for a sample depends on the others of the same pass"


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
        return self.second(hidden.relu())


class Communicating(Normalised):
    """Normalises by the statistics of all workers: each must call it as often as the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        mean = hidden.detach().mean(0)
        dist.all_reduce(mean)
        return self.second((hidden - mean).relu())


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    )


def said(run: Any) -> list[str]:
    """The warnings of a function on this rank."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    try:
        run()
    finally:
        logger.removeHandler(handler)
    return [text for text in records if MIXES in text]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "communicating":
        return Communicating()
    return (
        Normalised()
        if kind == "by hand"
        else nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    )


def of_trainer(kind: str) -> list[str]:
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), 16, callbacks=[])
    return said(lambda: trainer.fit(data(), epochs=2))


def of_own_loop(kind: str) -> list[str]:
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = lockstep.prepare(model, optimizer, DataLoader(data(), batch_size=16))

    def run() -> None:
        for _ in range(2):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    return said(run)


def of_evaluation(kind: str) -> list[str]:
    model = made(kind)
    loader = lockstep.Loader(data(), 16)
    return said(lambda: lockstep.evaluate(model, loader, nn.CrossEntropyLoss()))


def of_prediction(kind: str) -> list[str]:
    model = made(kind)
    loader = lockstep.Loader(data(), 16, shuffle=False)
    return said(lambda: lockstep.predict(model, loader))


def test_it_is_said_once_on_rank_0(pool: Pool) -> None:
    for run in (of_trainer, of_own_loop, of_evaluation, of_prediction):
        found = pool.run(run, "by hand", workers=2)
        assert [len(texts) for texts in found] == [1, 0], run
        assert pool.run(run, "by hand", workers=1) == [[]]
        assert pool.run(run, "layer norm", workers=2) == [[], []]


def test_a_model_that_communicates_is_called_on_all_workers(pool: Pool) -> None:
    for run in (of_trainer, of_own_loop, of_evaluation, of_prediction):
        assert pool.run(run, "communicating", workers=2) is not None
