"""Devices as MXNet names them: `cpu(0)`, `gpu(1)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.replicas import as_devices

__all__ = ["Context", "as_contexts", "context_of", "cpu", "gpu", "tagged"]


@dataclass(frozen=True)
class Context:
    """One device of a list; `cpu(0)` and `cpu(1)` are two, each with copies of its own, on the same processor.

    Attributes:
        device_type: "cpu" or "gpu".
        device_id: its number.
    """

    device_type: str
    device_id: int = 0

    @property
    def device(self) -> torch.device:
        """Torch's device; an accelerator of whatever kind for a "gpu".

        Raises:
            ConfigError: when it is not there.
        """
        return as_devices(["cpu" if self.device_type == "cpu" else self.device_id], "ctx")[0]

    def __str__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    __repr__ = __str__


def cpu(device_id: int = 0) -> Context:
    """The processor, as device number `device_id`."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """An accelerator."""
    return Context("gpu", device_id)


def as_contexts(ctx: Any) -> list[Context]:
    """A context, a device's name, or a list of them, in which a name that comes again is another device.

    Raises:
        ConfigError: for what is no device.
    """
    listed = list(ctx) if isinstance(ctx, Iterable) and not isinstance(ctx, str) else [ctx]
    found: list[Context] = []
    for entry in listed:
        if isinstance(entry, Context):
            found.append(entry)
            continue
        device = as_devices([entry], "ctx")[0]
        number = sum(other.device_type == "cpu" for other in found) if device.type == "cpu" else device.index
        found.append(Context("cpu" if device.type == "cpu" else "gpu", number))
    return found


def tagged(tensor: torch.Tensor, context: Context) -> torch.Tensor:
    """`tensor`, which then knows its context: torch does not tell one cpu(i) from another."""
    tensor._lockstep_context = context  # type: ignore[attr-defined]
    return tensor


def context_of(tensor: torch.Tensor) -> Context:
    """The context that a tensor was loaded into, or the first one of its device."""
    found: Context | None = getattr(tensor, "_lockstep_context", None)
    if found is not None:
        return found
    return cpu() if tensor.device.type == "cpu" else gpu(tensor.device.index)
