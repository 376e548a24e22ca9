"""The decisions of an elastic job: events of workers, hosts and users in, messages to the hosts
out.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from lockstep.elastic.membership import (
    Finish,
    Hello,
    HostMemory,
    HostReport,
    Regroup,
    View,
    WorkerRecord,
    WorkerState,
)
from lockstep.errors import LockstepError
from lockstep.job.messages import Failure, Request
from lockstep.launcher.elastic_jobs import elastic_job
from lockstep.launcher.elastic_jobs.elastic_job import FENCE_S, ElasticJob
from lockstep.launcher.elastic_jobs.host_messages import Ended, JobState, Kill, Start, ToWorker
from lockstep.launcher.elastic_jobs.job_size import Limits
from lockstep.launcher.handshake import HostEntry
from support.worker_states import say

M = TypeVar("M")

NAMES = ("alpha", "beta", "gamma")


class World:
    """A job on hosts that do at once what they are told, and what it has said."""

    def __init__(
        self, slots: tuple[int, ...], target: int, minimum: int = 1, maximum: int = 8
    ) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.said: list[str] = []
        hosts = {number: entry(number, count) for number, count in enumerate(slots)}
        self.job = ElasticJob(
            Limits(minimum, maximum), JobState(target), hosts, self._send, self.said.append
        )
        self.job.supervise()

    def _send(self, host: int, message: object) -> None:
        self.sent.append((host, message))

    def of(self, kind: type[M]) -> list[tuple[int, M]]:
        """The messages of a kind that have been sent, with their hosts."""
        return [(host, message) for host, message in self.sent if isinstance(message, kind)]

    def placed(self) -> dict[int, int]:
        """The host of each worker that was started."""
        return {start.number: host for host, start in self.of(Start)}

    def train(self) -> None:
        """Let all workers become members, and begin the training."""
        for number in self.placed():
            for message in (Hello(number), WorkerState("ready")):
                self.job.receive(number, message)
        for number in self.job.coordinator.members:
            say(self.job, number, phase="member", fit=0, most=8)
        self.job.supervise()
        self.sent.clear()

    def end(self, number: int, host: int, code: int = -9, report: Failure | None = None) -> None:
        """A worker's process ends; with code 0 in good order."""
        self.job.ended(host, Ended(number, code, code == 0, report))
        self.job.supervise()

    def arrive(self) -> None:
        """All members arrive for the next view."""
        for number in self.job.coordinator.members:
            say(
                self.job,
                number,
                phase="arrived",
                generation=self.job.coordinator.generation,
                commit=(0, 5, 0),
            )
        self.job.supervise()

    def leave(self, leaver: int) -> None:
        """A member leaves after the step in progress."""
        for number in self.job.coordinator.members:
            say(self.job, number, phase="left", generation=self.job.coordinator.formed)
        for number in self.job.coordinator.members:
            generation = self.job.coordinator.generation
            say(
                self.job,
                number,
                phase="arrived",
                generation=generation,
                commit=(0, 5, 0),
                leaving=number == leaver,
            )
        self.job.supervise()


def entry(number: int, slots: int) -> HostEntry:
    return HostEntry(number, NAMES[number], f"10.0.0.{number}", 1000 + number, slots)


def error(number: int) -> Failure:
    return Failure(number, 1, "ValueError", "on purpose", "Traceback ...")


@pytest.mark.parametrize(
    ("slots", "target", "expected"),
    [
        ((2, 2, 2), 6, [0, 0, 1, 1, 2, 2]),
        ((2, 2, 2), 3, [0, 1, 2]),
        ((1, 4), 4, [0, 1, 1, 1]),
        ((3, 1), 2, [0, 0]),
        ((1, 1), 4, [0, 1]),
    ],
)
def test_the_first_workers_are_on_the_hosts_with_most_free_slots(
    slots: tuple[int, ...], target: int, expected: list[int]
) -> None:
    world = World(slots, target)
    assert list(world.placed().values()) == expected
    assert [(start.rank, start.joins) for _, start in world.of(Start)] == [
        (i, False) for i in range(len(expected))
    ]


