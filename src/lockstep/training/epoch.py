"""What an epoch adds up to while its steps go by."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["EpochTotals"]


class EpochTotals:
    """Loss and speed of the steps of one epoch. The loss stays on the device until it is asked for.

    Args:
        device: where the losses come from.
    """

    def __init__(self, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._loss_sum = torch.zeros((), device=device, dtype=wide)
        self._count = torch.zeros((), device=device, dtype=wide)
        self._samples = 0
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor, count: torch.Tensor | int, samples: int) -> None:
        """Count a step of so many samples with this mean `loss` over `count` things: samples too, or tokens, say."""
        self._loss_sum += loss * count
        self._count += count
        self._samples += samples

    @property
    def loss(self) -> float:
        """The mean loss over all things counted so far, 0 before the first step; waits for the device."""
        return float(self._loss_sum) / (float(self._count) or 1.0)

    @property
    def seconds(self) -> float:
        """Wall-clock time since the epoch began, or since it was taken up again."""
        return time.perf_counter() - self._started

    @property
    def samples_per_second(self) -> float:
        """The speed over that time."""
        return self._samples / max(self.seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """The sums, to go on with in another process."""
        return {"loss_sum": float(self._loss_sum), "count": float(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums; the clock is not part of them."""
        self._loss_sum.fill_(float(state["loss_sum"]))
        self._count.fill_(float(state["count"]))
