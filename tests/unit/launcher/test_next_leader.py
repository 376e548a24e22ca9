"""What the host that leads an elastic job next has to know, in simulated jobs without other faults."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock, call

import pytest

from lockstep.elastic.membership import Finish, Hello, Keep, View, WorkerState
from lockstep.launcher.elastic_jobs.host_messages import JobState, Start
from support.job_simulation import World, simulated

SLOTS = [1, 2, 2]  # of three hosts, with a worker each


@pytest.fixture
def no_faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(World, "fault", lambda self: None)
    with simulated():
        yield


@pytest.fixture
def world(no_faults: None) -> World:
    return a_world(SLOTS)


def a_world(slots: list[int]) -> World:
    """Return a job on hosts with so many slots and without shared storage, a worker for each."""
    worlds = (World(seed) for seed in range(10_000))
    return next(
        world
        for world in worlds
        if (world.slots, world.minimum, world.most, world.is_shared)
        == (slots, 1, len(slots), False)
    )


def test_it_knows_of_the_workers_of_which_another_host_alone_has_heard(world: World) -> None:
    """Else it gives their numbers to others: two workers of the job would have the same."""
    send = world.send
    is_cut = False

    def without_the_second(number: int, other: int, message: object) -> None:
        if not (is_cut and (number, other) == (0, 1)):
            send(number, other, message)

    def lose_a_worker() -> None:
        nonlocal is_cut
        is_cut = True
        nodes = world.parts[2].host._workers.nodes
        next(iter(nodes.values())).exit(-9)

    def lose_the_leader() -> None:
        assert len({node.number for node in world.nodes.values()}) == world.most + 1
        world.die(world.launchers[0], "killed", False)

    world.send = without_the_second  # type: ignore[method-assign]
    world.at(4.0, lose_a_worker)
    world.at(4.15, lose_the_leader)
    assert world.run() == "success"


def test_nobody_remembers_what_was_before_all_workers_were_started_again(world: World) -> None:
    """Else workers that join are given what rank 0 had sent before, and a training that had been
    complete before is taken for complete.
    """
    host = world.parts[1].host
    host._knowledge.memory.started(0, False)
    host._knowledge.memory.note_down(0, View(3, (0,), (1,), ((0, 5),), 0))
    host._knowledge.memory.note_up(0, WorkerState("done", 3, (0, 5), fit=0))
    host._knowledge.memory.note_down(0, Finish("complete", 0))
    host._knowledge.memory.ended(0, in_good_order=False)
    host._members.keep(Keep(b"value", worker=0))
    host._members.keep(Keep(b"states", commit=(0, 5), worker=0))
    host._obey(JobState(2, first=0, started=1))
    assert host._knowledge.memory.report().completed == 0 and len(host._knowledge.memory.kept) == 2
    host._obey(JobState(2, first=1, started=1, restarts=1))
    report = host._knowledge.memory.report()
    assert report.completed == -1 and report.view is None
    assert not host._knowledge.memory.kept


def test_a_worker_that_joins_is_given_what_its_host_keeps(world: World) -> None:
    members = world.parts[1].host._members
    members.workers = workers = Mock()
    one, two = (Keep(b"value", request, worker=0) for request in range(2))
    members.keep(one)
    members.start(Start(7, 2, 3, 1, True, 0, "", ""))
    members._receive(7, Hello(7))
    members.keep(two)
    members.keep(one)  # asked again, by who leads next
    assert workers.send.mock_calls == [call(7, one), call(7, two)]


def test_it_sends_the_others_what_the_one_before_could_not(world: World) -> None:
    """Else workers that join there wait for it for ever, or are given other values for those that
    they ask for.
    """
    value = Keep(b"value", 0, worker=0)

    def send_to_one() -> None:
        world.parts[1].host._members.keep(value)
        assert not world.parts[2].host._knowledge.memory.kept

    world.at(4.0, send_to_one)
    world.at(4.15, world.die, world.launchers[0], "killed", False)
    assert world.run() == "success"
    assert value in world.parts[2].host._knowledge.memory.kept


def test_it_takes_nothing_from_a_host_that_knows_earlier_workers_only(world: World) -> None:
    """Else their group counts as the newest one, and all workers are started again in vain."""
    send = world.send
    is_cut = False

    def without_the_third(number: int, other: int, message: object) -> None:
        if not (is_cut and (number, other) == (0, 2)):
            send(number, other, message)

    def lose_all_workers() -> None:
        nonlocal is_cut
        is_cut = True
        world.lose_all()

    world.send = without_the_third  # type: ignore[method-assign]
    world.at(4.0, lose_all_workers)
    world.at(7.0, world.die, world.launchers[0], "killed", False)
    assert world.run() == "success"
    assert world.parts[1].host._knowledge.job.restarts == 1


def test_one_of_two_hosts_goes_on_when_the_other_one_wants_to_join_again(no_faults: None) -> None:
    """Else it ends when the network is whole, as the other one might have gone on."""
    world = a_world([1, 1])
    world.parts[1].host._peers.add([world.parts[0].host._peers.hosts[0]])
    world.cut({"a1"}, 10.0)  # before it has heard of the view that it is in
    assert world.run() == "success"
    assert any("is outside" in line for line in world.log)