def test_a_worker_that_was_lost_is_replaced_where_a_slot_is_free() -> None:
    world = World((1, 1, 3), 3)
    world.train()
    world.end(1, host=1)
    assert [(host, start.number, start.joins) for host, start in world.of(Start)] == [(2, 3, True)]
    assert world.said == ["lockstep: rank 1 on beta was lost (killed by SIGKILL); 2 workers go on"]


def places(world: World) -> list[tuple[int, int, int]]:
    """The rank, the world size and the local world size of each worker that was started."""
    return [(start.rank, start.size, start.local_size) for _, start in world.of(Start)]


def test_workers_that_start_to_join_at_once_have_places_of_their_own() -> None:
    world = World((8,), 4)
    world.train()
    world.job.ask(0, Request(1, "resize", 7))
    world.job.supervise()
    assert places(world) == [(4, 5, 5), (5, 6, 6), (6, 7, 7)]


def test_the_local_size_is_that_of_the_host() -> None:
    world = World((4, 4), 8)
    assert {start.local_size for _, start in world.of(Start)} == {4}
    world.train()
    world.end(5, host=1)
    assert places(world) == [(7, 8, 4)]


def test_a_host_that_joins_gets_no_more_workers_than_the_training_can_have() -> None:
    world = World((1,), 1, maximum=20)
    world.train()
    world.job.host_added(entry(1, 12))
    world.job.supervise()
    assert world.job.state.target == 8
    assert [start.rank for _, start in world.of(Start)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_host_that_was_lost_is_not_replaced_beyond_the_slots_of_the_others() -> None:
    world = World((2, 2), 3)
    world.train()
    world.job.host_lost(1)
    world.job.coordinator.lost(2)
    world.job.supervise()
    assert not world.of(Start)
    assert world.said == ["lockstep: beta was lost with 1 worker; 2 workers go on"]


def test_workers_do_not_wait_for_those_of_a_host_that_was_lost_before_they_began() -> None:
    world = World((1, 1), 2)
    for message in (Hello(0), WorkerState("ready")):
        world.job.receive(0, message)
    assert not world.job.coordinator.members
    world.job.host_lost(1)
    world.job.coordinator.lost(1)
    world.job.supervise()
    assert world.job.coordinator.view == (0,)


def test_a_host_that_joins_gets_workers_up_to_its_slots_and_the_most() -> None:
    world = World((2,), 2, maximum=3)
    world.train()
    world.job.host_added(entry(1, 4))
    world.job.supervise()
    assert [host for host, _ in world.of(Start)] == [1]
    assert world.job.state.target == 3


def test_a_host_that_is_removed_gets_no_workers_and_its_own_leave() -> None:
    world = World((2, 2), 4)
    world.train()
    assert world.job.ask(0, Request(1, "remove", host="beta")) == (
        "beta leaves after the step in progress, with 2 workers"
    )
    assert world.of(Kill) == [(1, Kill((2, 3), gently=True))]
    assert (world.job.state.target, world.job.state.leaving) == (2, (1,))
    world.end(2, host=1, code=0)
    assert not world.of(Start)
    with pytest.raises(LockstepError, match="alpha is the job's last host"):
        world.job.ask(0, Request(2, "remove", host="alpha"))


def test_workers_that_are_told_to_leave_when_the_training_is_complete_are_not_lost() -> None:
    world = World((1, 1), 2)
    world.train()
    for number in (0, 1):
        say(world.job, number, phase="done", generation=world.job.coordinator.generation)
    assert world.job.coordinator.complete
    world.job.ask(1, Request(1, "leave"))
    world.end(1, host=1, code=-signal.SIGTERM)
    world.end(0, host=0, code=0)
    assert world.job.is_over and not world.job.coordinator.failure and not world.of(Start)


def test_a_host_cannot_be_removed_below_the_minimum_but_may_leave() -> None:
    world = World((1, 1), 2, minimum=2)
    world.train()
    with pytest.raises(
        LockstepError, match="expected at least 2 workers, without beta there are 1"
    ):
        world.job.ask(0, Request(1, "remove", host="beta"))
    with pytest.raises(
        LockstepError, match="expected one of the job's hosts, alpha, beta, got delta"
    ):
        world.job.ask(0, Request(2, "remove", host="delta"))
    assert not world.of(Kill)
    world.job.ask(1, Request(3, "leave"))
    assert world.of(Kill) == [(1, Kill((1,), gently=True))]
    assert world.job.state.target == 2  # for which it waits


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (1, "expected 2 to 6 workers"),
        (7, "expected 2 to 6 workers"),
        (5, "at most 4 workers, the slots of the hosts"),
    ],
)
def test_limits_of_resize(workers: int, said: str) -> None:
    world = World((2, 2), 3, minimum=2, maximum=6)
    world.train()
    with pytest.raises(LockstepError, match=said):
        world.job.ask(0, Request(1, "resize", workers))
    assert not world.sent


