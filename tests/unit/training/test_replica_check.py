"""What a worker says of its hyperparameters and weights in a step's sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lockstep.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.training.replica_check import ReplicaCheck

TWO = cast(
    Communicator,
    SimpleNamespace(size=2, rank=0, device=torch.device("cpu"), is_joining=False),
)


def check(every: int = 1, model: nn.Module | None = None, **group: Any) -> ReplicaCheck:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0].update(group)
    return ReplicaCheck(TWO, model, optimizer, every=every)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (0.1, 0.1, True),
        (0.1, 0.01, False),
        (0, False, True),
        (1, torch.tensor(1.0), True),
        ((0.9, 0.99), (0.9, 0.999), False),
        ((0.9, 0.99), [0.9, 0.99], True),
        ("a", "b", False),
        (float("nan"), float("nan"), True),
        (object(), print, True),
        (torch.ones(3), torch.zeros(3), True),  # a store of the optimizer's, not a number
    ],
)
def test_hyperparameters(ours: Any, theirs: Any, same: bool) -> None:
    marks = [check(own=value).marks(1)[:2].tolist() for value in (ours, theirs)]
    assert (marks[0] == marks[1]) is same
    assert marks[0][1] == marks[0][0] ** 2


def test_a_value_of_every_parameter_now_and_then() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.Linear(4, 1).double(),
        nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
    )
    looked = check(3, model)
    assert [bool(looked.marks(step)[2]) for step in range(4)] == [True, False, False, True]
    before = float(looked.marks(0)[2])
    for p in model.parameters():
        with torch.no_grad():
            p.neg_()
            assert float(looked.marks(0)[2]) != before
            p.neg_()
    assert float(looked.marks(0)[2]) == before


def test_each_value_comes_in_its_turn() -> None:
    model = nn.Linear(3, 4)
    seen = {float(value) for step in range(200) for value in check(1, model)._sample_weights(step)}
    assert seen == {float(value) for p in model.parameters() for value in p.detach().reshape(-1)}


def test_switched_off_the_replica_check_compares_nothing() -> None:
    assert len(check(0).marks(0)) == 0
    with pytest.raises(
        ConfigError, match="replica_check: expected a whole number of at least 0, got -1"
    ):
        check(-1)
