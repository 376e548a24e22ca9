"""The moments of a training run at which something can be done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..step import StepResult
    from ..trainer import Trainer

__all__ = ["Callback", "Row"]

Row = dict[str, float]
"""One epoch's numbers: epoch (from 1), step, train_loss, lr, seconds, samples_per_second, and test_… by metric."""


class Callback:
    """Does nothing at any moment; override what you need.

    Attributes:
        every_rank: whether it runs on all workers. If not (the default), it runs on rank 0 alone and must not
            communicate, nor change the model or the optimizer. One that does run everywhere must make the same
            collectives and the same changes on each.
    """

    every_rank: bool = False

    # --- what a checkpoint keeps ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this callback needs to go on in another process: plain values and tensors, by name; nothing here.

        Asked on rank 0 for each checkpoint. It is kept under the name of the class, for a second callback of that class
        with ``-2`` after it, and so on in their order.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` has given; called on each rank on which it runs, before `on_start`.

        An error in here is an error of the whole: the run does not go on from that checkpoint.
        """

    # --- the moments ----------------------------------------------------------------------------------------------

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """After each step. Reading `result.loss` waits for the device: do so rarely, or see `on_loss`."""

    def on_loss(self, trainer: Trainer, result: StepResult, loss: float) -> None:
        """When the loss of a step is on the host, and finite; nothing waits for it.

        Once for every step, in their order, after its `on_step`. On an accelerator that is up to
        ``trainer.in_flight - 1`` steps later; before a checkpoint or `on_epoch` all are told.
        """

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """After each epoch and its evaluation; `row` is also the last of `trainer.history`."""

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """After the last step, or after what ended the run early; always called if `on_start` was."""
