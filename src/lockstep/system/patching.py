"""Replaces functions of torch, and restores them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Replaced"]


class Replaced:
    """A function that is replaced until `undo`.

    Args:
        owner: its module or class.
        name: its name there.
        make: returns the replacement, given the original.
    """

    def __init__(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._owner = owner
        self._name = name
        self._old = getattr(owner, name)
        self._new = functools.wraps(self._old)(make(self._old))
        setattr(owner, name, self._new)

    def undo(self) -> None:
        """Restore the original, unless it has been replaced again since."""
        if getattr(self._owner, self._name) is self._new:
            setattr(self._owner, self._name, self._old)
