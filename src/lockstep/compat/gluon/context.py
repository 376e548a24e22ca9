"""MXNet's contexts: devices such as `cpu(0)` and `gpu(1)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.replicas import as_devices

__all__ = ["Context", "as_contexts", "context_of", "cpu", "gpu", "set_context"]


@dataclass(frozen=True)
class Context:
    """A device. `cpu(0)` and `cpu(1)` are different contexts on the same CPU, each with its own
    copy of a model.

    Attributes:
        device_type: "cpu" or "gpu".
        device_id: the index of the device.
    """

    device_type: str
    device_id: int = 0

    @property
    def device(self) -> torch.device:
        """The device of torch; for "gpu" an accelerator of any type.

        Raises:
            ConfigError: the device does not exist.
        """
        return as_devices(["cpu" if self.device_type == "cpu" else self.device_id], "ctx")[0]

    def __str__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    __repr__ = __str__


def cpu(device_id: int = 0) -> Context:
    """Return the context `device_id` of the CPU."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """Return the context of accelerator `device_id`."""
    return Context("gpu", device_id)


def as_contexts(ctx: Any) -> list[Context]:
    """Return a list of contexts.

    Args:
        ctx: a context, the name of a device, or a list of them. In a list, each "cpu" is the next
            context of the CPU.

    Raises:
        ConfigError: for other values, or a device that does not exist.
    """
    entries = list(ctx) if isinstance(ctx, Iterable) and not isinstance(ctx, str) else [ctx]
    contexts: list[Context] = []
    for entry in entries:
        if isinstance(entry, Context):
            contexts.append(entry)
            continue
        device = as_devices([entry], "ctx")[0]
        if device.type == "cpu":
            contexts.append(cpu(sum(context.device_type == "cpu" for context in contexts)))
        else:
            contexts.append(gpu(device.index))
    return contexts


def set_context(tensor: torch.Tensor, context: Context) -> torch.Tensor:
    """Record the context of `tensor`, which torch's device does not determine on the CPU, and
    return `tensor`.
    """
    tensor._lockstep_context = context  # type: ignore[attr-defined]
    return tensor


def context_of(tensor: torch.Tensor) -> Context:
    """Return the recorded context of `tensor`, or else the first context of its device."""
    context: Context | None = getattr(tensor, "_lockstep_context", None)
    if context is not None:
        return context
    return cpu() if tensor.device.type == "cpu" else gpu(tensor.device.index)
