"""What an optimizer was constructed with, and what of it a resumed run goes on with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError

__all__ = ["Group", "check_same_parameters", "constructed", "merge", "take_up"]

Group = dict[str, Any]
"""One parameter group: `parameters`, the names of its parameters, and its hyperparameters by name. `lr` is the
learning rate before any schedule."""

_NOT_HYPER = ("params", "param_names", "lr", "initial_lr")


def constructed(model: nn.Module, optimizer: Optimizer) -> list[Group]:
    """The parameter groups of `optimizer`; `initial_lr` is the learning rate before a schedule, where there is one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        hyper = {name: _plain(value) for name, value in group.items() if name not in _NOT_HYPER}
        own = [names.get(id(parameter), "") for parameter in group["params"]]
        groups.append({"parameters": own, "lr": _plain(group.get("initial_lr", group["lr"])), **hyper})
    return groups


def check_same_parameters(saved: Sequence[Group], ours: Sequence[Group]) -> None:
    """See that the groups have the same parameters in the same order, as state is kept by place.

    Raises:
        CheckpointError: naming the first difference.
    """
    if len(saved) != len(ours):
        expected = f"expected {len(ours)} parameter groups as here"
        raise CheckpointError(f"a checkpoint of another optimizer: {expected}, got {len(saved)}")
    for number, (theirs, here) in enumerate(zip(saved, ours, strict=True)):
        for name, wanted in zip_longest(theirs["parameters"], here["parameters"]):
            if name != wanted:
                raise CheckpointError(
                    "a checkpoint of another optimizer. The first difference in its parameters is in group "
                    f"{number}: here {wanted or 'no more'}, in the checkpoint {name or 'no more'}."
                )


def take_up(
    load: Callable[[dict[str, Any]], None], saved: Mapping[str, Any], then: Sequence[Group], now: Sequence[Group]
) -> list[str]:
    """Let an optimizer load a saved state, with hyperparameters as `merge` has them.

    Args:
        load: takes a state dict; the optimizer is over the same parameters, see `check_same_parameters`.
        saved: the saved optimizer's state dict.
        then: the groups as that optimizer was constructed.
        now: the groups as this one was.

    Returns:
        A text for each hyperparameter that is another than before.
    """
    groups, changes = merge(saved["param_groups"], then, now)
    load({**saved, "param_groups": groups})
    return changes


def merge(state: Sequence[Group], then: Sequence[Group], now: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """What a resumed run goes on with, and how that differs from before.

    A hyperparameter that is constructed otherwise now than it was then is as it is now. The others are as they were
    saved: a schedule or the user may have moved them on.

    Args:
        state: the param_groups of the saved optimizer's state dict.
        then: the groups as that optimizer was constructed.
        now: the groups as the new one was.

    Returns:
        param_groups for the new optimizer's state dict, and a text for each change.
    """
    merged, changes = [], []
    for group, before, after in zip(state, then, now, strict=True):
        hyper = {name: value for name, value in after.items() if name != "parameters"}
        differing = {name: value for name, value in hyper.items() if name not in before or before[name] != value}
        changes += [f"{name} {before[name]} → {value}" for name, value in differing.items() if name in before]
        if "lr" in differing:
            differing["initial_lr"] = differing["lr"]
        merged.append({**group, **copy.deepcopy(differing)})
    return merged, list(dict.fromkeys(changes))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return copy.deepcopy(value)
