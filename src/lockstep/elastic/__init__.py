"""Workers that are lost, leave and join while a job runs: the membership, each side of it, and
loops of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..registry import import_object

if TYPE_CHECKING:
    from collections.abc import Callable

    steps: Callable[
        ..., Any
    ]  # a module on this layer may not import it, see `lockstep.training.elastic_steps`

__all__ = ["steps"]


def __getattr__(name: str) -> Any:
    if name == "steps":
        return import_object(name, "lockstep.training.elastic_steps:steps")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
