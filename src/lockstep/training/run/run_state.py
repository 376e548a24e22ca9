"""The state of a training run: everything in a checkpoint except callbacks' state, and whether the
run can resume.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ...checkpoint.folder import read_tensors
from ..step.train_step import TrainStep
from .epoch_totals import EpochTotals, Row
from .hyperparameters import load_optimizer, named_param_groups
from .position import Position
from .saved_state import (
    check_determinism,
    check_fits,
    checksum_of_parameters,
    other_dtypes,
    with_names_of,
)

_log = logging.getLogger(__name__)


class RunState:
    """The model, the optimizer and the progress of a run: everything in a checkpoint except
    callbacks' state.

    Args:
        step: the training step, with its model, optimizer, strategy and communicator.
        global_batch_size: samples in one step, over all workers.
        allow_different_hardware: whether to resume under determinism settings that give other bits.
        saves_frozen: whether parameters that are not trained are in the state.

    Attributes:
        step: the training step.
        hyperparameters: the parameter groups with which the optimizer was constructed.
        position: the position in the training data.
        totals: loss and speed of the epoch in progress.
        history: one row for each epoch.
        epoch: the epoch in progress, from 0.
    """

    def __init__(
        self,
        step: TrainStep,
        global_batch_size: int,
        allow_different_hardware: bool = False,
        saves_frozen: bool = True,
    ) -> None:
        self.step = step
        self.global_batch_size = global_batch_size
        self.saves_frozen = saves_frozen
        self._frozen: dict[str, Any] = {}
        self._allow_different = allow_different_hardware
        self.hyperparameters = named_param_groups(step.model, step.optimizer)
        self.position = Position()
        self.totals = EpochTotals(step.comm.device)
        self.history: list[Row] = []
        self.epoch = 0

    def determinism_settings(self) -> dict[str, Any]:
        """Return the settings that the bits of the run depend on; empty without virtual workers."""
        strategy = self.step.strategy
        settings = strategy.determinism_settings()
        if not settings:
            return {}
        return {
            "virtual_workers": strategy.virtual_workers,
            "global_batch_size": self.global_batch_size,
            "precision": self.step.precision.name,
            **settings,
        }

    def state_dict(self, full: bool = True) -> dict[str, Any]:
        """Return the state to resume from in another process, with any number of workers, except
        callbacks' state.

        Args:
            full: whether to gather sharded tensors on every worker. Otherwise those of parameters
                stay as they are, and rank 0 alone gets an optimizer's state that is divided among
                the workers. Every worker must call this.
        """
        strategy = self.step.strategy
        model = self.step.model
        optimizer = self.step.optimizer
        added = named_param_groups(model, optimizer)[len(self.hyperparameters) :]
        saved = strategy.model_state(model) if full else model.state_dict()
        frozen = {} if self.saves_frozen else self.left_out()
        return {
            "model": {
                name: value for name, value in saved.items() if name not in frozen.get("names", ())
            },
            **({"frozen": frozen} if frozen else {}),
            "optimizer": self._optimizer_state(full),
            "hyperparameters": [*self.hyperparameters, *added],
            "step": self.step.state_dict(),
            "loader": self.position.state_dict(),
            "totals": self.totals.state_dict(),
            "history": self.history,
            "determinism_settings": self.determinism_settings(),
        }

    def _optimizer_state(self, full: bool) -> dict[str, Any]:
        strategy = self.step.strategy
        if not full and strategy.shards is None:
            return self.step.optimizer.state_dict()
        wanted = full or self.step.comm.rank == 0
        return strategy.optimizer_state(self.step.model, self.step.optimizer, wanted)

    def left_out(self) -> dict[str, Any]:
        """Return the names of the parameters that are not trained, and their checksum, which is
        computed once.
        """
        parameters = self.step.model.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in parameters if not parameter.requires_grad]
        if names != self._frozen.get("names"):
            self._frozen = {
                "names": names,
                "checksum": checksum_of_parameters(self.step.model, names),
            }
        return self._frozen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Args:
            state: the state; with stored tensors of model and optimizer, all workers call this
                together.

        Raises:
            CheckpointError: before anything is changed, if it is of another model or optimizer;
                later, if a stored tensor cannot be read.
        """
        strategy = self.step.strategy
        model = self.step.model
        optimizer = self.step.optimizer
        state = with_names_of(model, state)
        check_fits(state, model, self.hyperparameters)
        converted = other_dtypes(state["model"], model)
        strategy.load_model_state(model, {**model.state_dict(), **state["model"]})
        load = partial(strategy.load_optimizer_state, model, optimizer)
        changes = load_optimizer(
            load, state["optimizer"], state["hyperparameters"], self.hyperparameters
        )
        if changes and self.step.comm.rank == 0:
            _log.warning(
                "the run continues with other hyperparameters than before: %s", ", ".join(changes)
            )
        self._convert(converted)
        rest = read_tensors({part: state[part] for part in ("step", "history", "loader", "totals")})
        self.step.load_state_dict(rest["step"])
        self.history = list(rest["history"])
        self.position = Position(rest["loader"])
        self.totals.load_state_dict(rest["totals"])

    def _convert(self, dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]]) -> None:
        """Convert the optimizer's state of parameters that have another dtype than in the loaded
        state, and say so.
        """
        if not dtypes:
            return
        for name, parameter in self.step.model.named_parameters(remove_duplicate=False):
            if name in dtypes:
                _convert_state(self.step.optimizer, parameter, dtypes[name][0])
        if self.step.comm.rank == 0:
            shown = [f"{name} from {then} to {now}" for name, (then, now) in dtypes.items()]
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            _log.warning(
                "the model has other dtypes than in the checkpoint, so that its values and their "
                "optimizer state were converted, and the run goes on with other results: %s%s",
                ", ".join(shown[:3]),
                more,
            )

    def check_resumable(self, state: Mapping[str, Any]) -> None:
        """Check that this run can resume from a saved state, without changing anything.

        Raises:
            CheckpointError: for another model or optimizer, or other determinism settings.
        """
        state = with_names_of(self.step.model, state)
        check_fits(state, self.step.model, self.hyperparameters)
        other_dtypes(state["model"], self.step.model)
        saved = state.get("determinism_settings", {})
        logs = self.step.comm.rank == 0
        check_determinism(saved, self.determinism_settings(), self._allow_different, logs)


def _convert_state(optimizer: Optimizer, parameter: torch.Tensor, saved_dtype: torch.dtype) -> None:
    """Convert a parameter's optimizer state that had the parameter's dtype, when that was
    another.
    """
    for name, value in optimizer.state.get(parameter, {}).items():
        if name != "step" and isinstance(value, torch.Tensor) and value.dtype == saved_dtype:
            optimizer.state[parameter][name] = value.to(parameter.dtype)