def test_resize_starts_workers_or_lets_the_newest_leave() -> None:
    world = World((2, 2), 3)
    world.train()
    assert (
        world.job.ask(0, Request(1, "resize", 4))
        == "3 workers before, 4 after the step in progress"
    )
    world.job.supervise()
    assert [(host, start.number) for host, start in world.of(Start)] == [(1, 3)]
    world.job.ask(0, Request(2, "resize", 2))
    assert sorted(number for _, kill in world.of(Kill) for number in kill.numbers) == [2, 3]
    assert all(kill.gently for _, kill in world.of(Kill))


def test_resize_lets_nobody_leave_where_workers_are_missing() -> None:
    world = World((2, 2), 4)
    world.train()
    world.job.host_lost(1)
    for number in (2, 3):
        world.job.coordinator.lost(number)
    world.job.supervise()
    assert (
        world.job.ask(0, Request(1, "resize", 2))
        == "2 workers before, 2 after the step in progress"
    )
    assert not world.of(Kill) and world.job.state.target == 2
    world.job.ask(0, Request(2, "resize", 1))
    assert world.of(Kill) == [(0, Kill((1,), gently=True))]


def test_a_host_may_have_more_or_fewer_slots() -> None:
    world = World((2, 1), 3, maximum=4)
    world.train()
    assert world.job.ask(1, Request(1, "slots", 3)) == "beta had 1 slot, and has 3 now"
    world.job.supervise()
    assert [(host, start.number) for host, start in world.of(Start)] == [
        (1, 3)
    ]  # and not a fifth one
    assert world.of(JobState)[-1][1].hosts[1].slots == 3
    world.job.ask(0, Request(2, "slots", 1))
    assert [(host, kill.gently) for host, kill in world.of(Kill)] == [(0, True)]
    assert world.job.state.target == 4  # another one on beta
    world.job.supervise()
    assert world.of(Start)[-1][0] == 1


def test_workers_that_cannot_join_are_not_started_for_ever() -> None:
    world = World((1, 2), 3)
    world.train()
    world.end(2, host=1)
    for number in (3, 4, 5):
        assert world.of(Start)[-1][1].number == number
        world.end(number, host=1, code=7)
    assert len(world.of(Start)) == 3
    assert (
        world.said[-1] == "lockstep: no more workers are started, as 3 could not join (exit code 7)"
    )
    assert world.job.state.target == 2 and not world.job.state.is_ending


