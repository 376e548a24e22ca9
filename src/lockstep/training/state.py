"""The state of a training run as one plain mapping, free of workers and devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_tensors
from .compatibility import check_fits
from .hyperparameters import constructed, take_up
from .position import Position

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["load_state", "state_of"]

_log = logging.getLogger(__name__)


def state_of(trainer: Trainer, whole: bool = True) -> dict[str, Any]:
    """All that another process needs to go on from here, with any number of workers, but the state of callbacks.

    Args:
        trainer: whose state it is.
        whole: whether tensors that are spread over workers are gathered, for which every worker has to call this.
    """
    strategy, model, optimizer = trainer.step.strategy, trainer.model, trainer.optimizer
    added = constructed(model, optimizer)[len(trainer.hyperparameters) :]
    return {
        "model": strategy.model_state(model) if whole else model.state_dict(),
        "optimizer": strategy.optimizer_state(model, optimizer) if whole else optimizer.state_dict(),
        "hyperparameters": [*trainer.hyperparameters, *added],
        "step": trainer.step.state_dict(),
        "loader": trainer.position.state_dict(),
        "totals": trainer.totals.state_dict(),
        "history": trainer.history,
        "conditions": trainer.conditions,
    }


def load_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Take up a saved state, but for that of callbacks.

    Args:
        trainer: what takes it up.
        state: tensors of model and optimizer may be stored tensors; all workers call this together then.

    Raises:
        CheckpointError: before anything is changed, when it is of another model or optimizer; later, when a stored
            tensor cannot be read.
    """
    strategy, model = trainer.step.strategy, trainer.model
    check_fits(state, model, trainer.hyperparameters)
    strategy.load_model_state(model, state["model"])
    load = partial(strategy.load_optimizer_state, model, trainer.optimizer)
    changes = take_up(load, state["optimizer"], state["hyperparameters"], trainer.hyperparameters)
    if changes and trainer.comm.rank == 0:
        _log.warning("the run goes on with other hyperparameters than before: %s", ", ".join(changes))
    rest = read_tensors({part: state[part] for part in ("step", "history", "loader", "totals")})
    trainer.step.load_state_dict(rest["step"])
    trainer.history, trainer.position = list(rest["history"]), Position(rest["loader"])
    trainer.totals.load_state_dict(rest["totals"])
    trainer.saver.last = None  # was of the state before
