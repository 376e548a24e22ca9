"""Horovod's exceptions."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """An operation has failed: the requests of the ranks do not match, or ranks can no longer
    communicate.

    If another exception is the cause, it is the ``__cause__``.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Hosts have joined or left an elastic job.

    Args:
        skip_sync: whether the state need not be broadcast again, because hosts have only left.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
