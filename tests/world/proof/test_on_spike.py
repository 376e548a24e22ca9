"""The same spikes are left out at any number of workers, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.proof.on_spike import SpikeGuard
from support import bit_flips
from support.bit_flips import BitFlip
from support.pool import Pool

STEPS, BATCH = 50, 12


def train(on_spike: Any, value: float, **options: Any) -> tuple[str, list[Any], float]:
    """Train with a sample that is far off; returns the state, what was left out, and the column."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        BATCH,
        callbacks=[],
        on_spike=on_spike,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 6, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    inputs[333] = value
    history = trainer.fit(TensorDataset(inputs, labels), epochs=2)
    *_, guard = trainer.step.guards
    assert isinstance(guard, SpikeGuard)
    state = lockstep.fingerprint(model, optimizer)
    return state, guard.left_out, sum(row["left_out"] for row in history)


@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_with_virtual_workers_bit_for_bit(pool: Pool, action: str, value: float) -> None:
    runs = [
        pool.run(train, action, value, virtual_workers=6, workers=n, init=False) for n in (1, 2, 3)
    ]
    found = [of_rank for run in runs for of_rank in run]
    assert all(each == found[0] for each in found)
    assert found[0][2] >= 2  # the sample is in each of two epochs


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_without_virtual_workers_all_workers_decide_alike(pool: Pool, action: str) -> None:
    for workers in (2, 3):
        found = pool.run(train, action, 1e4, workers=workers, init=False)
        assert all(each == found[0] for each in found)
        assert found[0][2] >= 2


def test_rolling_back_with_cross_check(pool: Pool) -> None:
    plain = pool.run(train, "rollback", 1e4, virtual_workers=6, workers=2, init=False)
    checked = pool.run(
        train, "rollback", 1e4, virtual_workers=6, cross_check=3, workers=2, init=False
    )
    assert plain == checked


def large_flip(is_persistent: bool, rank: int) -> BitFlip:
    """A flip of the highest bit of an exponent, which makes a spike."""
    return BitFlip(
        "gradient", rank, is_persistent, step=9, shard=2 * rank, place=0, element=3, bit=30
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_spike_that_a_worker_has_made_once_is_not_left_out(pool: Pool, workers: int) -> None:
    options = {"every": None, "on_spike": "skip", "workers": workers, "init": False}
    healthy = pool.run(bit_flips.run, None, **options)
    assert healthy[0].faults == []
    for each in pool.run(bit_flips.run, large_flip(False, 0), **options):
        ((step, kind, ranks, _, is_persistent, _),) = each.faults
        assert (step, kind, ranks, is_persistent) == (9, "step", tuple(range(workers)), False)
        assert (each.end, each.fingerprint) == ("done", healthy[0].fingerprint)


def test_a_worker_that_makes_spikes_again_and_again_is_named(pool: Pool) -> None:
    flip = large_flip(True, 1)
    found = pool.run(bit_flips.run, flip, every=None, on_spike="skip", workers=3, init=False)
    for each in found:
        assert (each.end, each.ranks) == ("faulty worker", (1,))
        assert [(fault.step, fault.kind) for fault in each.faults] == [(9, "gradient")]


class Other(nn.Module):
    """Computes something else in each pass, or changes the batch."""

    def __init__(self, changes_batch: bool) -> None:
        super().__init__()
        self.passes = 0
        self.changes_batch = changes_batch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.changes_batch:
            return inputs.mul_(0.5)
        return inputs * (1 + self.passes / 1000)


@pytest.mark.parametrize("changes_batch", [False, True])
def test_what_cannot_be_repeated_is_left_out_without_a_verdict(
    pool: Pool, changes_batch: bool
) -> None:
    def body() -> list[Any]:
        lockstep.init("cpu")
        torch.manual_seed(0)
        model = nn.Sequential(Other(changes_batch), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        trainer = lockstep.Trainer(
            model, optimizer, nn.MSELoss(), BATCH, callbacks=[], on_spike="skip",
            virtual_workers=4,
        )  # fmt: skip
        inputs = torch.randn(BATCH * 20, 6, generator=torch.Generator().manual_seed(1))
        inputs[99] = 1e6
        trainer.fit(TensorDataset(inputs, torch.zeros(len(inputs), 2)), epochs=1)
        (guard,) = trainer.step.guards
        assert isinstance(guard, SpikeGuard)
        assert guard.faults == []
        return guard.left_out

    for left_out in pool.run(body, workers=2, init=False):
        assert len(left_out) == 1
