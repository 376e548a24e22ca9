"""The results of an epoch: the columns of its row in the history, and the sums that its loss and
speed are made of.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import clock
from ...parallel.strategy import accumulation_dtype
from ..step.precision import Number

Row = dict[str, float]
"""The results of one epoch, or of the part of one before a validation: epoch (from 1), step,
train_loss, lr, seconds, samples_per_second, and val_… by metric."""

COLUMNS = ("epoch", "step", "train_loss", "lr", "seconds", "samples_per_second")
"""The columns of every row."""


class EpochTotals:
    """Loss and speed of the steps of one epoch. A loss on a device stays there until it is read.

    Args:
        device: the device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss_sum: Number = 0.0
        self._count: Number = 0.0
        if device.type != "cpu":
            dtype = accumulation_dtype(device)
            self._loss_sum = torch.zeros((), device=device, dtype=dtype)
            self._count = torch.zeros((), device=device, dtype=dtype)
        self._samples = 0
        self._started = clock.monotonic()

    def add(self, loss: Number, count: Number, samples: int) -> None:
        """Add a step.

        Args:
            loss: the mean loss.
            count: the denominator of the mean: samples, or what the loss counts, such as tokens.
            samples: samples in the global batch.
        """
        if not isinstance(self._loss_sum, torch.Tensor):
            self._loss_sum += float(loss) * float(count)
            self._count += float(count)
        elif isinstance(count, torch.Tensor):
            self._loss_sum.addcmul_(loss, count)  # type: ignore[arg-type]
            self._count += count
        else:
            self._loss_sum.add_(loss, alpha=count)
            self._count += count
        self._samples += samples

    @property
    def loss(self) -> float:
        """The mean loss so far, weighted by counts; 0 before the first step. Waits for the
        device.
        """
        return float(self._loss_sum) / (float(self._count) or 1.0)

    @property
    def seconds(self) -> float:
        """Time since the epoch began or was resumed; on an emulated network, that of the emulated
        hosts.
        """
        return clock.monotonic() - self._started

    @property
    def samples_per_second(self) -> float:
        """The mean speed over `seconds`."""
        return self._samples / max(self.seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, to resume in another process."""
        return {"loss_sum": float(self._loss_sum), "count": float(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved sums; the time is not part of them."""
        loss_sum = float(state["loss_sum"])
        count = float(state["count"])
        if isinstance(self._loss_sum, torch.Tensor) and isinstance(self._count, torch.Tensor):
            self._loss_sum.fill_(loss_sum)
            self._count.fill_(count)
        else:
            self._loss_sum = loss_sum
            self._count = count
