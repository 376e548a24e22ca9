"""The stall inspector: reports requests that some ranks have submitted and others have not, and
reads the time limits of the watchdog for Horovod's operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep import arguments
from lockstep.environment.variable_table import STALL_TIMEOUT
from lockstep.errors import ranks_in_words
from lockstep.watchdog.rounds import Rounds

from .request import MessageTable, Request

_MAX_NAMES = 6
_WARN = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# Set by `lockstep run --stall-timeout`, which takes precedence over Horovod's variable in the
# user's environment.
_RUN_TIMEOUT = STALL_TIMEOUT.name


@dataclass(frozen=True)
class StallLimits:
    """How long an operation may be pending, in seconds; infinite for no limit.

    Attributes:
        warn_s: until a warning.
        shutdown_s: until an error.
        setting: the environment variable that sets `shutdown_s`.
    """

    warn_s: float = 60.0
    shutdown_s: float = math.inf
    setting: str = _SHUTDOWN

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> StallLimits:
        """Read the limits from the environment variables HOROVOD_STALL_…; 0 means no limit.

        The variables are HOROVOD_STALL_CHECK_DISABLE, HOROVOD_STALL_CHECK_TIME_SECONDS and
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.

        Raises:
            ConfigError: for a value that is not a number of seconds.
        """
        if variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(math.inf, math.inf)
        shutdown = _RUN_TIMEOUT if variables.get(_RUN_TIMEOUT) else _SHUTDOWN
        return cls(
            _seconds(variables, _WARN, 60.0) or math.inf,
            _seconds(variables, shutdown, 0.0) or math.inf,
            shutdown,
        )


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "").strip()
    expected = "a number of seconds, 0 or more"
    return arguments.parse_number(
        f"environment variable {name}", text or default, least=0, expected=expected
    )


@dataclass(frozen=True)
class StalledOps:
    """Operations that the same ranks have not submitted.

    Attributes:
        missing: the ranks that have not submitted them.
        names: the operations, such as "allreduce 'x'".
        waiting: the ranks that have submitted them.
        waited_s: how long the oldest of them has been pending, in seconds.
    """

    missing: tuple[int, ...]
    names: tuple[str, ...]
    waiting: tuple[int, ...]
    waited_s: float

    def __str__(self) -> str:
        return (
            f"{_ranks_have(self.missing)} not submitted {_listed(self.names)}, for which "
            f"{_ranks_have(self.waiting)} waited {self.waited_s:.0f} s"
        )


def _ranks_have(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def operations_in_words(requests: Sequence[Request]) -> str:
    """Return the operations of `requests` as text: ``allreduce 'x', broadcast 'y' and 3 more``."""
    return _listed([_in_words(request) for request in requests])


def _in_words(request: Request) -> str:
    return f"{request.kind} {request.name!r}"


def group_stalled(requests: Sequence[Request], now: float, table: MessageTable) -> list[StalledOps]:
    """Group `requests` by the ranks that have not submitted them.

    Args:
        requests: pending requests of this rank, which it has announced.
        now: the time, on the clock of `Request.submitted_at`.
        table: the ranks that have submitted each request, and those that have joined.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Request]] = {}
    for request in requests:
        ranks = tuple(table.missing_ranks(request.key)), tuple(table.waiting_ranks(request.key))
        groups.setdefault(ranks, []).append(request)
    return [
        StalledOps(
            missing,
            tuple(map(_in_words, members)),
            waiting,
            max(now - request.submitted_at for request in members),
        )
        for (missing, waiting), members in groups.items()
    ]


_CHECK_INTERVAL_S = 0.1
_MAY = "It may call other operations, or the same ones under other names."
_ADVICE = "Submit every operation on every rank, under the same name."


class StallInspector:
    """Finds requests that ranks submit and others do not, though all of them run cycles.

    The watchdog sees to ranks that run none: they have submitted nothing. Ranks that submit other
    operations, or the same ones under other names, run one cycle after the other and wait for each
    other for ever; only the message table shows that.

    Args:
        rank: this rank.
        limits: after how long a pending request is warned about, and is an error.
        rounds: the cycles, as the watchdog knows them; they show warnings and make the report.
        table: the ranks that have submitted each request.
    """

    def __init__(self, rank: int, limits: StallLimits, rounds: Rounds, table: MessageTable) -> None:
        self._rank = rank
        self._limits = limits
        self._rounds = rounds
        self._table = table
        self._next_check_at = 0.0
        self._warned: set[Request] = set()

    def check(self, pending: Sequence[Request]) -> None:
        """Check the pending requests of this rank, before a cycle; most calls return at once.

        Raises:
            StallError: a request has been pending for too long; it is the watchdog's report, and
                every rank gets it.
        """
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + _CHECK_INTERVAL_S
        announced = [
            request
            for request in pending
            if request.kind != "join" and self._rank in self._table.waiting_ranks(request.key)
        ]
        overdue = [
            request
            for request in announced
            if now - request.submitted_at >= self._limits.shutdown_s
        ]
        for stalled in group_stalled(overdue, now, self._table):
            text = str(stalled)
            sentence = f"{text[0].upper()}{text[1:]}."
            self._rounds.report_stall(sentence, stalled.missing, stalled.waited_s, _ADVICE)
        self._warned.intersection_update(announced)
        slow = [
            request
            for request in announced
            if now - request.submitted_at >= self._limits.warn_s and request not in self._warned
        ]
        self._warned.update(slow)
        for stalled in group_stalled(slow, now, self._table):
            if self._rank == min(stalled.waiting):  # one of the waiting ranks says it
                self._rounds.warn(f"{stalled}. {_MAY}")
