"""What a step of several workers costs: its collectives and operations, which are the same on a
busy machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lockstep
from lockstep import flight_recorder
from lockstep.data.loader import Batch, Loader
from lockstep.training.check_schedule import is_due
from lockstep.training.step.train_step import TrainStep
from support.operation_counts import Operations
from support.pool import Pool

WARM_UP, STEPS = (
    9,
    6,
)  # torch arranges its buckets anew after a step, and losses are compared at the first ones


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def wide() -> nn.Module:
    """1.5 MiB of gradients: two buckets of DistributedDataParallel."""
    return nn.Sequential(
        nn.Linear(16, 2000), nn.ReLU(), nn.Linear(2000, 180), nn.ReLU(), nn.Linear(180, 10)
    )


def sparse() -> nn.Module:
    return nn.Sequential(Words(), nn.Linear(8, 10))


class Words(nn.EmbeddingBag):
    """Looks up rows by the signs of the inputs."""

    def __init__(self) -> None:
        super().__init__(2, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward((x > 0).long())


def tokens(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = target > 2
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


def batches(comm: lockstep.Communicator) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    size = 8 * comm.size * (WARM_UP + STEPS)
    inputs = torch.randn(size, 16, generator=generator)
    data = TensorDataset(inputs, torch.randint(0, 10, (size,), generator=generator))
    return list(Loader(data, 8 * comm.size, comm=comm).epoch(0))


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), nn.CrossEntropyLoss()


def collectives_of_steps(
    make: Callable[[], nn.Module], loss_fn: Any = None, **options: Any
) -> list[int]:
    """Return how many collectives each step has, after the first ones and where no loss is due to
    be compared.
    """
    comm = lockstep.init("cpu")
    model, optimizer, usual = made(make)
    step = TrainStep(model, optimizer, loss_fn or usual, **options)
    found = []
    for number, batch in enumerate(batches(comm)):
        before = number_of_collectives()
        step.run(batch)
        if number >= WARM_UP and not is_due(number):
            found.append(number_of_collectives() - before)
    return found


def number_of_collectives() -> int:
    recorder = flight_recorder.current.recorder
    assert recorder is not None
    return recorder.count


def counted(pool: Pool, transport: str, workers: int, *args: Any, **options: Any) -> set[int]:
    """Return how many collectives a step of any worker has; `lockstep.init` makes the group, so
    they are recorded.
    """
    env = {"LOCKSTEP_TRANSPORT": transport}
    found = pool.run(collectives_of_steps, *args, **options, workers=workers, init=False, env=env)
    assert all(len(of_worker) >= STEPS - 2 for of_worker in found)
    return {number for of_worker in found for number in of_worker}


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"make": normed},
        {"make": normed, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "loss_fn": tokens},
        {"precision": "fp16", "max_grad_norm": 0.1},
        {"precision": "bf16"},
        {"replica_check": 1},
        {"replica_check": 0},
    ],
    ids=[
        "plain",
        "buffers",
        "buffers, accumulated",
        "accumulated, clipped, tokens",
        "fp16",
        "bf16",
        "checked",
        "unchecked",
    ],
)
def test_a_step_of_a_small_model_has_one_collective(
    pool: Pool, transport: str, options: dict[str, Any]
) -> None:
    for workers in (2, 3):
        assert counted(pool, transport, workers, **{"make": mlp, **options}) == {1}


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize(("make", "collectives"), [(wide, 3), (sparse, 3)])
def test_a_step_of_another_model_has_one_more_than_torch(
    pool: Pool, transport: str, make: Callable[[], nn.Module], collectives: int
) -> None:
    assert counted(pool, transport, 2, make) == {collectives}


def operations_of_a_step(run: Callable[[Batch], Any], given: list[Batch]) -> Counter[str]:
    """Return the operations of so many steps, after those to warm up."""
    for batch in given[:WARM_UP]:
        run(batch)
    with Operations() as mode:
        for batch in given[WARM_UP:]:
            run(batch)
    return Counter({name: number // STEPS for name, number in mode.counts.items()})


def operations_beside_those_by_hand() -> tuple[Counter[str], Counter[str]]:
    """Return the operations of a step of a loop by hand with DistributedDataParallel, and those of
    `TrainStep`.
    """
    comm = lockstep.init("cpu")
    given = batches(comm)
    model, optimizer, loss_fn = made(mlp)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def by_hand(batch: Batch) -> None:
        inputs, labels = batch.data
        optimizer.zero_grad(set_to_none=True)
        loss_fn(wrapped(inputs), labels).backward()
        optimizer.step()

    hand = operations_of_a_step(by_hand, given)
    return hand, operations_of_a_step(TrainStep(*made(mlp)).run, given)


def test_a_step_has_no_more_operations_than_one_by_hand(pool: Pool) -> None:
    for hand, ours in pool.run(operations_beside_those_by_hand, workers=2, backend="shm"):
        more = {name: number - hand[name] for name, number in ours.items() if number > hand[name]}
        assert ours.total() <= hand.total(), (
            f"{ours.total()} operations, by hand {hand.total()}; more: {more}"
        )
