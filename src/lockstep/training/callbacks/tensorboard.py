"""Writes the run's numbers as TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .base import Callback, Row
from .writing import Writing

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["TensorBoard", "check_installed"]


def check_installed() -> None:
    """Raise ConfigError, saying what to install, when the package tensorboard is missing."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        hint = "pip install 'lockstep-train[tensorboard]'"
        raise ConfigError("log", "csv, as tensorboard is not installed", found="tensorboard", hint=hint)


class TensorBoard(Callback):
    """Scalars by step in the folder `tensorboard` of the run: losses, metrics, learning rate, speed.

    Where they cannot be written, the log says so once and the training goes on without them.

    Raises:
        ConfigError: when the package tensorboard is not installed.
    """

    def __init__(self) -> None:
        check_installed()
        self._writing = Writing()
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Open the event file; what a resumed run repeats replaces what was there."""
        from torch.utils.tensorboard.writer import SummaryWriter

        if trainer.out is not None:
            folder = trainer.out / "tensorboard"
            with self._writing.to(folder):
                self._writer = SummaryWriter(str(folder), purge_step=trainer.step.steps_done)

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """One point for each number."""
        if self._writer is not None:
            with self._writing.to(Path(self._writer.log_dir)):
                for name, value in row.items():
                    if name not in ("epoch", "step"):
                        self._writer.add_scalar(name, value, int(row["step"]))

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            with self._writing.to(Path(self._writer.log_dir)):
                self._writer.close()
            self._writer = None
