"""Guards of a training step: what is asked between its passes, whose gradients are reduced, and its
update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from ...data.loader import Batch
from ...errors import LockstepError
from .precision import Number

__all__ = ["Decision", "Guard", "Measured", "PendingStep"]


class Decision(Enum):
    """What a guard decides on a step whose update has not been made.

    GO makes the update. SKIP leaves it out: parameters, buffers and optimizer stay as before the
    step, which counts as done. REPEAT runs the passes again, from the same state, with the same
    batch and the same random draws.
    """

    GO = 0
    SKIP = 1
    REPEAT = 2


class Measured(NamedTuple):
    """The numbers of a step, on the host.

    Attributes:
        loss: the mean loss over the global batch.
        gradient_norm: the 2-norm of the whole gradient, before clipping.
        buffers_norm: the 2-norm of all floating buffers after the passes, such as running
            statistics; 0 without any.
    """

    loss: float
    gradient_norm: float
    buffers_norm: float


@dataclass
class PendingStep:
    """A step whose gradients are reduced, and whose update has not been made.

    All but `batch` is the same on every worker, with virtual workers also at any number of workers,
    bit for bit. On the CPU its numbers are on the host. On another device they are tensors there,
    which nothing waits for until they are read.

    Attributes:
        step: its number, from 0.
        batch: this worker's part of the global batch.
        loss: the mean over the global batch; it may be not finite.
        count: the denominator of the mean, more than 0: samples, or what the loss counts.
        learning_rate: of the first parameter group.
        model: the model, with its weights before the update, and its buffers after the passes.
        layers_with_buffers: those of its modules that have buffers.
        gradients: those of the trained parameters: of the mean over the global batch, in the
            parameters' dtype, neither scaled nor clipped. Guards must not change them.
        sharded_norms: returns the norm of each gradient, those of other workers too, if a worker
            has only the gradients of tensors whose optimizer state it has; all workers call it.
            None if it has all gradients.
        may_overflow: whether gradients that are not finite are part of the training: with fp16,
            they only lower the scale, and the update is left out by the gradient scaler.
        attempt: how often the passes have been repeated.
        decision: what the guards have decided, in `Guard.after_step`.
        error: what ends the training instead of the update, in `Guard.after_step`; None if nothing
            does.
        samples: a digest of the numbers and places of all samples of the global batch: the sum over
            the workers of `step.digest_of_samples`; None on a device whose sums have too few digits
            for it.
        has_changed_batch: returns whether the passes have changed the batch, so that the step
            cannot be repeated.
        notes: what guards say of the step to those after them, by name.
    """

    step: int
    batch: Batch
    loss: Number
    count: Number
    learning_rate: Number
    model: nn.Module
    layers_with_buffers: Sequence[nn.Module]
    gradients: Sequence[torch.Tensor]
    sharded_norms: Callable[[], torch.Tensor] | None = None
    may_overflow: bool = False
    attempt: int = 0
    decision: Decision = Decision.GO
    error: LockstepError | None = None
    samples: Number | None = None
    has_changed_batch: Callable[[], bool] = lambda: False
    notes: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient, before clipping: a 0-dim tensor on the device.

        Where parameters or the optimizer's state are sharded, the first one who asks makes an
        all-reduce, so all workers have to.
        """
        if self.sharded_norms is not None:
            of_all: torch.Tensor = torch.linalg.vector_norm(self.sharded_norms())
            return of_all
        if not self.gradients:
            return torch.zeros(())
        gradients = list(self.gradients)
        if any(gradient.is_sparse for gradient in gradients):
            gradients = [_dense(gradient) for gradient in gradients]
        # As `torch.nn.utils.get_total_norm`, with half of its calls.
        norms = torch._foreach_norm(gradients)
        first = norms[0].device
        # Of a model on several devices: torch.stack takes tensors of one.
        if any(of_gradient.device != first for of_gradient in norms):
            norms = tuple(of_gradient.to(first) for of_gradient in norms)
        norm: Any = torch.linalg.vector_norm(torch.stack(norms))
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    @cached_property
    def buffers_norm(self) -> torch.Tensor | None:
        """The 2-norm of all floating buffers after the passes, a 0-dim tensor on the device; None
        without any.
        """
        buffers = self.floating_buffers()
        return torch.nn.utils.get_total_norm(buffers) if buffers else None

    def floating_buffers(self) -> list[torch.Tensor]:
        """Return the floating buffers of the model, each once, in the order of
        `model.buffers()`.
        """
        of_layers = [
            buffer
            for layer in self.layers_with_buffers
            for buffer in layer._buffers.values()
            if buffer is not None and buffer.is_floating_point()
        ]
        return list({id(buffer): buffer for buffer in of_layers}.values())

    @cached_property
    def measured(self) -> Measured:
        """Loss and norms on the host; reading them waits for the device, once for all guards."""
        numbers = [
            self.loss,
            self.gradient_norm,
            0.0 if self.buffers_norm is None else self.buffers_norm,
        ]
        if not isinstance(self.loss, torch.Tensor) or self.loss.is_cpu:
            return Measured(*map(float, numbers))
        on_device = [
            torch.as_tensor(number, dtype=self.loss.dtype, device=self.loss.device)
            for number in numbers
        ]
        return Measured(*torch.stack(on_device).tolist())

    @property
    def has_overflowed(self) -> bool:
        """Whether the gradient has overflowed in fp16, which the gradient scaler deals with; waits
        for the device.
        """
        measured = self.measured
        return (
            self.may_overflow
            and math.isfinite(measured.loss)
            and not math.isfinite(measured.gradient_norm)
        )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse gradient, with the sum of rows that are there several times;
    others as they are.
    """
    return gradient.coalesce()._values() if gradient.is_sparse else gradient


class Guard:
    """A guard that lets every step go on; override what is needed.

    A guard is on every worker, and must decide alike on all of them. What it counts of the steps
    changes in `after_step` alone: in an elastic job a step that was interrupted is run again from
    its beginning.

    Attributes:
        name: the name of its state in checkpoints.
        may_undo: whether it may decide to skip or to repeat a step. Buffers are then copied at the
            beginning of each.
    """

    name: str = "guard"
    may_undo: bool = True

    def before_passes(self, step: int, batch: Batch) -> None:
        """Called before the first passes of a step: weights, buffers and optimizer are as the last
        one has left them.

        Args:
            step: its number.
            batch: this worker's part of the global batch.
        """

    def before_update(self, pending: PendingStep) -> Decision:
        """Called when the gradients of a step are reduced, before clipping and the check for a loss
        that is not finite.

        The guards are asked in order. If one repeats the step, those after it are not asked; if one
        skips it, it is skipped. It may communicate, as it is called on every worker.

        Raises:
            LockstepError: to end the training, on every worker.
        """
        return Decision.GO

    def after_step(self, pending: PendingStep) -> None:
        """Called after the update, or what was done instead of it, also before an error ends the
        training.
        """

    def on_checkpoint(self) -> None:
        """Called between two steps, when a `Trainer` has written a checkpoint."""

    def on_regroup(self) -> None:
        """Called in an elastic job when its workers have changed; all have the same state."""

    def on_row(self, row: dict[str, float], since: int) -> None:
        """Called when a row is added to the history of a `Trainer`: the guard may add columns.

        Args:
            row: the row.
            since: the number of the first step after the row before.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard needs to go on in another process: plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
