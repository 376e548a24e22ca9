"""What the host that leads an elastic job next has to know, in simulated jobs without other faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.elastic.membership import Events, Finish, Publish, View, WorkerState
from lockstep.launcher.elastic_job import JobState
from support.job_simulation import World, simulated

SLOTS = [1, 2, 2]  # of three hosts, with a worker each


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(World, "fault", lambda self: None)
    with simulated():
        seeds = (World(seed) for seed in range(10_000))
        yield next(
            world
            for world in seeds
            if world.slots == SLOTS and world.minimum == 1 and world.most == len(SLOTS)
        )


def test_nobody_remembers_what_was_before_all_workers_were_started_again(world: World) -> None:
    """Else workers that join are given what rank 0 had sent before, and a training that had been
    complete before is taken for complete.
    """
    host = world.parts[1].host
    host._memory.started(0, False)
    host._memory.note_down(0, View(3, (0,), (1,), ((0, 5),), 0))
    host._memory.note_up(0, WorkerState("done", 3, (0, 5), fit=0))
    host._memory.note_down(0, Finish("complete", 0))
    host._memory.ended(0, in_good_order=False)
    host._keep(0, Publish(b"value"))
    host._keep(0, Events((0, 5), b"states"))
    host._obey(JobState(2, first=0, started=1))
    assert host._memory.report().completed == 0 and host._kept and host._events is not None
    host._obey(JobState(2, first=1, started=1, restarts=1))
    report = host._memory.report()
    assert report.completed == -1 and report.view is None
    assert not host._kept and host._events is None
