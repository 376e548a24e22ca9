"""Puts the state of a training run into checkpoints, and takes it up again from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint import Checkpoint, CheckpointStore, read
from ..errors import CheckpointError

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Saver"]


class Saver:
    """The checkpoints of one training run; every method is called by all workers together.

    Args:
        trainer: whose state it is.
        keep: so many of the newest checkpoints stay.
    """

    def __init__(self, trainer: Trainer, keep: int = 3) -> None:
        self._trainer, self._keep = trainer, keep
        self._last: tuple[int, Path] | None = None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that this run has written or was resumed from."""
        return None if self._last is None else self._last[1]

    def save(self, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, unless this step has one already; rank 0 does the writing.

        Raises:
            CheckpointError: on every worker, when it cannot be written, or the run has no folder.
        """
        trainer = self._trainer
        step = trainer.step.steps_done
        if self._last is None or self._last[0] != step:
            store, info = self._store(), self._info()
            write = lambda: store.save(state, step=step, epoch=trainer.epoch, info=info)  # noqa: E731
            self._last = (step, trainer.comm.on_rank0(write))
        return self._last[1]

    def _store(self) -> CheckpointStore:
        if self._trainer.out is None:
            raise CheckpointError("this run has no folder to save in: give the Trainer out=")
        return CheckpointStore(self._trainer.out / "checkpoints", keep=self._keep)

    def _info(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "optimizer": type(trainer.optimizer).__name__,
            "workers": trainer.comm.size,
            "global_batch": trainer.global_batch,
            "torch": str(torch.__version__),
        }

    def load(self, which: str | Path) -> Checkpoint | None:
        """A checkpoint that fits the trainer's model and optimizer; None for "latest" where there is none yet.

        Raises:
            CheckpointError: when it is damaged or does not fit.
        """
        path = Path(which)
        if which == "latest":
            newest = self._trainer.comm.on_rank0(lambda: self._store().latest())
            if newest is None:
                return None
            path = newest
        found = read(path)
        self._check_fits(found)
        self._last = (found.step, path)
        return found

    def _check_fits(self, found: Checkpoint) -> None:
        _check_same_model(found, self._trainer.model)
        saved, ours = found.info.get("optimizer"), type(self._trainer.optimizer).__name__
        if saved != ours:
            raise CheckpointError(f"{found.path}: expected a checkpoint of a run with {ours}, got one with {saved}")


def _check_same_model(found: Checkpoint, model: nn.Module) -> None:
    saved = found.state.get("model")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{found.path}: expected a checkpoint of a training run, got one without a model")
    ours = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {str(name): list(tensor.shape) for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{found.path}: a checkpoint of another model. The first difference is {name}: here "
                f"{_shape(ours.get(name))}, in the checkpoint {_shape(theirs.get(name))}."
            )


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"
