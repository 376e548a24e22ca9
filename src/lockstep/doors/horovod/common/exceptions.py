"""The exceptions that Horovod's users catch."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """An operation has failed: the ranks do not fit together, or cannot reach each other any longer.

    Where something else has caused it, that is its ``__cause__``.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818, scripts know it by this name
    """Machines have joined or left an elastic job.

    Args:
        skip_sync: whether the state need not be sent to all workers again, as workers have only left.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
