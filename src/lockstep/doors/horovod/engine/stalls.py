"""How long operations may wait for ranks that have not asked for them, and what is said then (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

from .mismatch import names_of
from .request import Request

__all__ = ["Late", "Limits", "late_ones"]

_MOST_NAMES = 6
_WARN, _END = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# of `lockstep run`, whose options come before what a user's environment says for Horovod
_RUN_END = "LOCKSTEP_STALL_TIMEOUT"


@dataclass(frozen=True)
class Limits:
    """Seconds: `warn_s`, until it is said; `end_s`, until it is an error. Infinite for never."""

    warn_s: float = 60.0
    end_s: float = math.inf

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Limits:
        """As HOROVOD_STALL_CHECK_DISABLE, HOROVOD_STALL_CHECK_TIME_SECONDS and HOROVOD_STALL_SHUTDOWN_TIME_SECONDS say.

        0 is never.

        Raises:
            ConfigError: for something that is no number.
        """
        if variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(math.inf, math.inf)
        end = _RUN_END if variables.get(_RUN_END) else _END
        return cls(_seconds(variables, _WARN, 60.0) or math.inf, _seconds(variables, end, 0.0) or math.inf)


def _seconds(variables: Mapping[str, str], name: str, usual: float) -> float:
    text = variables.get(name, "").strip()
    try:
        value = float(text or usual)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise ConfigError(f"environment variable {name}", "seconds", text)
    return value


@dataclass(frozen=True)
class Late:
    """Operations that the same ranks have not asked for.

    Attributes:
        missing: these ranks; none when all have asked, and yet it does not go on.
        names: of the operations, such as "allreduce 'x'".
        there: the ranks that wait.
        waited_s: for how long, at most.
    """

    missing: tuple[int, ...]
    names: tuple[str, ...]
    there: tuple[int, ...]
    waited_s: float

    def __str__(self) -> str:
        more = len(self.names) - _MOST_NAMES
        what = ", ".join(self.names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        wait = f"{names_of(self.there)} {'waits' if len(self.there) == 1 else 'wait'}"
        if not self.missing:
            return f"{what} does not go on for {self.waited_s:.0f} s, though all ranks have asked for it"
        verb = "has" if len(self.missing) == 1 else "have"
        return f"{names_of(self.missing)} {verb} not asked for {what} for {self.waited_s:.0f} s, for which {wait}"


def late_ones(
    requests: Sequence[Request], now: float, asked: Mapping[bytes, Sequence[int]], size: int, joined: Sequence[int]
) -> list[Late]:
    """`requests` by the ranks that keep them waiting.

    Args:
        requests: of this rank.
        now: on the clock of their `asked`.
        asked: the ranks that have asked for each of them, by key.
        size: the number of ranks.
        joined: the ranks that take part in all operations of the others.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Request]] = {}
    for request in requests:
        there = tuple(asked[request.key])
        missing = tuple(rank for rank in range(size) if rank not in there and rank not in joined)
        groups.setdefault((missing, there), []).append(request)
    return [
        Late(missing, tuple(f"{r.kind} {r.name!r}" for r in members), there, max(now - r.asked for r in members))
        for (missing, there), members in groups.items()
    ]
