"""The mark of an optimizer whose state is divided among the workers, so that each has a part."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ..errors import ConfigError

__all__ = [
    "NOT_HYPERPARAMETERS",
    "check_whole",
    "hyperparameters_of",
    "part_of",
    "refuse_other_parts",
    "refused_part",
    "set_part",
]

# The entry of an optimizer's first parameter group that describes the part: parameter groups are
# what copies, pickles and state dicts of an optimizer have in common.
_MARK = "part_of_shard_optimizer"
NOT_HYPERPARAMETERS = frozenset({"params", _MARK})
"""The entries of a parameter group that are no hyperparameters."""

_refusing = weakref.WeakSet[Optimizer]()  # those that refuse the parts of others


def part_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what describes the part of a divided state: the worker, and the numbers of its
    parameters; None for a whole state.

    Args:
        groups: the parameter groups of an optimizer, or of its state dict.
    """
    return groups[0].get(_MARK) if groups else None


def set_part(optimizer: Optimizer, part: dict[str, Any]) -> None:
    """Let an optimizer say which part of a divided state it has."""
    optimizer.param_groups[0][_MARK] = part


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a parameter group of an optimizer, or of its state dict, has besides its
    parameters; what describes a part of a divided state is no hyperparameter.
    """
    return {name: value for name, value in group.items() if name not in NOT_HYPERPARAMETERS}


def check_whole(optimizer: Optimizer) -> None:
    """Check that an optimizer has its whole state, for a training that does not divide it.

    Parameters whose state other workers have would begin anew, on each worker others.

    Raises:
        ConfigError: if it has a part of a state that was divided among workers.
    """
    part = part_of(optimizer.param_groups)
    if part is not None:
        raise refused_part(
            part, "the whole state of all parameters, for a training that does not divide it"
        )


def refused_part(part: dict[str, Any], expected: str) -> ConfigError:
    """Return the error for an optimizer that has the part of a divided state, where another one is
    expected.
    """
    return ConfigError(
        "optimizer",
        expected,
        found=f"the part of a state that {part['worker']} had with shard_optimizer=True",
        hint="Make a new optimizer, and load into it the whole state: what "
        "TrainStep.full_optimizer_state() returns, or optimizer.full_state_dict() after "
        "lockstep.prepare(); all workers call it.",
    )


def refuse_other_parts(optimizer: Optimizer) -> None:
    """Let an optimizer refuse, from now on, to load the part of a divided state that another worker
    had.

    Parameters whose state is missing would begin anew, which nobody would notice.
    """
    if optimizer not in _refusing:
        optimizer.register_load_state_dict_pre_hook(_check_loaded)
        _refusing.add(optimizer)


def _check_loaded(optimizer: Optimizer, state: dict[str, Any]) -> None:
    part = part_of(state.get("param_groups", ()))
    if part is not None and part != part_of(optimizer.state_dict()["param_groups"]):
        raise ConfigError(
            "state_dict",
            "the state of all parameters, or the part that this worker had",
            found=f"the part that {part['worker']} had with shard_optimizer=True",
            hint="Save what optimizer.full_state_dict() returns after lockstep.prepare(), or "
            "TrainStep.full_optimizer_state(); all workers call it.",
        )
