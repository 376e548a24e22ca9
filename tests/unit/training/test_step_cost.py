"""A step has no more operations of torch than that of a loop by hand: what it costs of its own,
without a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import lockstep
from lockstep.training.callbacks import Callback
from support.operation_counts import Operations

BATCH, FEW, MANY = 32, 8, 24

Side = Callable[[TensorDataset], Callable[[], None]]
"""Data → a function that trains an epoch of them."""


def objects() -> tuple[nn.Module, Optimizer, nn.Module]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()


def in_passes(passes: int) -> Side:
    """Return a loop by hand that computes each batch in so many passes, to save memory."""

    def side(data: TensorDataset) -> Callable[[], None]:
        model, optimizer, loss_fn = objects()
        inputs, labels = data.tensors

        def epoch() -> None:
            order = torch.randperm(len(data))
            for start in range(0, len(data), BATCH):
                optimizer.zero_grad(set_to_none=True)
                for indices in order[start : start + BATCH].chunk(passes):
                    loss_fn(model(inputs[indices]), labels[indices]).backward()
                optimizer.step()

        return epoch

    return side


def with_options(**options: Any) -> Side:
    def train_step(data: TensorDataset) -> Callable[[], None]:
        step = lockstep.TrainStep(*objects(), **options)
        loader = lockstep.Loader(
            data, global_batch_size=BATCH, virtual_workers=options.get("virtual_workers")
        )

        def epoch() -> None:
            for batch in loader:
                step.run(batch)

        return epoch

    return train_step


def with_callbacks(*callbacks: Callback) -> Side:
    def trainer(data: TensorDataset) -> Callable[[], None]:
        made = lockstep.Trainer(*objects(), global_batch_size=BATCH, callbacks=list(callbacks))
        loader = lockstep.Loader(data, global_batch_size=BATCH)
        done = 0

        def epoch() -> None:
            nonlocal done
            done += 1
            made.fit(loader, epochs=done)

        return epoch

    return trainer


class Reading(Callback):
    """Reads every loss, as a program does that shows them."""

    def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
        self.last = loss


def operations_of_a_step(side: Side) -> Counter[str]:
    """Return the operations of a step, as the difference of two epochs of other lengths; both are
    second epochs.
    """
    found = {}
    for steps in (FEW, MANY):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(BATCH * steps, 16, generator=generator)
        epoch = side(
            TensorDataset(inputs, torch.randint(0, 10, (BATCH * steps,), generator=generator))
        )
        epoch()
        with Operations() as mode:
            epoch()
        found[steps] = mode.counts
    names = found[MANY].keys() | found[FEW].keys()
    per_step = {name: (found[MANY][name] - found[FEW][name]) / (MANY - FEW) for name in names}
    return Counter({name: round(number) for name, number in per_step.items()})


@pytest.mark.usefixtures("as_in_a_new_process")
@pytest.mark.parametrize(
    "side",
    [with_options(), with_callbacks(), with_callbacks(Reading())],
    ids=["TrainStep", "Trainer", "with on_loss"],
)
def test_a_step_has_no_more_operations_than_one_by_hand(side: Side) -> None:
    hand, ours = operations_of_a_step(in_passes(1)), operations_of_a_step(side)
    more = {name: number - hand[name] for name, number in ours.items() if number > hand[name]}
    assert ours.total() <= hand.total(), (
        f"{ours.total()} operations, by hand {hand.total()}; more than there: {more}"
    )
    assert more.keys() <= {"aten._local_scalar_dense.default"}  # numbers that are read


@pytest.mark.usefixtures("as_in_a_new_process")
def test_another_shard_has_few_operations_more_than_another_pass_by_hand() -> None:
    """More than those by hand are: three numbers are read, the totals are a tensor, and the shards'
    are added up.
    """

    def of_another(few: Counter[str], many: Counter[str]) -> float:
        return (many.total() - few.total()) / 6

    hand = of_another(*(operations_of_a_step(in_passes(passes)) for passes in (2, 8)))
    ours = of_another(
        *(operations_of_a_step(with_options(virtual_workers=shards)) for shards in (2, 8))
    )
    assert ours <= hand + 7, f"{ours:.1f} operations, by hand {hand:.1f}"
