"""Strategies that have their name but are not there yet."""

from __future__ import annotations

from typing import NoReturn

from ..errors import NotBuiltError

__all__ = ["replicas", "sharded"]


def _refuse(name: str) -> NoReturn:
    raise NotBuiltError("strategy", "distributed", name, f"The strategy {name!r} is planned but does not exist yet.")


def sharded(*_: object, **__: object) -> NoReturn:
    """Parameters, gradients and optimizer state cut over the workers (FSDP2): not there yet."""
    _refuse("sharded")


def replicas(*_: object, **__: object) -> NoReturn:
    """One process with a copy of the model on each of its devices: not there yet."""
    _refuse("replicas")
