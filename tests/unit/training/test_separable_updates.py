"""Whether an optimizer updates each tensor by itself, tried on small copies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.errors import ConfigError
from lockstep.training.step.separable_updates import check_separable
from support.optimizers import DIVISIBLE


def optimizer_after_a_step() -> torch.optim.AdamW:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", DIVISIBLE)
def test_optimizers_pass_with_and_without_a_state(name: str) -> None:
    """Adafactor has a number for each row and column in its state, and so it is at a checkpoint."""
    weights = [nn.Parameter(torch.ones(7, 5)), nn.Parameter(torch.ones(5, 4))]
    optimizer = DIVISIBLE[name](weights)
    check_separable(optimizer)
    for number in range(2):
        for weight in weights:
            generator = torch.Generator().manual_seed(number)
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        check_separable(optimizer)


def test_numbers_that_are_none_are_no_difference() -> None:
    """A training that has diverged is to be told so, and not that its optimizer does not fit."""
    optimizer = optimizer_after_a_step()
    for entries in optimizer.state.values():
        entries["exp_avg"].fill_(math.nan)
    check_separable(optimizer)


def test_hooks_of_all_optimizers_see_no_trial() -> None:
    optimizer = optimizer_after_a_step()
    seen: list[torch.optim.Optimizer] = []
    handles = [
        register_optimizer_step_pre_hook(lambda stepped, *_: seen.append(stepped)),
        register_optimizer_step_post_hook(lambda stepped, *_: seen.append(stepped)),
    ]
    try:
        check_separable(optimizer)
        assert seen == []
        optimizer.step()
        assert seen == [optimizer, optimizer]
    finally:
        for handle in handles:
            handle.remove()


class LosesTheSign(torch.optim.SGD):
    """Gives the first tensor -0.0 if others have gradients as well."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        is_alone = sum(p.grad is not None for p in parameters) < len(parameters)
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    p.fill_(0.0 if is_alone else -0.0)


def test_the_sign_of_zero_is_a_difference() -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with pytest.raises(ConfigError, match="depends on the gradients of others"):
        check_separable(LosesTheSign(weights, lr=0.1))
