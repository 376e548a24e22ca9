"""Which hyperparameters a resumed run continues with, and when two optimizers are over the same
parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.training.run.hyperparameters import (
    check_same_parameters,
    load_optimizer,
    merge_param_groups,
    named_param_groups,
)


def optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters(), **options)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]  # as TrainStep does
    return made


def test_what_is_constructed() -> None:
    model = nn.Linear(2, 3)
    made = optimizer(model, lr=0.1, weight_decay=0.3)
    made.param_groups[0]["lr"] = 0.01  # moved by a schedule
    (group,) = named_param_groups(model, made)
    assert group["parameters"] == ["weight", "bias"]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.3, (0.9, 0.999))
    assert not {"params", "initial_lr"} & set(group)


def test_a_rate_that_is_a_tensor_is_a_number_there() -> None:
    model = nn.Linear(2, 3)
    (group,) = named_param_groups(model, optimizer(model, lr=torch.tensor(0.5)))
    assert type(group["lr"]) is float


def test_merging() -> None:
    then = [{"parameters": ["a"], "lr": 0.1, "momentum": 0.9, "nesterov": False}]
    now = [{"parameters": ["a"], "lr": 0.2, "momentum": 0.9, "nesterov": False, "fused": True}]
    state = [{"params": [0], "lr": 0.01, "initial_lr": 0.1, "momentum": 0.8, "nesterov": False}]
    merged, changes = merge_param_groups(state, then, now)
    assert merged == [
        # momentum was moved on while the run went; fused is new in this version and no choice of
        # the user's
        {
            "params": [0],
            "lr": 0.2,
            "initial_lr": 0.2,
            "momentum": 0.8,
            "nesterov": False,
            "fused": True,
        }
    ]
    assert changes == ["lr 0.1 → 0.2"]
    assert state[0]["lr"] == 0.01


def test_groups_may_change_apart() -> None:
    then = [{"parameters": ["a"], "lr": 0.1}, {"parameters": ["b"], "lr": 0.1}]
    state = [
        {"params": [0], "lr": 0.1, "initial_lr": 0.1},
        {"params": [1], "lr": 0.1, "initial_lr": 0.1},
    ]
    merged, changes = merge_param_groups(state, then, [then[0], {"parameters": ["b"], "lr": 0.3}])
    assert [group["lr"] for group in merged] == [0.1, 0.3]
    assert changes == ["lr 0.1 → 0.3"]


def test_the_state_is_that_of_the_checkpoint() -> None:
    model = nn.Linear(2, 3)
    old, new = optimizer(model, lr=0.1), optimizer(model, lr=0.2, betas=(0.5, 0.6))
    then, now = named_param_groups(model, old), named_param_groups(model, new)
    model(torch.ones(1, 2)).sum().backward()
    old.step()
    changes = load_optimizer(new.load_state_dict, old.state_dict(), then, now)
    assert changes == ["lr 0.1 → 0.2", "betas (0.9, 0.999) → (0.5, 0.6)"]
    for ours, theirs in zip(new.state.values(), old.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([["a", "b"], ["c"]], None),
        ([["a", "b"]], "expected 2 parameter groups as here, got 1"),
        ([["b", "a"], ["c"]], "group 0: here a, in the checkpoint b"),
        ([["a", "b", "d"], ["c"]], "group 0: here no more, in the checkpoint d"),
        ([["a"], ["c"]], "group 0: here b, in the checkpoint no more"),
        ([["a", "b"], ["d"]], "group 1: here c, in the checkpoint d"),
    ],
)
def test_the_same_parameters(saved: list[list[str]], said: str | None) -> None:
    ours = [{"parameters": ["a", "b"]}, {"parameters": ["c"]}]
    theirs = [{"parameters": names} for names in saved]
    if said is None:
        check_same_parameters(theirs, ours)
    else:
        with pytest.raises(CheckpointError, match=said):
            check_same_parameters(theirs, ours)
