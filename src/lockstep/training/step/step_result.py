"""The result of a training step: its loss and what is known beside it, on the host or on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...errors import ConfigError, DataError, DivergedError
from ..replica_check import ReplicaCheck
from .precision import Number

_NOT_FINITE_LATER = "Lower the learning rate, warm it up, or clip the gradients."
_NOT_FINITE_AT_FIRST = (
    "No update has been made yet: look for values that are not finite in the inputs and the "
    "targets, and at the initialisation of the model."
)


class StepNumbers(NamedTuple):
    """The numbers of a step as they are: on the host, or 0-dim tensors on the device.

    Attributes:
        loss, stop: see the properties of `StepResult`.
        counted: its `count`; a tuple has a method of that name.
    """

    loss: Number
    counted: Number
    stop: Number


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of one step; the same on every worker.

    Attributes:
        step: the number of this step, from 0.
        on_hand: its numbers as they are; `loss`, `count` and `stop` are tensors in any case.
        learning_rate: the learning rate of the first parameter group; a tensor if it is one on a
            device.
        samples: samples in the global batch, if the gradients were assumed to be those of a mean
            over samples; None if `count` was used.
        marks: 1-d tensor, the workers' sums of `ReplicaCheck.marks`; None if they have been
            compared.
        replicas: the comparison of the workers' hyperparameters and weights; None if that has been
            done.
        grad_norm: 0-dim tensor on the device, the 2-norm of the whole gradient before clipping;
            None without `max_grad_norm`, which measures it without clipping if it is
            ``float("inf")``.
        measured: what hooks have measured in the step, by name; equal on all workers.
        is_skipped: whether a guard has left the update out; the loss may then be not finite.
    """

    step: int
    on_hand: StepNumbers
    learning_rate: Number
    samples: int | None = None
    marks: torch.Tensor | None = None
    replicas: ReplicaCheck | None = None
    grad_norm: torch.Tensor | None = None
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_skipped: bool = False

    @property
    def loss(self) -> torch.Tensor:
        """0-dim tensor on the device, the mean over the global batch."""
        return _as_tensor(self.on_hand.loss)

    @property
    def stop(self) -> torch.Tensor:
        """0-dim tensor on the device, the sum of the workers' requests, see `recovery.STOP` and
        `REGROUP`.

        It is above zero if some worker requested a stop.
        """
        return _as_tensor(self.on_hand.stop)

    @property
    def count(self) -> torch.Tensor:
        """0-dim tensor on the device, the denominator of `loss`: samples, or what the loss function
        counts.

        Means over several steps are weighted by it.
        """
        return _as_tensor(self.on_hand.counted)

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group; waits for the device where it is a tensor
        there.
        """
        return float(self.learning_rate)

    def check(self) -> None:
        """Check the loss and that the workers' replicas are equal; called by all workers, waits for
        the device.

        Raises:
            DivergedError: if the loss is not finite.
            DataError: if the loss counts nothing, because all labels of the global batch are
                ignored.
            ConfigError: if some workers' losses were means over samples, and others' over something
                else.
            MismatchError: if the workers' hyperparameters or weights differ.
        """
        if self.marks is not None and self.replicas is not None:
            self.replicas.settle(self.step, self.marks.tolist())
        if self.is_skipped:
            return
        loss = float(self.on_hand.loss)
        count = float(self.on_hand.counted)
        if not math.isfinite(loss):
            if count == 0:
                raise DataError(
                    f"step {self.step}: expected a global batch with something that the loss "
                    "counts, got only e.g. ignored labels. Use a larger global batch, or remove "
                    "such samples from the data set."
                )
            raise DivergedError(
                f"the loss is {loss} at step {self.step} with learning rate {self.lr:g}. "
                + (_NOT_FINITE_AT_FIRST if self.step == 0 else _NOT_FINITE_LATER)
            )
        if self.samples is not None and count != self.samples:
            hint = (
                "Return (sum, count) for every batch, or a mean over the samples for every batch."
            )
            got = f"one over {count:g} of {self.samples} samples at step {self.step}"
            raise ConfigError(
                "loss_fn", "a mean over the same on all workers", found=got, hint=hint
            )


def _as_tensor(value: Number) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
