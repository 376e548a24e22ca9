"""How far the ranks of a job are, as the hosts of the job tell each other: counters of each rank,
and the slowest one.

Where a job has several hosts, a rank of each publishes those of its host through the watchdog, and
writes those of the others into a file beside the flight records of its own host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from ..messages import Integer
from . import notes
from .reader import RecorderReader

WINDOW_S = 10.0
"""Seconds over which the times that ranks have waited are compared."""

_NAME = "other-hosts.json"
_STALE_S = 5.0  # hosts publish twice a second
_LEAST_DIFFERENCE = 0.05  # of shares of time; less is chance


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
    """The counters of a rank since its flight record was made.

    Attributes:
        rank: its number.
        host: the name of its host.
        pid: of its process.
        started: when the record was made, in seconds of the monotonic clock of its host.
        state: its phase, one of `layout.PHASES`.
        steps: training steps that it has completed.
        step: steps of its training so far, those before a resume included.
        samples: that it has processed.
        tokens_per_sample: 0 if it is not known.
        data_wait_s: seconds of waiting for batches.
        rank_wait_s: seconds in blocking calls of collectives and messages.
        productive_s: seconds in completed steps, waits for their batches included.
    """

    rank: Integer
    host: str
    pid: Integer
    started: float
    state: str
    steps: Integer
    step: Integer
    samples: Integer
    tokens_per_sample: float
    data_wait_s: float
    rank_wait_s: float
    productive_s: float

    @classmethod
    def of(cls, reader: RecorderReader) -> RankProgress:
        """Return the counters in a flight record."""
        state = reader.state()
        return cls(
            state.rank,
            state.host,
            state.pid,
            state.started,
            state.phase,
            state.steps,
            state.step,
            state.samples or 0,
            state.tokens_per_sample,
            state.data_wait_s,
            state.waited_until(time.monotonic()),
            state.productive_s,
        )


class SlowRank(msgspec.Struct, frozen=True):
    """The rank for which the others wait.

    Attributes:
        rank: its number.
        host: the name of its host.
        waits: the share of the last seconds in which it has waited for other ranks, 0 to 1.
        others_wait: the share in which the rank that waits most has.
    """

    rank: Integer
    host: str
    waits: float
    others_wait: float


def slowest(shares: Collection[tuple[int, str, float]]) -> SlowRank | None:
    """Return the rank that waits least; None if all wait about as much, or there is only one.

    Args:
        shares: rank, host, and the share of its time in which it waits, of each rank.
    """
    if len(shares) < 2:
        return None
    most = max(share for *_, share in shares)
    rank, host, least = min(shares, key=lambda share: share[2])
    return SlowRank(rank, host, least, most) if most - least >= _LEAST_DIFFERENCE else None


class SlowestRank:
    """Finds the slowest rank from the seconds that ranks have waited."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, dict[tuple[int, int, float], float]]] = deque()

    def find(self, ranks: Sequence[RankProgress], now: float) -> SlowRank | None:
        """Return the rank that has waited least in the last seconds, see `slowest`.

        Args:
            ranks: of the job.
            now: the time, in seconds of any monotonic clock.
        """
        waited = {
            (progress.rank, progress.pid, progress.started): progress.rank_wait_s
            for progress in ranks
        }
        self._history.append((now, waited))
        while len(self._history) > 2 and now - self._history[1][0] >= WINDOW_S:
            self._history.popleft()
        since, earlier = self._history[0]
        if now <= since:
            return None
        names = {progress.rank: progress.host for progress in ranks}
        shares = [
            (rank, names[rank], (waited[rank, pid, started] - before) / (now - since))
            for (rank, pid, started), before in earlier.items()
            if (rank, pid, started) in waited
        ]
        return slowest(shares)


class OtherHosts(msgspec.Struct, frozen=True):
    """What a host knows of the others.

    Attributes:
        time: Unix time of writing.
        ranks: of all other hosts, on the first host of the job; else those of the first one.
        first_host: the name of the first host.
        slowest: the slowest rank of the job, if one is much slower.
    """

    time: float
    ranks: list[RankProgress]
    first_host: str = ""
    slowest: SlowRank | None = None


def write_other_hosts(folder: Path, hosts: OtherHosts) -> None:
    """Write what is known of other hosts into the folder of a job's records.

    Raises:
        OSError: the folder is gone, or there is no space.
    """
    notes.write(folder / _NAME, hosts)


def read_other_hosts(folder: Path) -> OtherHosts | None:
    """Return what is known of the other hosts of a job; None if there is none, or it is old."""
    hosts = notes.read(folder / _NAME, OtherHosts)
    return None if hosts is None or time.time() - hosts.time >= _STALE_S else hosts
