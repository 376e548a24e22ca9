"""Finds ranks that wait for each other in vain, and says who is to blame."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["blocking", "install", "leave_out", "left", "raised", "uninstall"]


def install(machine: Callable[[], str], lasting: bool = False) -> None:
    """Watch every process group that is made from here on, unless LOCKSTEP_WATCH=off.

    Args:
        machine: gives a text that is the same for two processes if they can open each other's files.
        lasting: also after the group of all ranks has been destroyed.

    Raises:
        ConfigError: a variable says something else than it can.
    """
    from . import hooks

    hooks.install(machine, lasting)


def uninstall() -> None:
    """Watch nothing any more."""
    from . import hooks

    hooks.uninstall()


def raised(error: BaseException) -> None:
    """Tell the other ranks that this one ends with `error`; nothing where nobody watches."""
    hooks = sys.modules.get(f"{__name__}.hooks")
    if hooks is not None:
        hooks.raised(error)


def left() -> None:
    """Tell the other ranks that this one has come to its end; nothing where nobody watches."""
    hooks = sys.modules.get(f"{__name__}.hooks")
    if hooks is not None:
        hooks.left()


def leave_out(group: Any) -> None:
    """Watch `group` no more; every rank of it must call this. Nothing where nobody watches.

    For a group with which ranks agree on what to do next, whenever each of them comes to it.

    Args:
        group: a process group of torch.distributed's.
    """
    hooks = sys.modules.get(f"{__name__}.hooks")
    if hooks is not None:
        hooks.leave_out(group)


def blocking(group: Any, operation: str) -> AbstractContextManager[Callable[[], None]]:
    """Around a wait of the ranks of `group` for each other that is none of torch's: one more collective to the watch.

    Every rank of the group must come to it. In the body there is a function to call again and again, which raises
    what has gone wrong.

    Args:
        group: a process group of torch.distributed's.
        operation: its name in reports.
    """
    hooks = sys.modules.get(f"{__name__}.hooks")
    return nullcontext(_nothing) if hooks is None else hooks.blocking(group, operation)


def _nothing() -> None:
    return
