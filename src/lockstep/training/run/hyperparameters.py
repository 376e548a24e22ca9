"""The hyperparameters of an optimizer's parameter groups: those of a checkpoint, and those that
were given since.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import CheckpointError
from ...parallel.optimizer_parts import hyperparameters_of

ParamGroup = dict[str, Any]
"""One parameter group: `parameters`, the names of its parameters, and its hyperparameters by name.
`lr` is the learning rate without the factor of a schedule."""

_NOT_HYPER = ("param_names", "lr", "initial_lr")


def named_param_groups(model: nn.Module, optimizer: Optimizer) -> list[ParamGroup]:
    """Return the parameter groups of `optimizer` with names of parameters; `lr` is `initial_lr` if
    it is set.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        hyper = {
            name: _plain_value(value)
            for name, value in hyperparameters_of(group).items()
            if name not in _NOT_HYPER
        }
        parameters = [names.get(id(parameter), "") for parameter in group["params"]]
        groups.append(
            {
                "parameters": parameters,
                "lr": _plain_value(group.get("initial_lr", group["lr"])),
                **hyper,
            }
        )
    return groups


def check_same_parameters(saved: Sequence[ParamGroup], ours: Sequence[ParamGroup]) -> None:
    """Check that the groups have the same parameters in the same order; an optimizer's state is
    keyed by position.

    Raises:
        CheckpointError: naming the first difference.
    """
    if len(saved) != len(ours):
        expected = f"expected {len(ours)} parameter groups as here"
        raise CheckpointError(f"a checkpoint of another optimizer: {expected}, got {len(saved)}")
    for number, (saved_group, our_group) in enumerate(zip(saved, ours, strict=True)):
        for name, expected_name in zip_longest(saved_group["parameters"], our_group["parameters"]):
            if name != expected_name:
                raise CheckpointError(
                    "a checkpoint of another optimizer. The first difference in its parameters is "
                    f"in group {number}: here {expected_name or 'no more'}, in the checkpoint "
                    f"{name or 'no more'}."
                )


def load_optimizer(
    load: Callable[[dict[str, Any]], None],
    saved: Mapping[str, Any],
    then: Sequence[ParamGroup],
    now: Sequence[ParamGroup],
) -> list[str]:
    """Load a saved optimizer state, with hyperparameters merged by `merge_param_groups`.

    Args:
        load: the function that loads a state dict; the optimizer has the same parameters, see
            `check_same_parameters`.
        saved: the saved optimizer's state dict.
        then: the groups with which the saved optimizer was constructed.
        now: the groups with which this optimizer was constructed.

    Returns:
        A description of each changed hyperparameter.
    """
    groups, changes = merge_param_groups(saved["param_groups"], then, now)
    load({**saved, "param_groups": groups})
    return changes


def merge_param_groups(
    state: Sequence[ParamGroup], then: Sequence[ParamGroup], now: Sequence[ParamGroup]
) -> tuple[list[ParamGroup], list[str]]:
    """Merge the hyperparameters of a saved and a new optimizer.

    A hyperparameter with which the new optimizer was constructed differently has its new value. The
    others have their saved values, which a schedule or the user may have changed.

    Args:
        state: the param_groups of the saved optimizer's state dict.
        then: the groups with which the saved optimizer was constructed.
        now: the groups with which the new optimizer was constructed.

    Returns:
        param_groups for the new optimizer's state dict, and a description of each change.
    """
    merged = []
    changes = []
    for group, before, after in zip(state, then, now, strict=True):
        hyper = {name: value for name, value in after.items() if name != "parameters"}
        differing = {
            name: value
            for name, value in hyper.items()
            if name not in before or before[name] != value
        }
        changes += [
            f"{name} {before[name]} → {value}"
            for name, value in differing.items()
            if name in before
        ]
        if "lr" in differing:
            differing["initial_lr"] = differing["lr"]
        merged.append({**group, **copy.deepcopy(differing)})
    return merged, list(dict.fromkeys(changes))


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return copy.deepcopy(value)
