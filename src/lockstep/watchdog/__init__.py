"""The watchdog: finds ranks that wait for each other in vain, and reports which rank is at fault.

These functions do nothing in a process in which the watchdog is not installed. They do not import
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..errors import TransportError
    from .rounds import Rounds

__all__ = [
    "exclude_group",
    "install",
    "interrupt",
    "report_exception",
    "report_exit",
    "uninstall",
    "watch_rounds",
    "watch_wait",
]


def install(host_key: Callable[[], str], lasting: bool = False) -> None:
    """Watch every process group that is made from now on, unless LOCKSTEP_WATCHDOG=off.

    Args:
        host_key: returns a text that is the same for two processes if they can open each other's
            files.
        lasting: also watch groups that are made after the default group has been destroyed.

    Raises:
        ConfigError: an environment variable has an invalid value.
    """
    from . import patches

    patches.install(host_key, lasting)


def uninstall() -> None:
    """Stop watching."""
    from . import patches

    patches.uninstall()


def report_exception(error: BaseException) -> None:
    """Report to the other ranks that this rank ends with `error`."""
    patches = _loaded_patches()
    if patches is not None:
        patches.report_exception(error)


def report_exit() -> None:
    """Report to the other ranks that this rank has reached the end of its program."""
    patches = _loaded_patches()
    if patches is not None:
        patches.report_exit()


def interrupt(error: TransportError) -> None:
    """End all waits of this rank in its process groups with `error`, from any thread; nothing else
    is interrupted.

    For an elastic job, whose other ranks do the same. The groups are of no use afterwards.
    """
    patches = _loaded_patches()
    if patches is not None:
        patches.interrupt(error)


def unfinished_works() -> list[Any]:
    """Return the works of an elastic job's Gloo groups that have not ended, though the program's
    waits may have.
    """
    patches = _loaded_patches()
    return [] if patches is None else patches.unfinished_works()


def exclude_group(group: Any) -> None:
    """Stop watching `group`; every rank of it must call this.

    For groups with which ranks negotiate what to do next, at whatever time each of them gets to it.

    Args:
        group: a process group of torch.distributed.
    """
    patches = _loaded_patches()
    if patches is not None:
        patches.exclude_group(group)


def watch_rounds(
    group: Any, purpose: Callable[[], str], warning_s: float, stall_s: float, setting: str
) -> Rounds | None:
    """Watch the rounds of `group`, in which its ranks negotiate what to do next, and no longer its
    collectives; every rank of it must call this.

    A rank may come to a round late, as it has nothing to negotiate before: rounds have time limits
    of their own. A rank for which others wait and that dies, is stopped, exits or raises an
    exception is reported as ever.

    Args:
        group: a process group of torch.distributed.
        purpose: returns for what this rank waits, such as "allreduce 'x'", for reports; it is
            called in another thread.
        warning_s: seconds after which ranks that are missing from a round are warned about; inf for
            never.
        stall_s: seconds after which they are an error; inf for never.
        setting: the name of the option that sets `stall_s`, for reports.

    Returns:
        The rounds, of which this rank says when each begins and ends; None if the group is not
        watched.
    """
    patches = _loaded_patches()
    if patches is None:
        return None
    rounds: Rounds | None = patches.watch_rounds(group, purpose, warning_s, stall_s, setting)
    return rounds


def watch_wait(group: Any, operation: str) -> AbstractContextManager[Callable[[], None]]:
    """Return a context in which the ranks of `group` wait for each other by other means than
    torch's collectives.

    The watchdog treats it as one more collective, which every rank of the group must enter. The
    context's value is a function to be called repeatedly, which raises what has gone wrong.

    Args:
        group: a process group of torch.distributed.
        operation: its name in reports.
    """
    patches = _loaded_patches()
    return nullcontext(lambda: None) if patches is None else patches.watch_wait(group, operation)


def _loaded_patches() -> ModuleType | None:
    return sys.modules.get(f"{__name__}.patches")
