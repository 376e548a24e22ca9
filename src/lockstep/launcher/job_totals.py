"""What a job has done since its launcher was started, whatever became of its workers: the sums of
the counters in their flight records, which begin again with each worker and each group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from ..flight_recorder import notes
from ..flight_recorder.live_ranks import LiveRanks
from ..flight_recorder.rank_progress import (
    RankProgress,
    SlowRank,
    read_other_hosts,
    slowest,
)
from ..messages import Integer

_NAME = "totals.json"


class JobTotals(msgspec.Struct, frozen=True):
    """The totals of a job at one moment.

    Attributes:
        started: Unix time of the start of the launcher.
        updated: Unix time of this moment.
        world_size: number of ranks.
        workers: number of ranks by name of their host, as far as they are known here.
        step: steps of the training so far, those before a resume included.
        steps: training steps since the start; those that were repeated count again.
        steps_repeated: how many were repeated, as all workers were started again from a checkpoint.
        samples: that all ranks have processed.
        tokens: the same of tokens; 0 if their number in a sample is not known.
        data_wait_s: seconds of waiting for batches, the mean of the ranks.
        rank_wait_s: seconds of waiting for other ranks, the mean of the ranks.
        productive_s: seconds in steps that were not repeated, of rank 0.
        restarts: how often all workers were started again.
        lost: workers of an elastic job that were lost or have left.
        joined: workers that joined the training later.
        slowest: the rank for which the others wait; None if there is none.
    """

    started: float
    updated: float
    world_size: Integer = 0
    workers: dict[str, Integer] = {}
    step: Integer = 0
    steps: Integer = 0
    steps_repeated: Integer = 0
    samples: Integer = 0
    tokens: float = 0.0
    data_wait_s: float = 0.0
    rank_wait_s: float = 0.0
    productive_s: float = 0.0
    restarts: Integer = 0
    lost: Integer = 0
    joined: Integer = 0
    slowest: SlowRank | None = None

    @property
    def is_whole(self) -> bool:
        """Whether these are the totals of all ranks: those of other hosts are known on the first
        host only.
        """
        return sum(self.workers.values()) >= self.world_size

    @property
    def goodput(self) -> float:
        """The share of the time since the start in which steps were made that count, 0 to 1."""
        return min(1.0, self.productive_s / max(self.updated - self.started, 1e-6))


class TotalsOfJob:
    """Adds up the counters of a job's ranks.

    Args:
        is_elastic: whether ranks may change within an attempt.

    Attributes:
        lost, joined: see `JobTotals`; set by whoever knows.
    """

    def __init__(self, is_elastic: bool) -> None:
        self.lost = 0
        self.joined = 0
        self._is_elastic = is_elastic
        self._live: LiveRanks | None = None
        self._folder = Path()
        self._known: dict[tuple[str, int], RankProgress] = {}  # by host and rank
        self._started = time.time()
        self._world_size = 0
        self._attempt = 0
        self._step_before = 0  # of the attempt that has failed; 0 once the next one has begun
        self._step = 0
        self._steps = 0
        self._steps_repeated = 0
        self._samples = 0
        self._tokens = 0.0
        self._data_wait_s = 0.0
        self._rank_wait_s = 0.0
        self._productive_s = 0.0

    def start_attempt(self, attempt: int, folder: Path) -> None:
        """Read the flight records in another folder: those of workers that are about to start.

        Args:
            attempt: how often all workers have been started before.
            folder: of the records.
        """
        self.update()
        self.close()
        self._live = LiveRanks(folder, self._is_elastic)
        self._folder = folder
        if attempt > self._attempt:
            self._attempt = attempt
            self._step_before = self._step

    def close(self) -> None:
        """Close the flight records."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def update(self) -> JobTotals:
        """Read the flight records, and return the totals."""
        statuses = [] if self._live is None else self._live.poll()
        counters = [] if self._live is None else self._live.counters()
        other_hosts = read_other_hosts(self._folder) if self._live is not None else None
        others = [] if other_hosts is None else other_hosts.ranks
        of_this_host = [status.progress for status in statuses]
        if statuses:
            self._world_size = statuses[0].world_size
        waited_s = self._add([*counters, *others])
        if others:
            self._rank_wait_s += waited_s / max(1, self._world_size)
            slow = other_hosts.slowest if other_hosts is not None else None
        else:
            # on one host the flight records tell also which rank has entered a collective last
            waited_s = sum(status.waited_s for status in statuses)
            self._rank_wait_s += waited_s / max(1, len(statuses))
            slow = slowest(
                [
                    (status.rank, status.progress.host, status.waiting)
                    for status in statuses
                    if status.waiting is not None
                ]
            )
        return JobTotals(
            self._started,
            time.time(),
            self._world_size,
            dict(Counter(progress.host for progress in [*of_this_host, *others])),
            self._step,
            self._steps,
            self._steps_repeated,
            self._samples,
            self._tokens,
            self._data_wait_s,
            self._rank_wait_s,
            self._productive_s,
            self._attempt,
            self.lost,
            self.joined,
            slow,
        )

    def _add(self, ranks: Iterable[RankProgress]) -> float:
        """Add what ranks have done since they were seen last; return the seconds that they have
        waited for others.
        """
        waited_s = 0.0
        for progress in ranks:
            place = progress.host, progress.rank
            before = self._known.get(place)
            if before is not None and before.started > progress.started:
                continue  # another host tells of a record that has been replaced
            if before is None or (before.pid, before.started) != (progress.pid, progress.started):
                before = _nothing(progress)
            self._known[place] = progress
            samples = progress.samples - before.samples
            self._samples += samples
            self._tokens += samples * progress.tokens_per_sample
            data_wait_s = progress.data_wait_s - before.data_wait_s
            self._data_wait_s += data_wait_s / max(1, self._world_size)
            waited_s += max(0.0, progress.rank_wait_s - before.rank_wait_s)
            if progress.rank == 0:
                self._add_steps(before, progress)
        return waited_s

    def _add_steps(self, before: RankProgress, progress: RankProgress) -> None:
        """Add the steps that rank 0 has made between two looks."""
        steps = progress.steps - before.steps
        if not steps:
            return
        self._steps += steps
        self._productive_s += progress.productive_s - before.productive_s
        if self._step_before:
            first = progress.step - steps
            repeated = max(0, self._step_before - first)
            mean_s = self._productive_s / self._steps
            self._steps_repeated += repeated
            self._productive_s = max(0.0, self._productive_s - repeated * mean_s)
            self._step_before = 0
        self._step = progress.step


def _nothing(progress: RankProgress) -> RankProgress:
    """Return the counters of a rank when its record was made."""
    return msgspec.structs.replace(
        progress, steps=0, samples=0, data_wait_s=0.0, rank_wait_s=0.0, productive_s=0.0
    )


def write_totals(folder: Path, totals: JobTotals) -> None:
    """Write totals into the folder of a job's records, for `lockstep top`; nothing happens if the
    folder is gone, or full.
    """
    with suppress(OSError):
        notes.write(folder / _NAME, totals)


def read_totals(folder: Path) -> JobTotals | None:
    """Return the totals of a job as its launcher has written them; None if there are none."""
    return notes.read(folder / _NAME, JobTotals)