def test_an_error_ends_the_job_once_with_the_name_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = fake_clock(monkeypatch)
    world = World((1, 1), 2)
    world.train()
    world.end(1, host=1, code=1, report=error(1))
    assert world.job.state.is_ending and not world.job.is_over and not world.of(Kill)
    now[0] += 2.0  # time in which others could have raised the same
    world.job.supervise()
    world.job.supervise()
    assert world.of(Kill) == [(0, Kill((0,)))]
    world.end(0, host=0, code=0)
    assert world.job.is_over and not world.of(Start)
    assert list(world.job.outcome.reports) == [1] and world.job.outcome.places[1] == "beta"


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    monkeypatch.setattr(elastic_job.time, "monotonic", clock)
    monkeypatch.setattr(elastic_job.time, "strftime", lambda _: f"12:00:{int(now[0]) - 100:02d}")
    return now


def test_all_workers_are_started_again_from_the_checkpoint_until_it_is_in_vain() -> None:
    world = World((1, 1), 2)
    for attempt in range(1, 5):
        world.sent.clear()
        first = world.job.state.first
        world.job.saved("/run/step-5")
        for number in (first, first + 1):
            for message in (Hello(number), WorkerState("ready")):
                world.job.receive(number, message)
        for number in (first, first + 1):
            say(world.job, number, fit=0, most=8)
        world.end(first, host=0)
        world.end(first + 1, host=1)
        for number, host in world.placed().items():  # started in place of the first one, and killed
            world.end(number, host, code=0)
        world.job.supervise()
        if attempt < 4:
            starts = [start for _, start in world.of(Start) if start.attempt == attempt]
            assert [(start.rank, start.joins, start.resume) for start in starts] == [
                (0, False, "/run/step-5"),
                (1, False, "/run/step-5"),
            ]
    assert world.job.is_over
    assert world.job.outcome.failure.startswith(
        "the workers were started again 3 times without any progress, and then"
    )


@pytest.mark.parametrize(
    ("code", "is_finished", "ends"),
    [
        (-6, True, True),
        (-11, False, True),
        (7, False, True),
        (-9, True, True),
        (-9, False, False),
        (-15, False, False),
    ],
)
def test_a_crash_after_the_training_ends_the_job_with_its_code(
    code: int, is_finished: bool, ends: bool
) -> None:
    world = World((2,), 2)
    world.train()
    for number in (0, 1):
        say(world.job, number, phase="done", generation=world.job.coordinator.generation)
    assert world.job.coordinator.complete
    world.job.ended(0, Ended(1, code, is_finished, None))
    world.job.supervise()
    world.end(0, host=0, code=0 if ends else -9)
    world.job.supervise()
    assert world.job.is_over is ends
    assert world.job.outcome.codes == ({1: code} if ends else {})
    assert bool(world.of(Start)) is not ends  # else all are started again


def test_a_crash_within_the_training_is_a_loss() -> None:
    world = World((2,), 2)
    world.train()
    world.end(1, host=0, code=-6)
    assert world.said == ["lockstep: rank 1 was lost (killed by SIGABRT); 1 worker goes on"]


def test_who_leads_next_ends_a_job_whose_programs_have_ended() -> None:
    memory = HostMemory(1)
    memory.started(1, True)
    memory.note_up(1, WorkerState("member", 2, fit=0))
    memory.note_down(1, View(2, (1,), (1,), ((0, 5),), 1))
    memory.note_down(1, Finish("complete", 0))
    memory.ended(1, in_good_order=True)
    world = World((1, 1), 2)
    world.sent.clear()
    world.job.host_lost(0)
    world.job.resume([memory.report()], ())
    world.job.supervise()
    assert world.job.is_over and not world.job.outcome.failure and not world.of(Start)
    other = World((1, 1), 2)
    other.job.take_over(JobState(2, first=5))  # all workers have been started again since
    other.job.resume([memory.report()], ())
    assert not other.job.state.is_ending


