"""The host that this process is on: the real one, or a virtual one of an emulated network.

An extension point: `enter` puts another host in the place of the real one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .backoff import Steps
    from .c10d import Store


class WorkTime(Protocol):
    """The time of an operation on a virtual host, which is not that of this host."""

    def note_queued(self, work: Any) -> None:
        """Note that the caller goes on, with the `CPUWork` of its operation."""

    def begin_wait(self) -> None:
        """Note that this thread begins to wait for the operation."""

    def end_wait(self) -> None:
        """Let this thread go on, after the operation."""


class Host:
    """The real host; an extension overrides what is otherwise on a virtual one."""

    def key(self, real: str) -> str:
        """Return the key of the host; `real` is that of the real one."""
        return real

    def group_between_hosts(self, group: Any, store: Store, timeout: timedelta) -> Any:
        """Return what is used in place of a group over Gloo between hosts.

        Args:
            group: of c10d.
            store: of its rendezvous.
            timeout: limit of one operation.
        """
        return group

    def timed(self, queue: Any, steps: Steps) -> tuple[Steps, WorkTime | None]:
        """Return the steps of an operation that is about to be queued, and its time.

        Args:
            queue: its `OpQueue`.
            steps: the operation.

        Returns:
            The steps that are done in their place; and None where the time is that of this host.
        """
        return steps, None


_REAL = Host()
_current = _REAL


def current() -> Host:
    """Return the host that this process is on."""
    return _current


def enter(host: Host) -> None:
    """Be on `host` from now on."""
    global _current
    _current = host


def leave() -> None:
    """Be on the real host again."""
    global _current
    _current = _REAL
