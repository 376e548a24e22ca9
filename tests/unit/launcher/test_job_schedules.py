"""Elastic jobs on several simulated hosts under random schedules of faults: what must hold, and
that it is seen.

A schedule is tried again by its number: ``python tests/support/job_simulation.py 1 --first 4711
--verbose``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest

from lockstep.launcher import elastic_host, elastic_job
from lockstep.launcher.election import Election, _Attempt
from support.job_simulation import PropertyError, try_schedules

SCHEDULES = 750
_results = Counter[str]()


@pytest.mark.timeout(600)  # 12 s alone; the number of schedules is what counts
@pytest.mark.parametrize("block", range(4))
def test_what_must_hold_does_in_every_schedule(block: int) -> None:
    """See `World`: one view of each number, one side that trains, no step lost that is left, all
    well in the end.
    """
    _results.update(try_schedules(range(block * SCHEDULES, (block + 1) * SCHEDULES)))


def test_most_jobs_succeed() -> None:
    """So that the schedules above are some."""
    results = _results or try_schedules(range(200))
    assert 0.7 < results["success"] / results.total() < 0.95, results


# --- each guard is needed, or the schedules would not see that it is missing
# ----------------------------------


def half_is_enough(self: Election, hosts: Iterable[int], attempt: _Attempt) -> bool:
    counted = [host for host in self._hosts if host not in attempt.ended]
    return 2 * len(set(hosts).intersection(counted)) >= len(counted)


# what is seen without it → the guard, and a schedule soon before the first one that shows it
GUARDS: dict[str, tuple[AbstractContextManager[object], int]] = {
    "two views": (patch.object(Election, "_is_quorum", half_is_enough), 0),
    "two hosts have the number": (patch.object(elastic_host, "_NUMBERS_A_VIEW", 0), 0),
    "goes on with step": (patch.object(elastic_job, "FENCE_S", 0.0), 1500),
}


@pytest.mark.parametrize("seen", GUARDS)
def test_without_a_guard_something_does_not_hold(seen: str) -> None:
    without, first = GUARDS[seen]
    with without, pytest.raises(PropertyError, match=seen):
        try_schedules(range(first, first + 4 * SCHEDULES))
