"""A layer that is replaced while a model is trained: found, broadcast, reduced and clipped, or
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.training.callbacks.base import Callback
from support.gradient_ways import way
from support.outcome import RanksFailedError
from support.pool import Pool

X = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) * 5


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def replace_head(model: nn.Sequential, optimizer: torch.optim.Optimizer | None, rank: int) -> None:
    """Replace the last layer by one of the same size, with other values on each rank."""
    torch.manual_seed(1 + rank)
    model[2] = nn.Linear(4, 1)
    if optimizer is not None:
        optimizer.param_groups[0]["params"] = list(model.parameters())


class Norms(Callback):
    every_rank = True

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
        if trainer.step.strategy.sharded_state:
            return
        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        self.found.append((float(result.grad_norm), float(whole.norm())))


def fitted(by: str = "message", **options: Any) -> tuple[list[float], list[float], list[float]]:
    """Return the losses, the norms that were reported and the weights of a training whose head is
    replaced.
    """
    with way(by):
        return fit(**options)


def fit(
    gives: bool = True, evaluates: bool = False, **options: Any
) -> tuple[list[float], list[float], list[float]]:
    comm = lockstep.init("cpu")
    model, optimizer = made()
    norms = Norms()
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.MSELoss(),
        16,
        max_grad_norm=0.1,
        callbacks=[norms],
        replica_check=1,
        **options,
    )
    trainer.fit(TensorDataset(X, Y), epochs=1)
    replace_head(model, optimizer if gives else None, comm.rank)
    before = [trainer.evaluate(TensorDataset(X, Y))["loss"]] if evaluates else []
    rows = trainer.fit(TensorDataset(X, Y), epochs=3)
    assert all(clipped == pytest.approx(min(norm, 0.1), rel=1e-4) for norm, clipped in norms.found)
    trainer.state_dict()  # no state of the old head is left
    weights = [value for p in model.parameters() for value in p.flatten().tolist()]
    return before + [row["train_loss"] for row in rows], [norm for norm, _ in norms.found], weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"by": "ddp"},
        {"virtual_workers": 4},
        {"strategy": "replicas", "devices": ["cpu", "cpu"]},
        {"evaluates": True},
        {"precision": "bf16"},
    ],
)
def test_a_replaced_layer_is_broadcast_reduced_and_clipped(
    pool: Pool, options: dict[str, Any]
) -> None:
    wanted = pool.run(fitted, **options, workers=1)[0]
    ranks = pool.run(fitted, **options, workers=2)
    assert ranks[0] == ranks[1]
    rel = 0.02 if "precision" in options else 1e-4
    for found, expected in zip(ranks[0], wanted, strict=True):
        assert found == pytest.approx(expected, rel=rel, abs=1e-5)
    if "virtual_workers" in options:
        assert ranks[0] == wanted


def test_a_replaced_layer_that_the_optimizer_does_not_have_is_refused(pool: Pool) -> None:
    for size in (1, 2):
        for options in ({}, {"virtual_workers": 2}, {"evaluates": True}):
            with pytest.raises(
                RanksFailedError, match=r"not among them.*When a layer has been replaced"
            ):
                pool.run(fitted, gives=False, **options, workers=size)


@pytest.mark.leaks("a device mesh outlives its job, and its group with it")
def test_a_replaced_layer_of_a_sharded_model_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="one that is sharded already"):
        pool.run(fitted, strategy="sharded", workers=2)


def added() -> list[float]:
    """Return the values of a layer that is added, but not trained."""
    comm = lockstep.init("cpu")
    model, optimizer = made()
    trainer = lockstep.Trainer(model, optimizer, nn.MSELoss(), 16, callbacks=[])
    trainer.fit(TensorDataset(X, Y), epochs=1)
    torch.manual_seed(1 + comm.rank)
    model.append(nn.Linear(1, 1))
    trainer.fit(TensorDataset(X, Y), epochs=2)
    return [value for p in model[3].parameters() for value in p.tolist()]


def test_an_added_layer_is_broadcast(pool: Pool) -> None:
    ranks = pool.run(added, workers=2)
    assert ranks[0] == ranks[1] == pool.run(added, workers=1)[0]


def own_loop(**options: Any) -> list[float]:
    """Return the weights after a loop of one's own in which the head is replaced."""
    comm = lockstep.init("cpu")
    model, optimizer = made()
    data = DataLoader(TensorDataset(X, Y), batch_size=16)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, data, max_grad_norm=0.1, **options
    )
    for epoch in range(3):
        if epoch == 1:
            replace_head(model, optimizer, comm.rank)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_a_layer_is_replaced_in_a_loop_of_ones_own(pool: Pool) -> None:
    for options in ({}, {"virtual_workers": 4}):
        wanted = pool.run(own_loop, **options, workers=1)[0]
        ranks = pool.run(own_loop, **options, workers=2)
        assert ranks[0] == ranks[1] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
