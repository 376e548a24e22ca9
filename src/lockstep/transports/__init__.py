"""Backends for torch.distributed that Lockstep adds: how data is transferred between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..registry import import_object

if TYPE_CHECKING:
    from .creation import ShmOptions

__all__ = ["ShmOptions"]


def __getattr__(name: str) -> Any:
    if name == "ShmOptions":
        return import_object(name, "lockstep.transports.creation:ShmOptions")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
