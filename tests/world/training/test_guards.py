"""Guards of a training step of several workers: what they see is the same on all, and costs no collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import flight_recorder
from lockstep.data.loader import Batch, Loader
from lockstep.training.check_schedule import is_due
from lockstep.training.step.guards import Decision, Guard, PendingStep
from lockstep.training.step.train_step import TrainStep
from support.pool import Pool

STEPS = 12


class Looking(Guard):
    """Repeats step 3, skips step 5, and notes what it has seen."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, float, float, float]] = []

    def before_update(self, pending: PendingStep) -> Decision:
        self.seen.append((pending.step, pending.decision.name, *pending.measured))
        if pending.step == 3 and not pending.attempt:
            return Decision.REPEAT
        return Decision.SKIP if pending.step == 5 else Decision.GO


def small() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10)
    )


def wide() -> nn.Module:
    """1.5 MiB of gradients: DistributedDataParallel sends them in two buckets."""
    return nn.Sequential(
        nn.Linear(16, 2000),
        nn.BatchNorm1d(2000),
        nn.ReLU(),
        nn.Linear(2000, 180),
        nn.Linear(180, 10),
    )


def train(make: Any, guarded: bool, **options: Any) -> dict[str, Any]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = make()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        nn.CrossEntropyLoss(),
        **options,
    )
    guard = Looking()
    if guarded:
        step.guards = [guard]
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24 * STEPS, 16, generator=generator)
    data = TensorDataset(inputs, torch.randint(0, 10, (24 * STEPS,), generator=generator))
    batches: list[Batch] = list(
        Loader(data, 24, comm=comm, virtual_workers=options.get("virtual_workers")).epoch(0)
    )
    collectives = []
    prints = []
    for number, batch in enumerate(batches):
        if number == 5 and not guarded:  # what a skipped step leaves out
            step.steps_done += 1
            continue
        before = _number_of_collectives()
        step.run(batch)
        if number > 8 and not is_due(number):
            collectives.append(_number_of_collectives() - before)
        prints.append(lockstep.fingerprint(model, step.optimizer))
    return {"seen": guard.seen, "collectives": collectives, "fingerprint": prints[-1]}


def _number_of_collectives() -> int:
    recorder = flight_recorder.current.recorder
    return 0 if recorder is None else recorder.count  # a single worker has none


@pytest.mark.parametrize("make", [small, wide])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"precision": "fp16"}], ids=str
)
def test_all_workers_see_the_same_for_no_collective(
    pool: Pool, make: Any, options: dict[str, Any]
) -> None:
    plain = pool.run(train, make, False, **options, workers=2, init=False)
    guarded = pool.run(train, make, True, **options, workers=2, init=False)
    assert guarded[0]["seen"] == guarded[1]["seen"]
    assert [entry[0] for entry in guarded[0]["seen"]] == [0, 1, 2, 3, *range(3, STEPS)]
    assert {of_worker["fingerprint"] for of_worker in (*plain, *guarded)} == {
        plain[0]["fingerprint"]
    }
    assert guarded[0]["collectives"] == plain[0]["collectives"]


def test_with_virtual_workers_any_number_of_workers_sees_the_same(pool: Pool) -> None:
    runs = [
        pool.run(train, small, True, virtual_workers=6, workers=n, init=False) for n in (1, 2, 3)
    ]
    seen = [of_worker["seen"] for of_run in runs for of_worker in of_run]
    assert all(each == seen[0] for each in seen)
    assert len({of_worker["fingerprint"] for of_run in runs for of_worker in of_run}) == 1
    plain = pool.run(train, small, False, virtual_workers=6, workers=2, init=False)
    assert plain[0]["fingerprint"] == runs[0][0]["fingerprint"]
    assert plain[0]["collectives"] == runs[1][0]["collectives"]