def test_it_is_said_once_that_members_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = fake_clock(monkeypatch)
    world = World((1, 1), 2, minimum=2)
    world.train()
    world.job.host_lost(1)
    world.job.coordinator.lost(1)
    world.arrive()  # for a view of the one that is left, which completes its step and waits then
    say(world.job, 0, phase="left", generation=world.job.coordinator.formed)
    world.arrive()
    assert world.said == [
        "lockstep: beta was lost with 1 worker; 1 worker is left of the 2 that the training needs"
    ]
    for _ in range(3):
        now[0] += 2.0
        world.job.supervise()
    assert len(world.said) == 2
    assert (
        world.said[1]
        == "lockstep: 1 worker waits for 1 more (beta was lost with 1 worker at 12:00:00)"
    )


def test_below_the_minimum_a_worker_that_leaves_waits_for_its_replacement() -> None:
    world = World((3,), 3, minimum=2)
    world.train()
    for leaver in (2, 1):
        world.leave(leaver)
        if leaver == 2:
            world.end(2, host=0, code=0)
            assert world.said == ["lockstep: rank 2 has left; 2 workers go on"]
            assert not world.of(Start)
    assert [start.number for _, start in world.of(Start)] == [3]
    for message in (Hello(3), WorkerState("ready")):
        world.job.receive(3, message)
    assert world.job.coordinator.view == (0, 3)
    world.end(1, host=0, code=0)
    assert len(world.of(Start)) == 1 and world.job.state.target == 2


def test_the_host_with_all_workers_leaves_when_they_have_successors() -> None:
    world = World((1, 1), 1)
    world.train()
    world.job.ask(0, Request(1, "leave"))
    world.job.supervise()
    assert world.placed() == {1: 1}
    world.leave(0)
    assert world.job.coordinator.waiting and not world.job.state.stops
    for message in (Hello(1), WorkerState("ready")):
        world.job.receive(1, message)
    assert world.job.coordinator.view == (0, 1)


def test_the_host_with_all_workers_leaves_and_no_other_has_a_slot() -> None:
    world = World((1, 1), 1)
    world.train()
    world.job.ask(0, Request(1, "leave"))
    world.job.supervise()
    world.leave(0)
    world.job.ask(1, Request(2, "slots", 0))
    world.end(1, host=1)
    assert world.said[-1] == (
        "lockstep: all workers leave, and no host has a slot for others; the job saves and ends"
    )
    assert world.job.state.stops == (signal.SIGTERM,) and not world.job.coordinator.waiting


def test_the_only_worker_leaves_and_the_job_saves_and_ends_with_its_signal() -> None:
    world = World((1,), 1)
    world.train()
    world.leave(0)
    world.job.messages()
    assert world.said[-1] == (
        "lockstep: all workers leave, and no other one joins; the job saves and ends"
    )
    assert world.job.state.stops == (signal.SIGTERM,)


def test_while_members_wait_it_is_said_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = fake_clock(monkeypatch)
    world = World((1, 1), 2, minimum=2)
    world.train()
    world.job.ask(1, Request(1, "leave"))
    world.leave(1)
    for _ in range(3):
        world.job.supervise()
        now[0] += 2.0
    assert world.said == ["lockstep: 1 worker waits for 1 more (rank 1 on beta is to leave)"]


def test_a_signal_ends_the_job_and_nothing_is_started_any_more() -> None:
    world = World((1, 1), 2)
    world.train()
    world.job.ask(0, Request(1, "stop", signal.SIGTERM))
    world.end(1, host=1)
    assert not world.of(Start) and not world.job.is_over
    world.end(0, host=0, code=0)
    assert world.job.is_over
    with pytest.raises(LockstepError, match="the job is ending"):
        world.job.ask(0, Request(2, "resize", 2))


