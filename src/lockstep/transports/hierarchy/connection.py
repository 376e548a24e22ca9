"""A Gloo group that can be hung up, so that whoever waits in it elsewhere learns of a failure here."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import TransportError
from ..c10d import Store
from ..shm.waiting import Steps
from ..wrapped import as_group

__all__ = ["Connection"]

_PATIENCE_S = 0.2


class Connection:
    """Ranks connected by Gloo.

    Gloo closes its sockets when nothing refers to the group any more, and at no other request. So this object alone
    refers to it, and to what is under way in it.

    Args:
        store: where the ranks meet.
        rank: this rank.
        size: their number.
        timeout: limit of one operation.
        lazy: connect two ranks only when a collective needs it. They both must be in that collective then: a message
            to a rank that is not there yet would be waited for in its call.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, lazy: bool = False) -> None:
        self.rank, self.size, self.is_lazy = rank, size, lazy
        self._held: list[object] = []
        gloo = dist.ProcessGroupGloo(store, rank, size, _lazily(timeout) if lazy else timeout)
        self._group: dist.ProcessGroup | None = as_group(gloo, store, "cpu")

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; not to be kept.

        Raises:
            TransportError: it has been hung up.
        """
        if self._group is None:
            raise TransportError("shm: this group has been destroyed, or cannot be used since an earlier error")
        return self._group

    def finish(self, work: dist.Work) -> Steps:
        """Go on when `work`, of this group, has ended.

        Raises:
            TransportError: it has failed; the others may be gone.
        """
        self._held.append(work)
        del work
        while self._held and not self._held[-1].is_completed():
            yield _others
        if not self._held:  # another thread has hung up
            raise TransportError("shm: this group has been destroyed, or cannot be used since an earlier error")
        try:
            self._held.pop().wait()
        except RuntimeError as error:
            raise TransportError(f"shm: between machines (Gloo): {error}") from error

    def close(self) -> None:
        """Hang up. Operations that are under way elsewhere end with an error there.

        One that is under way here holds on to its sockets until the others have come to it, or its time is up; that
        is waited for in a thread of its own.
        """
        self._held.append(self._group)
        self._group = None
        held, self._held = self._held, []
        thread = threading.Thread(target=held.clear, name="lockstep-gloo", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


def _others() -> Iterable[int]:
    """Ranks on other machines; Gloo itself sees when they are gone."""
    return ()


def _lazily(timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 2
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    return options
