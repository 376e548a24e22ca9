"""What the workers of a prepared loop have alike in an elastic job, and what the repeat of a batch begins with."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ..communicator import Communicator
from ..data.loader import Batch, Loader
from .feed import Feed
from .model_state import ModelState, UserState
from .recovery import Recovery, as_bytes, from_bytes

__all__ = ["OwnLoopState"]


class Job(Protocol):
    """What the state asks of the loop."""

    comm: Communicator
    model: nn.Module
    recovery: Recovery
    user_state: UserState
    schedulers: list[LRScheduler]
    averages: list[AveragedModel]
    steps_done: int

    @property
    def optimizer(self) -> Optimizer:
        """Its only optimizer."""
        ...

    @property
    def is_within_batch(self) -> bool:
        """Whether bodies of a batch run whose step has not been done."""
        ...

    def do_not_repeat(self, why: str) -> None:
        """Let the loss of a worker start all workers again from here on."""
        ...

    def restore_buffers(self) -> None:
        """Restore the buffers of the beginning of the batch."""
        ...

    def counters(self) -> dict[str, Any]:
        """Return what the loop has counted, for `set_counters`."""
        ...

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Set what another worker has counted."""
        ...

    def regroup(self) -> None:
        """Adapt to the communicator's new workers."""
        ...


class OwnLoopState(ModelState):
    """The `recovery.TrainingState` of a loop over a prepared loader, or of an evaluation beside such loops.

    The bodies of a batch compute before the step that is repeated, and run again after a loss. So what they have
    changed before the step is restored for that: buffers, and hyperparameters. What they change after it, where
    ``optimizer.stepped`` is true, is the program's.

    Args:
        job: what was prepared together.
        loader: that of the loop; None for an evaluation.

    Attributes:
        at: (epoch, number) of the batch in progress, or of the next one.
        feed: the batches.
    """

    def __init__(self, job: Job, loader: Loader | None) -> None:
        super().__init__(job.model, job.optimizer, job.comm)
        self._job, self._loader = job, loader
        self.at = (0, 0)
        self._measured: Any = None
        self._begun: list[dict[str, Any]] = []  # the hyperparameters when the batch in progress began
        if loader is not None:
            self.at = loader.position
            self.feed = Feed(loader, self._seek, job.recovery)

    @property
    def result(self) -> Any:
        """The epoch after the loop, or the result of the evaluation."""
        return self._measured if self._loader is None else self._loader.position[0]

    @result.setter
    def result(self, value: Any) -> None:
        if self._loader is None:
            self._measured = value
        else:
            self._move(value, 0)

    def _move(self, epoch: int, step: int) -> None:
        assert self._loader is not None
        self._loader.load_state_dict({**self._loader.state_dict(), "epoch": epoch, "step": step})

    def _seek(self, epoch: int) -> bool:
        """Move the loader to the position of the loop, if it is one before a batch of `epoch`."""
        assert self._loader is not None
        _, number = self.at
        ended = number >= len(self._loader)
        if ended:
            self._move(epoch + 1, 0)
        else:
            self._move(epoch, number)
        return not ended

    def part_of(self, batch: Any) -> Any:
        """See `TrainingState`; other batches than that of the loop are whole ones, which every worker has."""
        if isinstance(batch, Batch) and (batch.epoch, batch.step) == self.at and self._loader is not None:
            return self.feed.current()
        return batch

    # --- the bodies of a batch ----------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """The bodies of a batch begin, for the first time or again."""
        self._look_for_changes()
        if self.has_changed_parameters:
            self._job.do_not_repeat("parameters that are changed beside the step")
        self._begun = self._hyperparameters()

    def begin_again(self) -> None:
        """The bodies of a batch have ended without its step, and run again: restore what they have changed."""
        self._job.restore_buffers()
        self._set_hyperparameters(self._begun)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        self._versions = self._current_versions()

    # --- operations ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `TrainingState`: what has changed was looked for before the bodies, whose passes change buffers."""
        if not self._job.is_within_batch:
            self._look_for_changes()
            self._generators = self._generator_states()

    def undo(self) -> None:
        """See `TrainingState`: draws in bodies are keyed, and those that run again begin anew."""
        if self._job.is_within_batch:
            self._job.restore_buffers()
            self._versions = self._current_versions()
        else:
            super().undo()

    def of_operations(self) -> dict[str, Any]:
        """See `TrainingState`."""
        return {**super().of_operations(), "steps": self._job.steps_done}

    def load_operations(self, state: dict[str, Any]) -> None:
        """See `TrainingState`: gradients are not sent, so that nobody may take those of an attempt for the sums."""
        super().load_operations(state)
        self._job.steps_done = state["steps"]
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def of_program(self) -> dict[str, Any]:
        """See `TrainingState`."""
        once_a_step: list[Any] = [*self._job.schedulers, *self._job.averages]
        return {
            **super().of_program(),
            "at": list(self.at),
            "counters": as_bytes(self._job.counters()),
            "once a step": as_bytes([each.state_dict() for each in once_a_step]),
            "users": self._job.user_state.of_program(),
        }

    def load_program(self, state: dict[str, Any]) -> None:
        """See `TrainingState`."""
        super().load_program(state)
        epoch, number = state["at"]
        self.at = epoch, number
        self._job.set_counters(from_bytes(state["counters"], self.comm.device))
        once_a_step: list[Any] = [*self._job.schedulers, *self._job.averages]
        for each, saved in zip(once_a_step, from_bytes(state["once a step"], torch.device("cpu")), strict=True):
            each.load_state_dict(saved)
        self._job.user_state.load_program(state["users"], self.comm.device)

    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        """See `TrainingState`."""
        self._job.regroup()
        if self._loader is not None:
            self.feed.regroup()
        super().regroup(states, all_seen)