def test_who_has_lost_the_host_with_the_state_does_not_start_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It notices a cut a moment later, or its launcher is stopped and its worker trains: two sides
    would train.
    """
    now = fake_clock(monkeypatch)
    world = World((1, 1, 1), 1)
    world.train()
    reports = []
    for host in (1, 2):  # which have no workers
        memory = HostMemory(host)
        memory.note_down(-1, View(world.job.coordinator.generation, (0,), (0,), ((0, 5),), 0))
        reports.append(memory.report())
    world.job.host_lost(0)
    world.job.fence()
    world.job.resume(reports, ())
    for _ in range(2):
        world.job.supervise()
    assert world.job.coordinator.failure  # it is known that the state is lost
    assert not world.of(Start)
    now[0] += FENCE_S
    for _ in range(2):
        world.job.supervise()
    assert len(world.of(Start)) == 1
    assert (
        "all workers that had the training's state were lost; all workers are started again"
        in world.said[-1]
    )


def test_the_first_group_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that was lost may have formed it with others."""
    now = fake_clock(monkeypatch)
    world = World((1, 1), 1)
    world.job.fence()
    for message in (Hello(0), WorkerState("ready")):
        world.job.receive(0, message)
    world.job.supervise()
    assert not world.job.coordinator.view
    now[0] += FENCE_S
    world.job.supervise()
    assert world.job.coordinator.view == (0,)


