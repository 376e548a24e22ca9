"""Evaluations on several workers: what would differ with another number of workers is an error, or
is said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.communicator import init
from support.outcome import RanksFailedError
from support.pool import Pool

INPUTS = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
KEPT: list[torch.Tensor] = []


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def keeps(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    KEPT.append(output)
    return (output.argmax(1) == target).float().mean()


def evaluate_other_weights() -> None:
    model = line()
    if init().rank == 0:
        nn.init.zeros_(model.weight)
    lockstep.evaluate(model, DataLoader(TensorDataset(INPUTS, LABELS), 8), nn.CrossEntropyLoss())


def evaluate_weights_loaded_after_fit() -> None:
    model = line()
    trainer = lockstep.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), mean, 8, callbacks=[]
    )
    trainer.fit(TensorDataset(INPUTS, LABELS), 1)
    if init().rank == 0:
        nn.init.zeros_(model.weight)
    trainer.evaluate(TensorDataset(INPUTS, LABELS))


def fit_labels_ignored_on_one_rank() -> None:
    model, labels = line(), LABELS.clone()
    labels[30] = -100  # of batch 3, in the part of rank 1
    trainer = lockstep.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), mean, 8, callbacks=[]
    )
    trainer.fit(lockstep.Loader(TensorDataset(INPUTS, labels), 8, shuffle=False), max_steps=4)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (evaluate_other_weights, "the workers' models differ: weight holds other values"),
        (evaluate_weights_loaded_after_fit, "the workers' replicas differ: weight on rank 1"),
        (fit_labels_ignored_on_one_rank, r"loss_fn: .* for 4 samples of rank 1"),
    ],
)
def test_what_would_depend_on_the_number_of_workers_is_an_error_on_all(
    pool: Pool, run: object, message: str
) -> None:
    with pytest.raises(RanksFailedError, match=message):
        pool.run(run, workers=2)  # type: ignore[arg-type]


@contextmanager
def lines() -> Iterator[list[str]]:
    """What Lockstep says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    yield said
    logging.getLogger("lockstep").removeHandler(handler)


def lines_of_an_evaluation() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False))
    loader = DataLoader(TensorDataset(INPUTS, LABELS), 10)
    with lines() as said:
        lockstep.evaluate(model, loader, nn.CrossEntropyLoss(), {"kept": keeps})
    return said


def lines_of_an_evaluation_after_a_loop() -> list[str]:
    """`prepare` has hooks on the parameters."""
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), 10)
    model, optimizer, prepared = lockstep.prepare(model, optimizer, loader)
    for inputs, labels in prepared:
        optimizer.zero_grad()
        mean(model(inputs), labels).backward()
        optimizer.step()
    with lines() as said:
        lockstep.evaluate(model, loader, mean)
    return said


def test_what_depends_on_the_parts_of_an_evaluation_is_said(pool: Pool) -> None:
    first, second = pool.run(lines_of_an_evaluation, workers=2)
    assert any("'kept' changes KEPT, outside of itself" in line for line in first)
    assert any("batch norm has the statistics of a part (1)" in line for line in first)
    assert not second


def test_hooks_of_parameters_do_not_matter_to_an_evaluation(pool: Pool) -> None:
    assert pool.run(lines_of_an_evaluation_after_a_loop, workers=2) == [[], []]
