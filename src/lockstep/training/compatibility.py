"""Whether a saved state is one of this very model and optimizer; nothing is changed by asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from .hyperparameters import Group, check_same_parameters

__all__ = ["check_fits"]

_PARTS = ("model", "optimizer", "hyperparameters", "step", "loader", "totals", "history")


def check_fits(state: Mapping[str, Any], model: nn.Module, hyperparameters: Sequence[Group]) -> None:
    """See that `state`, as `Trainer.state_dict` makes it, can be taken up.

    Args:
        state: the saved state.
        model: the model here.
        hyperparameters: the optimizer here, see `hyperparameters.constructed`.

    Raises:
        CheckpointError: saying what is missing, or which is the first difference.
    """
    missing = [part for part in _PARTS if part not in state]
    if missing:
        raise CheckpointError(f"expected a checkpoint of a training run, got one without {', '.join(missing)}")
    _check_same_model(state["model"], model)
    check_same_parameters(state["hyperparameters"], hyperparameters)


def _check_same_model(saved: Any, model: nn.Module) -> None:
    ours = {name: _shape(value) for name, value in model.state_dict().items()}
    theirs = {str(name): _shape(value) for name, value in saved.items()}
    for name in [*ours, *theirs]:
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            difference = f"{name}: here {here}, in the checkpoint {there}"
            raise CheckpointError(f"a checkpoint of another model. The first difference is {difference}.")


def _shape(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"
