"""What the workers of a prepared loop have alike in an elastic job, and what the repeat of a batch
begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..communicator import Communicator
from ..data.loader import Batch, Loader
from .batch_buffers import BatchBuffers
from .batch_parts import BatchParts
from .body_losses import BodyLosses
from .feed import Feed
from .model_state import ModelState, UserState
from .recovery import Recovery, as_bytes, from_bytes

__all__ = ["Loop", "OwnLoopState"]


class PreparedSteps(Protocol):
    """What is asked of the only optimizer of a loop whose batches can be repeated."""

    optimizer: Optimizer
    steps_done: int


class Loop(Protocol):
    """What is asked of a loop whose batches can be repeated.

    Attributes:
        once_a_step: schedulers and averages, which have a state.
    """

    comm: Communicator
    model: nn.Module
    parts: BatchParts
    buffers: BatchBuffers
    losses: BodyLosses
    once_a_step: Sequence[Any]
    user_state: UserState

    @property
    def optimizers(self) -> Mapping[int, PreparedSteps]:
        """Its optimizers."""
        ...

    def regroup(self) -> None:
        """Adapt to the communicator's new workers."""
        ...


class Repeats(Protocol):
    """What the state asks of the batches that can be repeated."""

    recovery: Recovery

    @property
    def is_within_batch(self) -> bool:
        """Whether bodies of a batch run whose step has not been done."""
        ...

    def do_not_repeat(self, why: str) -> None:
        """Let the loss of a worker start all workers again from here on."""
        ...

    def regroup(self) -> None:
        """Note that the workers have changed."""
        ...


class OwnLoopState(ModelState):
    """The `recovery.TrainingState` of a loop over a prepared loader, or of an evaluation beside
    such loops.

    The bodies of a batch compute before the step that is repeated, and run again after a loss. So
    what they have changed before the step is restored for that: buffers, and hyperparameters. What
    they change after it, where ``optimizer.stepped`` is true, is the program's.

    Args:
        loop: what was prepared together.
        repeats: its batches that can be repeated.
        loader: that of the loop; None for an evaluation.

    Attributes:
        at: (epoch, number) of the batch in progress, or of the next one.
        feed: the batches.
        prepared: the loop's only optimizer.
    """

    def __init__(self, loop: Loop, repeats: Repeats, loader: Loader | None) -> None:
        (self.prepared,) = loop.optimizers.values()
        super().__init__(loop.model, self.prepared.optimizer, loop.comm)
        self._loop = loop
        self._repeats = repeats
        self._loader = loader
        self.at = (0, 0)
        self._measured: Any = None
        self._begun: list[
            dict[str, Any]
        ] = []  # the hyperparameters when the batch in progress began
        if loader is not None:
            self.at = loader.position
            self.feed = Feed(loader, self._seek, repeats.recovery)

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
        """See `TrainingState`; other batches than that of the loop are whole ones, which every
        worker has.
        """
        if (
            isinstance(batch, Batch)
            and (batch.epoch, batch.step) == self.at
            and self._loader is not None
        ):
            return self.feed.current()
        return batch

    # --- the bodies of a batch
    # ----------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """The bodies of a batch begin, for the first time or again."""
        self._look_for_changes()
        if self.has_changed_parameters:
            self._repeats.do_not_repeat("parameters that are changed beside the step")
        self._begun = self._hyperparameters()

    def begin_again(self) -> None:
        """The bodies of a batch have ended without its step, and run again: restore what they have
        changed.
        """
        self._loop.buffers.restore()
        self._set_hyperparameters(self._begun)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        self._versions = self._current_versions()

    # --- operations
    # ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `TrainingState`: what has changed was looked for before the bodies, whose passes
        change buffers.
        """
        if not self._repeats.is_within_batch:
            self._look_for_changes()
            self._generators = self._generator_states()

    def undo(self) -> None:
        """See `TrainingState`: draws in bodies are keyed, and those that run again begin anew."""
        if self._repeats.is_within_batch:
            self._loop.buffers.restore()
            self._versions = self._current_versions()
        else:
            super().undo()

    def of_operations(self) -> dict[str, Any]:
        """See `TrainingState`."""
        return {**super().of_operations(), "steps": self.prepared.steps_done}

    def load_operations(self, state: dict[str, Any]) -> None:
        """See `TrainingState`: gradients are not sent, so that nobody may take those of an attempt
        for the sums.
        """
        super().load_operations(state)
        self.prepared.steps_done = state["steps"]
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def of_program(self) -> dict[str, Any]:
        """See `TrainingState`."""
        loop = self._loop
        return {
            **super().of_program(),
            "at": list(self.at),
            "parts": as_bytes(loop.parts.state_dict()),
            "losses": as_bytes(loop.losses.state_dict()),
            "once a step": as_bytes([acting.state_dict() for acting in loop.once_a_step]),
            "users": loop.user_state.of_program(),
        }

    def load_program(self, state: dict[str, Any]) -> None:
        """See `TrainingState`."""
        super().load_program(state)
        loop = self._loop
        epoch, number = state["at"]
        self.at = epoch, number
        loop.parts.load_state_dict(from_bytes(state["parts"], self.comm.device))
        loop.losses.load_state_dict(from_bytes(state["losses"], self.comm.device))
        for acting, saved in zip(
            loop.once_a_step, from_bytes(state["once a step"], torch.device("cpu")), strict=True
        ):
            acting.load_state_dict(saved)
        loop.user_state.load_program(state["users"], self.comm.device)

    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        """See `TrainingState`."""
        self._repeats.regroup()
        self._loop.regroup()
        if self._loader is not None:
            self.feed.regroup()
        super().regroup(states, all_seen)
