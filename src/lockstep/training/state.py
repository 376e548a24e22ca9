"""The state of a training run as one plain mapping, free of workers and devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .compatibility import check_fits
from .hyperparameters import constructed, take_up
from .position import Position

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["load_state", "state_of"]

_log = logging.getLogger(__name__)


def state_of(trainer: Trainer, wanted: bool = True) -> dict[str, Any]:
    """All that another process needs to go on from here, with any number of workers; called by every worker.

    Args:
        trainer: whose state it is.
        wanted: whether this worker uses what it gets; if not, model and optimizer may be left out.
    """
    strategy, model, optimizer = trainer.step.strategy, trainer.model, trainer.optimizer
    added = constructed(model, optimizer)[len(trainer.hyperparameters) :]
    return {
        "model": strategy.model_state(model, wanted),
        "optimizer": strategy.optimizer_state(model, optimizer, wanted),
        "hyperparameters": [*trainer.hyperparameters, *added],
        "step": trainer.step.state_dict(),
        "loader": trainer.position.state_dict(),
        "totals": trainer.totals.state_dict(),
        "history": trainer.history,
        "conditions": trainer.conditions,
    }


def load_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Take up a saved state.

    Raises:
        CheckpointError: before anything is changed, when it is of another model or optimizer.
    """
    strategy, model = trainer.step.strategy, trainer.model
    check_fits(state, model, trainer.hyperparameters)
    strategy.load_model_state(model, state["model"])
    load = partial(strategy.load_optimizer_state, model, trainer.optimizer)
    changes = take_up(load, state["optimizer"], state["hyperparameters"], trainer.hyperparameters)
    if changes and trainer.comm.rank == 0:
        _log.warning("the run goes on with other hyperparameters than before: %s", ", ".join(changes))
    trainer.step.load_state_dict(state["step"])
    trainer.history, trainer.position = list(state["history"]), Position(state["loader"])
    trainer.totals.load_state_dict(state["totals"])
    trainer.saver.last = None  # was of the state before
