"""The membership under random schedules of losses, joins, leaves and delays; and its answers one by
one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import structs

from lockstep.elastic.keys import Answer, StoreRequest
from lockstep.elastic.membership import (
    NO_STATE,
    Commit,
    Coordinator,
    Down,
    Finish,
    Hello,
    HostMemory,
    Keep,
    Regroup,
    Up,
    View,
    WorkerState,
)
from support.worker_states import say

DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def down(message: Down) -> Down:
    """The message as it arrives at a worker."""
    return DOWN.decode(msgspec.msgpack.encode(message))


# --- random schedules
# --------------------------------------------------------------------------------------- A step of
# a group: every member contributes; when all have, each receives the sum and commits, or fails to,
# if a member has left the group or died meanwhile. Messages keep their order on each connection,
# and take any time. Between two steps a node's program may be anywhere, and nobody can take it
# over, except where all have agreed to regroup: at a boundary.


class Group:
    """The process group of one generation."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self.formed, self.left = members, set[int](), set[int]()
        self.given: dict[object, set[int]] = {}
        self.regroups: set[object] = set()


class Node:
    """A worker, as `elastic.client` and the training loop behave."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.state = WorkerState("ready")
        self.inbox, self.outbox = deque[Down](), deque[Up]([Hello(number), self.state])
        self.commit: Commit = NO_STATE
        self.doing = "joins"
        self.generation = self.due = self.next = 0
        self.wished, self.signal, self.view = -1, 0, None
        self.completed, self.has_left = -1, False
        self.group: Group | None = None
        self.leaving = self.is_dead = False
        self.is_at_boundary = True
        self.host = 0

    @property
    def steps(self) -> int:
        return self.commit[1] if self.commit else 0

    def tell(self, **changes: Any) -> None:
        self.state = structs.replace(self.state, leaving=self.leaving, **changes)
        self.outbox.append(self.state)

    @property
    def is_told_to_end(self) -> bool:
        return self.has_left or 0 <= self.state.fit <= self.completed

    def take(self) -> None:
        match self.inbox.popleft():
            case Regroup(generation, "agreed"):
                self.wished = generation - 1
            case Regroup(generation, when):
                self.next = max(self.next, generation)
                self.due = self.next if when == "at once" else self.due
            case View() as view:
                self.view, self.next = view, max(self.next, view.generation)
                if view.fit >= 0:
                    self.state = structs.replace(self.state, fit=view.fit)
            case Finish("stop", signal):
                self.signal = signal
            case Finish("leave"):
                self.has_left = True
            case Finish("complete", training):
                self.completed = training

    def is_broken(self) -> bool:
        """Whether a wait in the group ends with an error."""
        gone = self.group.left | {
            number for number in self.group.members if self.world.nodes[number].is_dead
        }
        return self.due > self.generation or bool(gone)

    def actions(self) -> list[Callable[[], None]]:
        if self.doing == "over":
            return []
        return [action for action in (getattr(self, f"_{self.doing}")(),) if action is not None]

    def _joins(self) -> Callable[[], None] | None:
        if self.is_told_to_end:
            return self._end
        return self._use_view if self.view is not None else None

    def _use_view(self) -> None:
        self.generation = self.view.generation
        self.state = structs.replace(self.state, phase="member", generation=self.generation)
        if self.next > self.generation:
            self.doing = "regroups"
            return
        self.group = self.world.groups.setdefault(self.generation, Group(self.view.members))
        assert self.group.members == self.view.members
        self.group.formed.add(self.number)
        self.doing = "forms"

    def _forms(self) -> Callable[[], None] | None:
        if self.is_broken():
            return self._fail
        if len(self.group.formed) == len(self.group.members):
            return lambda: setattr(self, "doing", "gets_state")
        return None

    def _gets_state(self) -> Callable[[], None] | None:
        given = self.group.given.setdefault("state", set())
        if self.number not in given:
            return lambda: given.add(self.number)
        complete = len(given) == len(self.group.members)
        if self.is_broken() and not (complete and self.world.random.random() < 0.5):
            return self._fail
        return self._got_state if complete else None

    def _got_state(self) -> None:
        commits = dict(zip(self.view.members, self.view.commits, strict=True))
        best = max(commits.values())
        known = {commit[1] for commit in commits.values() if commit}
        assert commits[self.view.source] == best
        assert not known or max(known) - min(known) <= 1, f"survivors are at {known}"
        assert best >= self.commit, "a commit is taken back"
        first = best == NO_STATE
        assert not first or self.generation == 1, "an empty state is handed over as if it were one"
        joins = any(
            commit == NO_STATE and number >= self.world.workers
            for number, commit in commits.items()
        )
        if self.commit == best and joins:
            assert self.is_at_boundary, "a worker joins while a member is within a step"
        if known and self.commit and self.commit < best:
            assert not self.is_at_boundary, "a member has not begun the step that others have made"
        self.commit = (0, 0) if first else best
        if first:
            self.tell(fit=0, most=99)
        self.doing = "confirms"

    def _confirms(self) -> Callable[[], None] | None:
        """Nobody goes on before all have the state: its program may then be within a step."""
        given = self.group.given.setdefault("confirmed", set())
        if self.number not in given:
            return lambda: given.add(self.number)
        complete = len(given) == len(self.group.members)
        if self.is_broken() and not (complete and self.world.random.random() < 0.5):
            return self._fail
        return self._go_on if complete else None

    def _go_on(self) -> None:
        self.is_at_boundary = False
        self.doing = "steps"

    def _steps(self) -> Callable[[], None] | None:
        step = self.steps
        if step == self.world.steps or (self.signal and self.group.given.get(("stop", step))):
            return self._finish
        given = self.group.given.setdefault(step, set())
        if self.number not in given:
            return lambda: self._contribute(given, step)
        complete = len(given) == len(self.group.members)
        if self.is_broken() and not (complete and self.world.random.random() < 0.5):
            return self._fail
        return self._receive if complete else None

    def _contribute(self, given: set[int], step: int) -> None:
        given.add(self.number)
        if self.leaving or self.wished == self.generation:
            self.group.regroups.add(step)
        if self.signal:
            self.group.given[("stop", step + 1)] = {self.number}

    def _receive(self) -> None:
        step = self.steps
        self.commit = (0, step + 1)
        if step in self.group.regroups:
            self.is_at_boundary = True
            self._leave_group()
            self.tell(phase="left", commit=self.commit, failed=None)
            self.doing = "regroups"

    def _leave_group(self) -> None:
        if self.group is not None:
            self.group.left.add(self.number)
            self.group = None

    def _fail(self) -> None:
        self._leave_group()
        if self.next <= self.generation:
            self.tell(phase="left", commit=self.commit, failed="an error")
        self.doing = "regroups"

    def _regroups(self) -> Callable[[], None] | None:
        return self._arrive if self.next > self.generation or self.is_told_to_end else None

    def _arrive(self) -> None:
        if self.is_told_to_end:
            self._end()
            return
        self.generation = self.next
        self.tell(phase="arrived", generation=self.generation, commit=self.commit, failed=None)
        self.doing = "arrives"

    def _arrives(self) -> Callable[[], None] | None:
        if self.is_told_to_end:
            return self._end
        if self.next > self.generation:
            return lambda: setattr(self, "doing", "regroups")
        return (
            self._use_view
            if self.view is not None and self.view.generation == self.generation
            else None
        )

    def _finish(self) -> None:
        self.tell(phase="done")
        self.doing = "done"

    def _done(self) -> Callable[[], None] | None:
        if self.is_told_to_end:
            return self._end
        return self._fail if self.next > self.generation else None

    def _end(self) -> None:
        self.doing = "over"

    def wants_to_leave(self) -> None:
        if not self.leaving and self.doing == "steps":
            self.leaving = True
            self.tell()


class Host:
    """The launcher of one host: it passes on what its workers send and are told, and remembers
    it.
    """

    def __init__(self, number: int) -> None:
        self.memory = HostMemory(number)
        self.up, self.down = deque[tuple[int, Up]](), deque[tuple[int, Down]]()


class World:
    """One job under a random schedule; afterwards no fault happens, and it has to end."""

    def __init__(self, seed: int, hosts: int = 1) -> None:
        self.random = random.Random(seed)
        self.hosts = {number: Host(number) for number in range(hosts)}
        self.takeovers = 0
        self.steps, self.workers = self.random.randrange(3, 16), self.random.randrange(1, 6)
        self.faults = self.random.randrange(0, 13)
        self.calm = self.random.random() < 0.9  # until the training has begun everywhere
        self.coordinator = Coordinator(self.workers)
        self.nodes: dict[int, Node] = {}
        self.groups: dict[int, Group] = {}
        self.unseen: deque[int] = deque()  # deaths that the coordinator has not been told of
        for _ in range(self.workers):
            self.start()

    def start(self) -> None:
        number = len(self.nodes)
        self.nodes[number] = Node(self, number)
        host = self.random.choice(list(self.hosts))
        self.nodes[number].host = host
        self.hosts[host].memory.started(number, self.coordinator.formed >= 0)
        self.coordinator.started(number, host)

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.is_dead and node.doing != "over"]

    def disturb(self) -> None:
        self.faults -= 1
        kinds = ["kill", "kill", "kill", "leave", "join", "stop" if self.faults == 0 else "kill"]
        kind = self.random.choice([*kinds, *(["host", "take over"] if len(self.hosts) > 1 else [])])
        if kind == "host":
            self.lose_host()
        elif kind == "take over":
            self.take_over(set())
        elif kind == "join" or not self.living():
            self.start()
        elif kind == "stop":
            self.coordinator.stop(15)
        elif kind == "leave":
            self.random.choice(self.living()).wants_to_leave()
        elif any(node.doing != "joins" for node in self.living()):
            victim = self.random.choice(self.living())
            victim.is_dead = True
            victim.inbox.clear()
            self.unseen.append(victim.number)
            if self.random.random() < 0.5:
                self.start()

    def lose_host(self) -> None:
        """A host ends with its workers; another one coordinates if it did. What is in flight to and
        from it is lost.
        """
        lost = self.random.choice(list(self.hosts))
        del self.hosts[lost]
        gone = {
            node.number
            for node in self.nodes.values()
            if node.host == lost and node.doing != "over"
        }
        for number in gone:
            self.nodes[number].is_dead = True
            self.nodes[number].inbox.clear()
        if self.random.random() < 0.5:
            self.take_over(gone)
        else:
            for number in gone:
                self.coordinator.lost(number)

    def take_over(self, gone: set[int]) -> None:
        """Another host coordinates, with what the hosts remember."""
        self.takeovers += 1
        stop = self.coordinator._stop
        for host in self.hosts.values():
            host.up.clear()
            host.down.clear()
        self.coordinator = Coordinator(self.workers)
        self.coordinator.resume(host.memory.report() for host in self.hosts.values())
        if stop is not None:
            self.coordinator.stop(stop.number)

    def lose(self) -> None:
        number = self.unseen.popleft()
        node = self.nodes[number]
        host = self.hosts.get(node.host)
        while (
            node.outbox and host is not None
        ):  # what it has sent arrives before its end is seen, or never
            message = node.outbox.popleft()
            if self.random.random() < 0.5:
                self.send_up(node, message)
        if host is not None:
            host.memory.ended(number, False)
            while host.up:
                self.coordinator.receive(*host.up.popleft())
        self.coordinator.lost(number)

    def send_up(self, node: Node, message: Up) -> None:
        host, message = self.hosts[node.host], UP.decode(msgspec.msgpack.encode(message))
        host.memory.note_up(node.number, message)
        host.up.append((node.number, message))

    def deliver(self, node: Node) -> None:
        self.send_up(node, node.outbox.popleft())

    def send_down(self, host: Host) -> None:
        number, message = host.down.popleft()
        host.memory.note_down(number, message)
        if number >= 0 and not self.nodes[number].is_dead:
            self.nodes[number].inbox.append(down(message))

    def run(self) -> None:
        for _ in range(4000):
            for number, message in self.coordinator.take_messages():
                if self.nodes[number].host in self.hosts:
                    self.hosts[self.nodes[number].host].down.append((number, message))
                if isinstance(message, View):  # of which all hosts are told
                    for host in self.hosts.values():
                        host.down.append((-1, message))
            if self.coordinator.failure:
                self.check_failure()
                return
            events: list[Callable[[], object]] = [self.lose] if self.unseen else []
            for host in self.hosts.values():
                events += (
                    [lambda host=host: self.coordinator.receive(*host.up.popleft())]
                    if host.up
                    else []
                )
                events += [lambda host=host: self.send_down(host)] if host.down else []
            for node in self.living():
                events += [node.take] if node.inbox else []
                events += [lambda node=node: self.deliver(node)] if node.outbox else []
                events += node.actions()
            self.calm = self.calm and not all(node.commit for node in self.living())
            ready = self.faults and self.coordinator.formed > 0 and not self.calm
            if ready and (not events or self.random.random() < 0.03):
                self.disturb()
            elif events:
                self.random.choice(events)()
            else:
                break
        candidates = self.coordinator.candidates  # who would join, and is ended by the launcher
        stuck = {node.number: node.doing for node in self.living() if node.number not in candidates}
        assert not stuck, f"they wait for ever: {stuck}"
        ended = [node for node in self.nodes.values() if node.doing == "over" and not node.leaving]
        assert all(node.steps == self.steps for node in ended if not node.signal and node.commit), (
            "steps are missing"
        )

    def check_failure(self) -> None:
        """The state may only be lost if nobody is left who has it in a training that all have
        begun.
        """
        alive = [
            node
            for node in self.living()
            if node.commit and node.number in self.coordinator.members
        ]
        begun = all(
            self.coordinator._training_of(worker) >= 0
            for worker in self.coordinator._workers.values()
            if worker.seniority > 0
        )
        assert not (alive and begun) or "outside" in self.coordinator.failure, (
            self.coordinator.failure
        )


@pytest.mark.parametrize(("block", "hosts"), [*enumerate([1, 2, 2, 3])])
def test_every_schedule_ends_with_all_steps_made_once(block: int, hosts: int) -> None:
    for seed in range(block * 2500, block * 2500 + 2500):
        try:
            World(seed, hosts).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# --- single answers
# -----------------------------------------------------------------------------------------


def formed(workers: int, **options: int) -> Coordinator:
    """A coordinator whose first group trains."""
    coordinator = Coordinator(workers, **options)
    for number in range(workers):
        coordinator.started(number)
        coordinator.receive(number, Hello(number))
        coordinator.receive(number, WorkerState("ready"))
    for number in range(workers):
        say(coordinator, number, phase="member", fit=0, most=8)
    list(coordinator.take_messages())
    return coordinator


def told(coordinator: Coordinator) -> list[tuple[int, Down]]:
    return [(number, down(message)) for number, message in coordinator.take_messages()]


def test_members_that_wait_below_the_minimum_save_and_end_when_they_are_told_to() -> None:
    coordinator = formed(2, minimum=2)
    lose_the_second(coordinator)
    assert coordinator.waiting
    told(coordinator)
    coordinator.stop(15)
    (_, stop), (number, view) = told(coordinator)
    assert stop == Finish("stop", 15) and number == 0 and not coordinator.waiting
    assert isinstance(view, View) and view.members == (0,)


def lose_the_second(coordinator: Coordinator) -> None:
    """The second of two workers is lost in a step, which the first completes alone."""
    coordinator.lost(1)
    assert told(coordinator) == [(0, Regroup(2, "at once"))]
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 5, 0))
    (_, view), (_, wish) = told(coordinator)
    assert (
        isinstance(view, View)
        and view.members == (0,)
        and wish == Regroup(3, "agreed")
        and not coordinator.waiting
    )
    say(coordinator, 0, phase="left", generation=2)
    assert told(coordinator) == [(0, Regroup(3, "after the step"))]
    say(coordinator, 0, phase="arrived", generation=3, commit=(0, 6, 0))


def start(coordinator: Coordinator, number: int) -> None:
    """Start a worker that is ready at once."""
    coordinator.started(number)
    coordinator.receive(number, Hello(number))
    coordinator.receive(number, WorkerState("ready"))


def test_below_the_minimum_the_members_wait_until_a_worker_has_joined() -> None:
    coordinator = formed(2, minimum=2)
    lose_the_second(coordinator)
    assert told(coordinator) == [] and coordinator.waiting
    start(coordinator, 2)
    (first, view), (second, _) = told(coordinator)
    assert (first, second) == (0, 2) and not coordinator.waiting
    assert (
        isinstance(view, View)
        and view.members == (0, 2)
        and view.commits == ((0, 6, 0), ())
        and view.source == 0
    )


def arrive(coordinator: Coordinator, workers: int, generation: int) -> None:
    """Let the first workers arrive in a generation; the first of them leaves with it."""
    for number in range(workers):
        say(
            coordinator,
            number,
            phase="arrived",
            generation=generation,
            commit=(0, 5, 0),
            leaving=number == 0,
        )


def test_who_is_lost_while_the_others_wait_below_the_minimum_leaves_them_waiting() -> None:
    coordinator = formed(3, minimum=3)
    say(coordinator, 0, leaving=True)
    say(coordinator, 0, phase="left", generation=1)
    arrive(coordinator, 3, generation=2)
    assert coordinator.waiting
    coordinator.lost(2)
    told(coordinator)
    arrive(coordinator, 2, generation=3)
    assert coordinator.waiting and told(coordinator) == []
    start(coordinator, 3)
    start(coordinator, 4)
    assert coordinator.view == (1, 3, 4)


def test_after_a_loss_those_that_are_left_make_the_step_and_then_others_join() -> None:
    coordinator = formed(3)
    start(coordinator, 3)
    assert told(coordinator) == [(number, Regroup(2, "agreed")) for number in range(3)]
    coordinator.lost(2)
    told(coordinator)
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 5))
    say(coordinator, 1, phase="arrived", generation=2, commit=(0, 4))
    assert coordinator.view == (0, 1)
    assert told(coordinator)[2:] == [(0, Regroup(3, "agreed")), (1, Regroup(3, "agreed"))]
    say(coordinator, 1, phase="left", generation=2)
    say(coordinator, 1, phase="arrived", generation=3, commit=(0, 5))
    say(coordinator, 0, phase="arrived", generation=3, commit=(0, 5))
    assert coordinator.view == (0, 1, 3)


def test_who_has_made_a_step_that_nobody_else_has_made_hands_it_over_before_it_leaves() -> None:
    coordinator = formed(3)
    say(coordinator, 0, leaving=True)
    say(coordinator, 0, phase="left", generation=1)
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 5), leaving=True)
    say(coordinator, 1, phase="arrived", generation=2, commit=(0, 4))
    say(coordinator, 2, phase="arrived", generation=2, commit=(0, 4))
    assert coordinator.view == (0, 1, 2)


def test_a_member_whose_host_has_let_it_leave_the_group_takes_the_others_with_it() -> None:
    coordinator = formed(2)
    say(
        coordinator, 1, phase="arrived", generation=2, commit=(0, 5, 0)
    )  # the coordinator knows of no change
    assert told(coordinator) == [(0, Regroup(2, "at once")), (1, Regroup(2, "at once"))]
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 5, 0))
    assert [view.members for _, view in told(coordinator) if isinstance(view, View)] == [(0, 1)] * 2


def test_the_most_advanced_member_gives_its_state() -> None:
    coordinator = formed(3)
    coordinator.lost(0)
    told(coordinator)
    say(coordinator, 1, phase="arrived", generation=2, commit=(0, 5, 0))
    say(coordinator, 2, phase="arrived", generation=2, commit=(0, 6, 0))
    view = told(coordinator)[0][1]
    assert isinstance(view, View) and view.members == (1, 2) and view.source == 2


def test_who_alone_has_the_state_hands_it_over_before_it_leaves() -> None:
    coordinator = formed(1)
    coordinator.started(1)
    coordinator.receive(1, Hello(1))
    coordinator.receive(1, WorkerState("ready"))
    say(coordinator, 0, leaving=True)
    assert told(coordinator) == [(0, Regroup(2, "agreed"))]
    say(coordinator, 0, phase="left", generation=1)
    assert told(coordinator) == [(0, Regroup(2, "after the step"))]
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 3, 0), leaving=True)
    messages = told(coordinator)
    assert [(number, type(message)) for number, message in messages] == [
        (0, View),
        (1, View),
        (0, Regroup),
        (1, Regroup),
    ]
    say(coordinator, 0, phase="left", generation=2)
    say(coordinator, 0, phase="arrived", generation=3, commit=(0, 4, 0), leaving=True)
    say(coordinator, 1, phase="arrived", generation=3, commit=(0, 4, 0))
    leaves = [
        (number, message) for number, message in told(coordinator) if isinstance(message, Finish)
    ]
    assert leaves == [(0, Finish("leave"))] and coordinator.view == (1,)


def test_if_all_leave_they_wait_for_those_that_are_starting() -> None:
    """As when a host leaves that has all workers, and another one has room for their successors."""
    coordinator = formed(2)
    say(coordinator, 0, leaving=True)
    say(coordinator, 1, leaving=True)
    coordinator.started(2)
    say(coordinator, 0, phase="left", generation=1)
    told(coordinator)
    for number in (0, 1):
        say(coordinator, number, phase="arrived", generation=2, commit=(0, 3, 0), leaving=True)
    assert told(coordinator) == [] and coordinator.waiting and coordinator.leaving == [0, 1]
    coordinator.receive(2, Hello(2))
    coordinator.receive(2, WorkerState("ready"))
    assert coordinator.view == (0, 2)  # who hands over the state, and who gets it
    leaves = [number for number, message in told(coordinator) if isinstance(message, Finish)]
    assert leaves == [1]


def test_if_all_leave_within_a_step_they_complete_it_first() -> None:
    coordinator = formed(2)
    coordinator.started(2)
    say(coordinator, 0, leaving=True)
    coordinator.lost(1)
    told(coordinator)
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 3, 0), leaving=True)
    assert coordinator.view == (0,) and not coordinator.waiting
    assert not any(isinstance(message, Finish) for _, message in told(coordinator))


def test_if_all_leave_the_job_saves_and_ends() -> None:
    coordinator = formed(2)
    say(coordinator, 0, leaving=True)
    say(coordinator, 1, leaving=True)
    say(coordinator, 0, phase="left", generation=1)
    told(coordinator)
    say(coordinator, 0, phase="arrived", generation=2, commit=(0, 3, 0), leaving=True)
    say(coordinator, 1, phase="arrived", generation=2, commit=(0, 3, 0), leaving=True)
    messages = told(coordinator)
    assert (
        (0, Finish("stop", 15)) in messages
        and (1, Finish("stop", 15)) in messages
        and coordinator.view == (0, 1)
    )


def test_no_more_workers_join_than_the_training_can_have() -> None:
    coordinator = formed(7)
    for number in (7, 8, 9):
        coordinator.started(number)
        coordinator.receive(number, Hello(number))
        coordinator.receive(number, WorkerState("ready"))
    say(coordinator, 0, phase="left", generation=1)
    for number in range(7):
        say(coordinator, number, phase="arrived", generation=2, commit=(0, 1, 0))
    assert coordinator.view == tuple(range(8)) and coordinator.candidates == [8, 9]


def test_a_group_that_fails_again_and_again_at_one_step_ends_the_job() -> None:
    coordinator = formed(2)
    for generation in range(1, 20):
        say(coordinator, 0, phase="left", generation=generation, failed="no route")
        if coordinator.failure:
            break
        for number in (0, 1):
            say(coordinator, number, phase="arrived", generation=generation + 1, commit=(0, 3, 0))
    assert "failed" in coordinator.failure and "no route" in coordinator.failure and generation < 10


def test_what_rank_0_sent_is_given_to_those_that_join_only() -> None:
    one, two, three = (Keep(b"value", request, worker=0) for request in range(3))
    memory = HostMemory(0)
    for number, joins in ((0, False), (1, False), (2, True), (3, True)):
        memory.started(number, joins)
    view = View(1, (0, 1, 2), (0, 0, 0), (), 0)
    for number in view.members:
        memory.note_down(number, view)
    assert memory.keep(one) == [3]
    memory.note_down(0, View(2, (0, 1), (0, 0), (), 0))
    assert memory.keep(two) == [2, 3]  # which had not got the state, and joins again
    assert memory.keep(two) == []
    assert memory.values_for(3) == [one, two] and memory.values_for(1) == []
    memory.note_down(2, Finish("leave"))
    assert memory.keep(three) == [3]
    assert memory.report().kept == ((0, 0), (0, 1), (0, 2))


def test_what_callbacks_have_seen_is_no_value_for_those_that_join() -> None:
    memory = HostMemory(0)
    memory.started(1, True)
    assert memory.keep(Keep(b"states", commit=(0, 3, 0))) == []
    assert memory.values_for(1) == [] and memory.report().kept == ()
    assert len(memory.kept) == 1


def test_keys_belong_to_their_generation() -> None:
    coordinator = formed(2)
    coordinator.receive(0, StoreRequest(1, "get", ("a",), request=1))
    assert told(coordinator) == []
    coordinator.receive(1, StoreRequest(1, "set", ("a",), (b"x",)))
    assert told(coordinator) == [(0, Answer(1, (b"x",)))]
    coordinator.receive(0, StoreRequest(1, "add", ("n",), amount=3, request=2))
    coordinator.receive(1, StoreRequest(1, "add", ("n",), amount=-1, request=7))
    coordinator.receive(0, StoreRequest(1, "check", ("a", "n"), request=3))
    coordinator.receive(0, StoreRequest(2, "check", ("a",), request=4))
    coordinator.receive(0, StoreRequest(1, "compare_set", ("b",), (b"", b"y"), request=5))
    coordinator.receive(0, StoreRequest(1, "compare_set", ("b",), (b"z", b"w"), request=6))
    coordinator.receive(0, StoreRequest(1, "compare_set", ("c",), (b"z", b"w"), request=8))
    assert [message for _, message in told(coordinator)] == [
        Answer(2, number=3),
        Answer(7, number=2),
        Answer(3, number=1),
        Answer(4, number=0),
        Answer(5, (b"y",)),
        Answer(6, (b"y",)),
        Answer(8, (b"z",)),
    ]


@pytest.mark.parametrize(
    "request_",
    [
        StoreRequest(1, "set", (), (b"x",)),
        StoreRequest(1, "set", ("a",)),
        StoreRequest(1, "add", ("a", "b"), amount=1, request=1),
        StoreRequest(1, "compare_set", ("a",), (b"x",), request=1),
    ],
)
def test_a_request_that_lacks_something_changes_nothing(request_: StoreRequest) -> None:
    coordinator = formed(1)
    coordinator.receive(0, request_)
    coordinator.receive(0, StoreRequest(1, "check", ("a",), request=2))
    assert told(coordinator) == [(0, Answer(2, number=0))]


def test_when_all_are_done_all_are_told() -> None:
    coordinator = formed(2)
    say(coordinator, 0, phase="done", generation=1)
    assert told(coordinator) == [] and not coordinator.complete
    say(coordinator, 1, phase="done", generation=1)
    assert (
        told(coordinator) == [(0, Finish("complete", 0)), (1, Finish("complete", 0))]
        and coordinator.complete
    )
    coordinator.left(0)
    assert not coordinator.failure


def ended_alone(*down: Down, in_good_order: bool = True) -> HostMemory:
    """What a host remembers of its only worker, the last member, which was told this and has
    ended.
    """
    memory = HostMemory(7)
    memory.started(3, True)
    memory.note_up(3, WorkerState("member", 2, fit=0))
    for message in (View(2, (3,), (7,), ((0, 5),), 3), *down):
        memory.note_down(3, message)
    memory.ended(3, in_good_order)
    return memory


def test_who_coordinates_next_knows_that_the_program_of_the_last_member_has_ended() -> None:
    coordinator = Coordinator(2)
    coordinator.resume([ended_alone(Finish("complete", 0)).report()])
    assert (
        coordinator.complete and not coordinator.failure and not list(coordinator.take_messages())
    )


@pytest.mark.parametrize(
    "memory",
    [
        ended_alone(),
        ended_alone(Finish("complete", 0), in_good_order=False),
        ended_alone(Finish("leave")),
    ],
)
def test_who_coordinates_next_knows_that_the_last_member_was_lost(memory: HostMemory) -> None:
    assert memory.report().finished == ()
    coordinator = Coordinator(2)
    coordinator.resume([memory.report()])
    assert coordinator.failure


def test_a_loss_outside_of_the_training_is_not_survived() -> None:
    coordinator = Coordinator(2)
    for number in (0, 1):
        coordinator.started(number)
        coordinator.receive(number, WorkerState("ready"))
    coordinator.lost(0)
    assert "outside of the training" in coordinator.failure


def test_a_loss_is_not_survived_by_those_that_have_left_their_training() -> None:
    coordinator = formed(3)
    for number in range(3):
        say(coordinator, number, phase="member", fit=2, most=8)
    say(coordinator, 1, phase="member", fit=-1, most=8)
    coordinator.lost(0)
    assert coordinator.failure == "a worker was lost outside of the training"


def test_a_loss_is_not_survived_if_the_others_are_in_a_later_training() -> None:
    coordinator = formed(3)
    for number, fit in ((0, 2), (1, 2), (2, 2), (1, -1), (2, -1), (1, 3), (2, 3)):
        say(coordinator, number, phase="member", fit=fit, most=8)
    coordinator.lost(0)
    assert coordinator.failure == "a worker was lost outside of the training"


def test_members_that_leave_their_training_before_they_meet_after_a_loss_start_again() -> None:
    coordinator = formed(3)
    coordinator.lost(0)
    assert not coordinator.failure
    say(coordinator, 1, phase="member", fit=-1, most=8)
    assert coordinator.failure == "a worker was lost outside of the training"


def test_all_hosts_are_to_keep_what_rank_0_sends() -> None:
    coordinator = formed(1)
    coordinator.receive(0, Keep(b"result", 7))
    assert list(coordinator.to_keep) == [Keep(b"result", 7, worker=0)]
    assert told(coordinator) == []
