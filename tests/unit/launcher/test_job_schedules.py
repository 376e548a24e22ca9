"""Elastic jobs on several simulated hosts under random schedules of faults: what must hold, and
that it is seen.

A schedule is tried again by its number: ``python tests/support/job_simulation.py 1 --first 4711
--verbose``.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest

from lockstep.elastic.membership import Lease
from lockstep.launcher.elastic_jobs import admission, elastic_job, local_members
from lockstep.launcher.elastic_jobs.election import Ballot, Election, Prepare, _Attempt
from lockstep.launcher.elastic_jobs.mesh import Link
from support.job_simulation import (
    CLOCK,
    CRASHES_IN_A_VOTE,
    FROZEN_LAUNCHER,
    FROZEN_LEADER,
    PropertyError,
    SimulatedWorkers,
    World,
    simulated,
    try_schedules,
)

SCHEDULES = 750
_results = Counter[str]()


@pytest.mark.timeout(600)  # some 15 s alone; the number of schedules is what counts
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
    counted = [host for host in self.hosts if host not in attempt.ended]
    return 2 * len(set(hosts).intersection(counted)) >= len(counted)


_set_link = Election.set_link


def lost_is_ended(self: Election, host: int, link: Link) -> None:
    _set_link(self, host, Link.ENDED if link is Link.LOST else link)


_send = SimulatedWorkers.send


def no_lease_that_is_over(self: SimulatedWorkers, number: int, message: object) -> None:
    if message != Lease(0.0):
        _send(self, number, message)


# the guard → what is seen without it, how it is taken out, and the schedules that show it: those
# whose numbers end like the first one's begin with the faults against which it guards
GUARDS: dict[str, tuple[str, AbstractContextManager[object], range]] = {
    "a quorum is more than half": (
        "two views",
        patch.object(Election, "_is_quorum", half_is_enough),
        range(3000),
    ),
    "a host that was lost may have accepted more than is known": (
        "two views",
        patch.object(Election, "set_link", lost_is_ended),
        range(CRASHES_IN_A_VOTE, 3000, 10),
    ),
    "each leader gives numbers of its own": (
        "two hosts have the number",
        patch.object(admission, "_NUMBERS_A_VIEW", 0),
        range(3000),
    ),
    "who begins without the state waits": (
        "goes on with step",
        patch.object(elastic_job, "FENCE_S", 0.0),
        range(FROZEN_LAUNCHER, 3000, 10),
    ),
    "a worker completes no step without a lease": (
        "goes on with step",
        patch.object(local_members, "LEASE_S", math.inf),
        range(FROZEN_LAUNCHER, 3000, 10),
    ),
    "a worker has a lease before its first step, if one that is over": (
        "goes on with step",
        patch.object(SimulatedWorkers, "send", no_lease_that_is_over),
        range(FROZEN_LEADER, 6000, 10),
    ),
    "who does not hear the leader renews no lease": (
        "goes on with step",
        patch.object(local_members, "_HEARD_S", math.inf),
        range(FROZEN_LEADER, 3000, 10),
    ),
    "who leads and did not run for a while asks before its followers renew leases": (
        "goes on with step",
        patch.object(Election, "is_vote_open", False),
        range(FROZEN_LEADER, 6000, 10),
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_something_does_not_hold(guard: str) -> None:
    seen, without, schedules = GUARDS[guard]
    with without, pytest.raises(PropertyError, match=seen):
        try_schedules(schedules)


# --- the first moments after a stop
# ----------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    """A job on several hosts, the first of which leads, before any fault."""
    with simulated():
        world = World(FROZEN_LEADER)
        while world.queue[0][0] < 0.3:
            world.now, _, what = heapq.heappop(world.queue)
            CLOCK.now = world.now
            what()
        assert world.parts[0].host._election.leads
        assert world.parts[1].host._election.hosts == tuple(world.parts)
        yield world


def test_who_leads_and_did_not_run_asks_before_anything_else_tells_that_it_runs(
    world: World,
) -> None:
    """With the turn of its loop its pulse beats again, and those that follow it renew leases."""
    host, told = world.parts[0].host, list[object]()
    host.mesh.send = lambda other, message: told.append((other, type(message)))
    host._pulse.turn = lambda: told.append("turns")
    host._pulse.lapse_s = 10.0
    host._note_turn()
    others = [number for number in world.parts if number != 0]
    assert told == [*((other, Prepare) for other in others), "turns"]


def test_a_lease_is_renewed_only_after_what_was_read_with_the_sign_of_life(world: World) -> None:
    """That who leads asks is read in the same turn as that it runs."""
    host, leases = world.parts[1].host, list[float]()
    lease = host._members._lease
    assert lease() > world.now
    host._members._lease = lambda: leases.append(lease()) or 0.0
    host._members._next_lease = host._next_poll = 0.0
    view = host._election.view
    host.mesh.on_message(0, Prepare(view, Ballot(view.number + 1, 1, 0)))
    host.turn()
    assert leases == [0.0]


def test_a_launcher_that_was_stopped_has_heard_only_who_ran_meanwhile(world: World) -> None:
    """Of the simulation."""
    leader, follower = world.launchers[:2]
    leader.frozen_since = world.now = 10.0
    follower.stops.append((15.0, 16.5))
    world.now = 17.0
    assert world.silent_s(1, 0) == 7.0
    leader.frozen_since = 16.0
    assert world.silent_s(1, 0) == 0.5  # read when it went on
