"""Puts the state of a training run into checkpoints, and finds the one to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ..checkpoint import Checkpoint, CheckpointStore, read
from ..communicator import Communicator
from ..errors import CheckpointError, ConfigError, LockstepError
from .compatibility import check_conditions, check_fits

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Saver"]

T = TypeVar("T")


class Saver:
    """The checkpoints of one training run; every method is called by all workers together.

    Args:
        trainer: whose state it is.
        keep: so many of the newest checkpoints stay.

    Attributes:
        last: (step, path) of the newest checkpoint that this run has written or gone on from, if any.

    Raises:
        ConfigError: `keep` is no whole number of at least 1.
    """

    def __init__(self, trainer: Trainer, keep: int) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError("keep", "a whole number of at least 1", keep)
        self._trainer, self._keep = trainer, keep
        self.last: tuple[int, Path] | None = None

    @property
    def last_path(self) -> Path | None:
        """Where that is."""
        return None if self.last is None else self.last[1]

    @property
    def last_step(self) -> int | None:
        """Of which step it is."""
        return None if self.last is None else self.last[0]

    def save(self, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, over one of this step if there is one; rank 0 does the writing.

        Raises:
            CheckpointError: on every worker, when it cannot be written, or the run has no folder.
        """
        trainer = self._trainer
        step = trainer.step.steps_done
        store, info = self._store(), self._info()
        path = trainer.comm.on_rank0(lambda: store.save(state, step=step, epoch=trainer.epoch, info=info))
        self.last = (step, path)
        return path

    def _store(self) -> CheckpointStore:
        if self._trainer.out is None:
            raise CheckpointError("this run has no folder for checkpoints: give the Trainer out=")
        return CheckpointStore(self._trainer.out / "checkpoints", keep=self._keep)

    def _info(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "optimizer": type(trainer.optimizer).__name__,
            "workers": trainer.comm.size,
            "global_batch": trainer.global_batch,
            "torch": str(torch.__version__),
        }

    def find(self, which: str | Path) -> Checkpoint | None:
        """A checkpoint that fits the trainer's model and optimizer; None for "latest" where there is none yet.

        Args:
            which: a checkpoint, the folder of a run for the newest in it, or "latest" for the newest of this run.

        Raises:
            CheckpointError: on every worker, when it is damaged or does not fit, for one worker at least.
        """
        path = self._trainer.comm.on_rank0(lambda: self._store().latest() if which == "latest" else _named(Path(which)))
        return None if path is None else _on_all(self._trainer.comm, lambda: self._read(path))

    def _read(self, path: Path) -> Checkpoint:
        found, trainer = read(path), self._trainer
        try:
            check_fits(found.state, trainer.model, trainer.hyperparameters)
            saved, speaks = found.state.get("conditions", {}), trainer.comm.rank == 0
            check_conditions(saved, trainer.conditions, trainer.allow_different, speaks)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        kind, ours = found.info.get("optimizer"), type(trainer.optimizer).__name__
        if kind != ours:
            raise CheckpointError(f"{path}: expected a checkpoint of a run with {ours}, got one with {kind}")
        return found


def _named(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest one of the run whose folder it is."""
    folder = path / "checkpoints"
    return (CheckpointStore(folder).latest() or folder) if folder.is_dir() else path


def _on_all(comm: Communicator, fn: Callable[[], T]) -> T:
    """What `fn` returns; where it fails on any worker it fails on all, so that none goes on alone."""
    value, error = None, None
    try:
        value = fn()
    except LockstepError as raised:
        error = raised
    errors = [each for each in comm.allgather_object(error) if each is not None]
    if errors:
        raise error or errors[0]
    return cast(T, value)
