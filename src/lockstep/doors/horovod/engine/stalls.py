"""Warns of operations that some ranks have asked for long ago and others have not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from lockstep.errors import ConfigError

from .request import Request

__all__ = ["StallCheck", "warn_after"]

_log = logging.getLogger("lockstep.horovod")


def warn_after(variables: Mapping[str, str]) -> float | None:
    """The seconds that HOROVOD_STALL_CHECK_TIME_SECONDS asks for, 60 by default; None where it is disabled.

    Raises:
        ConfigError: for something that is no number.
    """
    if variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return None
    text = variables.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "") or "60"
    try:
        return float(text)
    except ValueError:
        raise ConfigError("environment variable HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds", text) from None


class StallCheck:
    """Says it once for each operation.

    Args:
        after: seconds; None for never.
        rank: this one.
    """

    def __init__(self, after: float | None, rank: int) -> None:
        self._after, self._rank = after, rank
        self._said: set[bytes] = set()

    def look(self, requests: Iterable[Request], now: float, missing: Callable[[bytes], list[int]]) -> None:
        """Warn of those among `requests` that wait for too long at the time `now`.

        Args:
            requests: all that are under way.
            now: on the clock of their `asked`.
            missing: tells which ranks have not asked for the operation of a key, as far as is known.
        """
        if self._after is None:
            return
        late = [request for request in requests if now - request.asked >= self._after]
        self._said &= {request.key for request in late}
        for request in late:
            if request.key not in self._said and request.kind != "join":
                self._said.add(request.key)
                others = [rank for rank in missing(request.key) if rank != self._rank]
                _log.warning(
                    "rank %d has waited for %.0f s to carry out %s %r, which ranks %s have not asked for, as far as is "
                    "known here. They may be busy, have ended, or call other operations.",
                    *(self._rank, now - request.asked, request.kind, request.name, others),
                )