def test_the_first_group_waits_also_if_the_hosts_tell_their_workers_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they do when another host leads, or one more host is lost."""
    now = fake_clock(monkeypatch)
    world = World((1, 1), 1)
    ready = WorkerRecord(0, False, WorkerState("ready"))
    report = HostReport(0, (ready,), None, 0, -1, (), ())
    world.job.fence()
    world.job.resume([report], ())
    world.job.supervise()
    assert not world.job.coordinator.view
    now[0] += FENCE_S / 2
    world.job.resume([report], ())
    world.job.supervise()
    assert not world.job.coordinator.view
    now[0] += FENCE_S / 2
    world.job.supervise()
    assert world.job.coordinator.view == (0,)


def test_all_members_are_held_wherever_they_are() -> None:
    """The launchers that follow do not notice that the one that leads may not go on."""
    world = World((1, 1), 2)
    assert not world.job.hold()  # nobody trains yet
    world.train()
    assert world.job.hold()
    held = [(host, message.number, message.message) for host, message in world.of(ToWorker)]
    assert held == [(0, 0, Regroup(2, "at once")), (1, 1, Regroup(2, "at once"))]


def waiting_below_the_minimum(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> tuple[World, list[float]]:
    now = fake_clock(monkeypatch)
    world = World((1, 1), 2, minimum=2)
    world.job.limits = Limits(2, 8, pause_s)
    world.train()
    world.end(1, host=1)
    for _ in range(2):  # after the loss, and at the boundary that follows
        for number in world.job.coordinator.members:
            if world.job.coordinator.formed == world.job.coordinator.generation:
                say(world.job, number, phase="left", generation=world.job.coordinator.formed)
        world.arrive()
    assert world.job.coordinator.waiting
    return world, now


def test_who_waits_for_workers_for_too_long_saves_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = waiting_below_the_minimum(monkeypatch, 600.0)
    now[0] += 599
    world.job.supervise()
    assert not world.job.state.stops
    now[0] += 2
    world.job.supervise()
    reason = "fewer than 2 workers for 600 s (--pause-timeout)"
    assert (
        world.job.outcome.failure == reason
        and world.said[-1] == f"lockstep: {reason}; the job saves and ends"
    )
    assert world.job.state.stops == (signal.SIGTERM,) and not world.job.coordinator.waiting


def test_who_is_to_wait_for_ever_does(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = waiting_below_the_minimum(monkeypatch, math.inf)
    now[0] += 1e9
    world.job.supervise()
    assert world.job.coordinator.waiting and not world.job.outcome.failure


def test_orders_that_may_be_lost_are_sent_again_to_a_host_that_is_back() -> None:
    world = World((2, 2), 3)
    world.train()
    world.job.ask(0, Request(1, "resize", 2))
    (leave,) = world.of(Kill)
    number = leave[1].numbers[0]
    world.sent.clear()
    world.job.resume(reports_of(world), ())
    assert world.of(Kill) == [leave]
    world.sent.clear()
    world.job.resume(reports_of(world, leaving=number), ())
    assert not world.of(Kill)  # it has said that it leaves
    world.job.ask(0, Request(2, "stop", signal.SIGINT))
    world.job.supervise()


def reports_of(world: World, leaving: int = -1) -> list[HostReport]:
    """What the hosts tell of the workers that were started."""
    places, view = world.job._workers.living, world.job.coordinator.view
    newest = View(
        world.job.coordinator.formed,
        view,
        tuple(places[each] for each in view),
        ((0, 5),) * len(view),
        view[0],
    )
    reports = []
    for host in world.job.hosts:
        memory = HostMemory(host)
        for number, at in places.items():
            if at == host:
                memory.started(number, False)
                memory.note_down(number, newest)
                state = WorkerState("arrived", 1, (0, 5), fit=0, leaving=number == leaving)
                memory.note_up(number, state)
        reports.append(memory.report())
    return reports


def test_the_device_of_a_worker_that_computes_wrong_numbers_is_used_no_more() -> None:
    world = World((3,), 3)
    world.train()
    for phase in ("member", "left"):
        say(world.job, 1, phase=phase, leaving=True, faulty=True)
    faulty = [message for _, message in world.of(JobState) if message.faulty]
    assert faulty and {message.hosts[0].slots for message in faulty} == {2}
    assert world.said == [
        "lockstep: rank 1 computes wrong numbers and leaves; its device is used no more"
    ]
    world.end(1, host=0, code=0)
    assert world.job.state.target == 2 and not world.of(Start)
    with pytest.raises(LockstepError, match="expected at most 2 workers, the slots of the hosts"):
        world.job.ask(0, Request(1, "resize", 3))


def test_a_worker_on_another_device_replaces_one_that_computes_wrong_numbers() -> None:
    world = World((1, 2), 2)
    world.train()
    say(world.job, 0, leaving=True, faulty=True)
    world.job.supervise()
    assert [(host, start.number) for host, start in world.of(Start)] == [(1, 2)]
    assert world.job.state.target == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_who_leads_next_uses_that_device_no_more(is_known: bool) -> None:
    world = World((2, 2), 3)
    world.train()
    memory = HostMemory(0)
    for number in (0, 2):
        memory.started(number, False)
        memory.note_up(number, WorkerState("member", leaving=not number, faulty=not number))
    if is_known:
        say(world.job, 0, leaving=True, faulty=True)
    world.job.resume([memory.report()], ())
    assert [world.job.hosts[number].slots for number in (0, 1)] == [1, 2]
    assert world.job.state.faulty == (0,)


def test_a_job_ends_if_it_needs_the_devices_that_compute_wrong_numbers() -> None:
    world = World((2,), 2, minimum=2)
    world.job.others_may_join = False
    world.train()
    say(world.job, 1, leaving=True, faulty=True)
    world.leave(1)
    world.job.supervise()
    assert not world.of(Start)
    assert world.job.outcome.failure == (
        "1 worker can run without the devices that compute wrong numbers, fewer than the 2 that "
        "the training needs"
    )
    assert world.job.state.stops == (signal.SIGTERM,)


def test_workers_whose_end_is_due_are_told_again_after_the_order_may_have_been_lost() -> None:
    world = World((1, 1), 2)
    world.train()
    world.job.coordinator.failure = "no route"
    world.job.supervise()
    kills = world.of(Kill)
    assert [kill.numbers for _, kill in kills] == [(0,), (1,)]
    world.sent.clear()
    world.job.supervise()
    assert not world.of(Kill)
    world.job.resume(reports_of(world), ())
    world.job.supervise()
    assert world.of(Kill) == kills
