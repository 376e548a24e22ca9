"""Whether a saved state can be gone on from with this very run; nothing is changed by asking."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..packing import StoredTensor
from ..strategies.base import Strategy
from ..strategies.conditions import differences
from .hyperparameters import Group, check_same_parameters

__all__ = ["check_conditions", "check_fits", "conditions_of"]

_log = logging.getLogger(__name__)

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


def conditions_of(strategy: Strategy, global_batch: int, precision: str) -> dict[str, Any]:
    """What the bits of a run with shards depend on beside model, data and optimizer; empty for other runs."""
    own = strategy.conditions_of()
    return own and {"shards": strategy.shards, "global_batch": global_batch, "precision": precision, **own}


def check_conditions(saved: Mapping[str, Any], now: Mapping[str, Any], allow_different: bool, speaks: bool) -> None:
    """See that a run goes on under the conditions that it had, where it has promised the same bits.

    Args:
        saved: what `conditions_of` gave then.
        now: what it gives now.
        allow_different: whether other conditions are only logged.
        speaks: whether this worker is the one to log.

    Raises:
        CheckpointError: naming all differences.
    """
    found = [f"{name} {then!r} → {here!r}" for name, then, here in differences(saved, now)]
    if not found:
        return
    if not allow_different:
        raise CheckpointError(
            f"expected the conditions that the checkpoint was made under, as others give other bits; got "
            f"{', '.join(found)}. allow_different=True (--allow-different) goes on all the same."
        )
    if speaks:
        _log.warning("the run goes on under other conditions than before, and with other bits: %s", ", ".join(found))


def _check_same_model(saved: Any, model: nn.Module) -> None:
    ours = {name: _shape(value) for name, value in model.state_dict().items()}
    theirs = {str(name): _shape(value) for name, value in saved.items()}
    for name in [*ours, *theirs]:
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            difference = f"{name}: here {here}, in the checkpoint {there}"
            raise CheckpointError(f"a checkpoint of another model. The first difference is {difference}.")


def _shape(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, (torch.Tensor, StoredTensor)) else "no tensor"
