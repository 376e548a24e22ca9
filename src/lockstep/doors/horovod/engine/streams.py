"""Lets what one thread does on a GPU wait for what another has started there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["mark", "wait_for"]


def mark(tensors: Sequence[torch.Tensor]) -> Any:
    """A moment in this thread's work on the GPU of `tensors`; None for tensors on the CPU."""
    if not tensors or not tensors[0].is_cuda:
        return None
    with torch.cuda.device(tensors[0].device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def wait_for(event: Any) -> None:
    """Let what this thread starts on the GPU from now on begin after that moment."""
    if event is not None:
        event.wait()
