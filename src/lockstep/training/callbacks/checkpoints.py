"""Saves a checkpoint every so often."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .base import Callback, Row

if TYPE_CHECKING:
    from ..step import StepResult
    from ..trainer import Trainer

__all__ = ["Checkpoints", "parse_interval"]


def parse_interval(text: str) -> tuple[int, str]:
    """ "2epochs" → (2, "epochs"), "500steps" → (500, "steps"); a bare number counts epochs, 0 means never.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"(\d+)\s*(epochs?|steps?)?", text.strip())
    if found is None:
        raise ConfigError(
            "checkpoint_every", "a number of epochs or steps, e.g. 1epoch, 500steps, or 0 for never", text
        )
    return int(found[1]), "steps" if (found[2] or "").startswith("step") else "epochs"


class Checkpoints(Callback):
    """Saves every so many epochs or steps, and at the end; the trainer's `out` says where.

    At each step and epoch it comes after all other callbacks, so that what they change is saved.

    Args:
        every: "1epoch", "500steps", …; "0" saves only when the run is interrupted.
    """

    every_rank = True

    def __init__(self, every: str = "1epoch") -> None:
        self._count, self._unit = parse_interval(every)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Save when the steps are due."""
        if self._count and self._unit == "steps" and trainer.step.steps_done % self._count == 0:
            trainer.save()

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """Save when the epochs are due."""
        if self._count and self._unit == "epochs" and (trainer.epoch + 1) % self._count == 0:
            trainer.save()

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Save where the run ended well, unless that step has been saved, by this run or the one it goes on from."""
        if self._count and error is None and trainer.saver.newest_step != trainer.step.steps_done:
            trainer.save()
