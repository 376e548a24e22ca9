"""An elastic job on several hosts under a simulated network: random schedules, and what must hold
in each of them.

The hosts are those of the product: election, coordinator of the workers, what each host remembers
and passes on. The network, the processes of the workers, storage and time are simulated.

Run as a program it tries many schedules: ``python tests/support/job_simulation.py 20000 --first
0``, or one of them, by its number, with what has happened: ``python tests/support/job_simulation.py
1 --first 4711 --verbose``.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep.elastic.membership import (
    NO_STATE,
    Commit,
    Finish,
    Hello,
    Lease,
    Regroup,
    Up,
    View,
    WorkerState,
)
from lockstep.errors import LockstepError
from lockstep.launcher.elastic_jobs import (
    elastic_host,
    elastic_job,
    host_knowledge,
    job_news,
    leadership,
    local_members,
    other_hosts,
    user_requests,
    waiting,
    worker_ends,
)
from lockstep.launcher.elastic_jobs.elastic_host import ElasticHost
from lockstep.launcher.elastic_jobs.election import Accepted, HostView
from lockstep.launcher.elastic_jobs.host_messages import Ended, JobState, Start
from lockstep.launcher.elastic_jobs.job_size import Limits
from lockstep.launcher.elastic_jobs.mesh import NEW, WAITS_TO_JOIN, Link
from lockstep.launcher.elastic_jobs.waiting import ALONE_S, OutsideError
from lockstep.launcher.handshake import HostEntry, HostHello, HostRefused, HostWelcome
from lockstep.launcher.pulse import Patience, SilenceWatch

STEPS, FAULTS_UNTIL_S, PAUSE_S = 45, 25.0, 60.0
LIMIT_S = FAULTS_UNTIL_S + 2 * PAUSE_S + 150.0
SILENT_S, HUNG_S, GRACE_S = 3.0, 10.0, 20.0
WORKERS_WAIT_S = 3.0  # longer than the other hosts, for a launcher that does not run
MILD = (
    "worker",
    "workers",
    "cut",
    "isolate",
    "freeze",
    "fail",
    "join",
)  # faults after which the job goes on
FAULTS = (
    *MILD,
    *MILD,
    "worker",
    "worker",
    "agent",
    "agent",
    "power",
    "power",
    "leave",
    "leave",
    "stop",
)
STORM = ("agent", "cut", "cut", "isolate", "freeze", "join", "join", "worker")
# Some faults do harm only together and in order, which drawn ones hardly ever are: of ten schedules
# three begin with such ones. The last digit of a schedule's number says which.
FROZEN_LAUNCHER, FROZEN_LEADER, CRASHES_IN_A_VOTE = 1, 4, 7


class PropertyError(AssertionError):
    """Something that must hold does not."""


# --- What takes the place of processes, sockets, files and time
# ---------------------------------------------


class Clock:
    """The module `time` of a schedule."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def strftime(self, text: str) -> str:
        return f"{self.now:.2f}"


CLOCK = Clock()


class SimulatedPulse:
    """A launcher's pulse: how long it has not run."""

    lapse_s = 0.0

    def __init__(self, *_: object) -> None:
        pass

    def turn(self) -> None:
        pass

    def take_lapse_s(self) -> float:
        lapse_s, self.lapse_s = self.lapse_s, 0.0
        return lapse_s


class SimulatedMesh:
    """The connections of one host."""

    on_message: Callable[[int, Any], None]
    on_link: Callable[[int, Link], None]
    on_silence: object
    on_hello: object
    has_unsent = False

    def __init__(self, world: World, own_entry: HostEntry) -> None:
        self.world, self.own_entry = world, own_entry
        self.silence = SilenceWatch(Patience(math.inf, math.inf))

    def send(self, host: int, message: object) -> None:
        self.world.send(self.own_entry.number, host, message)

    def add_hosts(self, hosts: Iterable[HostEntry]) -> None:
        for entry in hosts:
            if entry.number < self.own_entry.number:
                self.world.dial(self.own_entry.number, entry.number)

    def adopt(self, connection: object, host: int) -> None:
        self.world.connect(self.own_entry.number, host)

    def forget(self, host: int) -> None:
        pass

    def silent_s(self, host: int) -> float:
        return self.world.silent_s(self.own_entry.number, host)

    def have_ended(self, hosts: Iterable[int]) -> bool:
        for host in hosts:
            if self.world.says_that_it_is_out(self.own_entry.number, host):
                self.on_link(host, Link.LOST)
        return all(self.world.is_refused(self.own_entry.number, host) for host in hosts)


class SimulatedFolder:
    """The folder of claims."""

    def __init__(self) -> None:
        self.path, self.seen_by, self.decided = "", set[int](), list[HostView]()
        self.world: World

    def make(self, run: Path, existing: str) -> None:
        self.seen_by.clear()
        self.path = self.path or existing or f"{run}/{self.world.count}"

    def claim(self, folder: str, view: HostView) -> None:
        self.world.after(0.001, 0.05, self._claim, view)

    def _claim(self, view: HostView) -> None:
        winner = self.world.claims.setdefault(view.number, view)
        self.world.after(0.001, 0.05, self._decide, winner)

    def _decide(self, winner: HostView) -> None:
        self.decided.append(winner)

    def leave(self, other: str, removes: bool) -> None:
        pass


class Decided(list[HostView]):
    """A queue."""

    def popleft(self) -> HostView:
        return self.pop(0)


class SimulatedWorkers:
    """The workers of one host."""

    killed, watchdog_report = False, None

    def __init__(
        self, setup: Any, folder: object, selector: object, on_message: Callable[[int, Up], None]
    ) -> None:
        self.world: World = setup.world
        self.on_message, self.part = on_message, None
        self.nodes: dict[int, Node] = {}
        self.has_ended: list[Ended] = []
        self.saved, self.kill_at = "", float("inf")

    def start(self, start: Start) -> None:
        self.nodes[start.number] = Node(self.world, self, start)

    def send(self, number: int, message: Any) -> None:
        node = self.nodes.get(number)
        if node is not None:
            self.world.after(0.002, 0.002, node.take, message)

    def kill(self, numbers: Sequence[int], gently: bool) -> None:
        for number in numbers:
            node = self.nodes.get(number)
            if node is not None and gently and node.commit != NO_STATE:
                node.wants_to_leave = True
            elif node is not None:
                self.world.after(0.01, 0.1, node.exit, -15 if gently else 0)

    def take_ended(self) -> list[Ended]:
        ended, self.has_ended = self.has_ended, []
        return ended

    def supervise(self, state: JobState, in_training: object) -> None:
        """Kill the workers that do not end in time."""
        self.kill_at = (
            min(self.kill_at, CLOCK.now + GRACE_S)
            if state.is_ending or state.stops
            else float("inf")
        )
        for node in list(self.nodes.values()) if CLOCK.now >= self.kill_at else ():
            self.world.after(0.0, 0.1, node.exit, 0)

    def newest_checkpoint(self) -> str:
        return self.saved

    @property
    def is_empty(self) -> bool:
        return not self.nodes

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        for node in list(self.nodes.values()):
            self.world.after(0.0, 0.1, node.exit, 0)


class SimulatedPath:
    """A file on the storage that all hosts share, or not."""

    is_shared = False

    def __init__(self, path: object) -> None:
        self.path = str(path)

    def __str__(self) -> str:
        return self.path

    def exists(self) -> bool:
        return self.is_shared


@contextmanager
def simulated() -> Iterator[None]:
    """Let hosts have simulated surroundings."""
    with ExitStack() as stack:
        with_clock = (elastic_host, elastic_job, job_news, local_members, other_hosts, waiting)
        for module in (*with_clock, worker_ends):
            stack.enter_context(patch.object(module, "time", CLOCK))
        for module in (host_knowledge, leadership):
            stack.enter_context(patch.object(module, "Path", SimulatedPath))
        stack.enter_context(patch.object(local_members, "ElasticWorkers", SimulatedWorkers))
        stack.enter_context(patch.object(user_requests, "ControlSocket", lambda *_: None))
        stack.enter_context(patch.object(elastic_host, "Pulse", SimulatedPulse))
        stack.enter_context(patch.object(elastic_host, "SharedFolder", SimulatedFolder))
        yield


# --- Workers
# ------------------------------------------------------------------------------------------------


class Node:
    """A worker, as `elastic.client` and the training loop behave."""

    def __init__(self, world: World, workers: SimulatedWorkers, start: Start) -> None:
        self.world, self.workers, self.number = world, workers, start.number
        self.commit: Commit = NO_STATE
        self.first = int(start.resume.rpartition("-")[2] or 0)
        self.doing, self.generation, self.due, self.next, self.wished, self.signal = (
            "starts",
            0,
            0,
            0,
            -1,
            0,
        )
        self.view: View | None = None
        self.state, self.completed, self.has_left = WorkerState(), -1, False
        self.leased_until = float("inf")
        self.wants_to_leave = self.leaving = self.is_dead = self.is_lost = False
        self.began = 0.0  # its membership
        self.got: dict[tuple[tuple[int, ...], int, object], dict[int, tuple[bool, bool]]] = {}
        world.check_number(self)
        world.nodes[self.number, id(self)] = self
        world.after(0.2, 1.2, self.join)

    @property
    def steps(self) -> int:
        return self.commit[1] if self.commit else 0

    def tell(self, **changes: Any) -> None:
        """Tell the coordinator what has changed."""
        self.state = structs.replace(self.state, leaving=self.leaving, **changes)
        self.send(self.state)

    def send(self, message: Up) -> None:
        self.world.after(0.002, 0.002, self.world.up, self, message)

    @property
    def has_completed(self) -> bool:
        return 0 <= self.state.fit <= self.completed

    def join(self) -> None:
        if not self.is_dead:
            self.doing = "joins"
            self.send(Hello(self.number))
            self.tell(phase="ready")
            self.react()

    def take(self, message: object) -> None:
        match message:
            case Regroup(generation, "agreed"):
                self.wished = generation - 1
            case Regroup(generation, when):
                self.next = max(self.next, generation)
                self.due = self.next if when == "at once" else self.due
            case View():
                self.view, self.next = message, max(self.next, message.generation)
                if message.fit >= 0:
                    self.state = structs.replace(self.state, fit=message.fit)
            case Finish(how="stop"):
                self.signal = message.number
            case Finish(how="leave"):
                self.has_left = True
            case Finish(how="complete"):
                self.completed = max(self.completed, message.number)
            case Lease(until):
                self.leased_until = until
        self.react()

    def react(self) -> None:
        """Go on if this worker may."""
        if self.is_dead or self.doing in ("starts", "over"):
            return
        is_next = self.next > self.generation
        if self.doing in ("forms", "confirms", "steps"):
            if self.due > self.generation:
                self.fail()
        elif self.doing == "outside":
            return
        elif self.has_left or self.has_completed:
            self.doing = "over"
            self.world.after(0.01, 0.1, self.exit, 0, not self.has_left)
        elif self.doing == "joins" and self.view is not None:
            self.use_view(self.view)
        elif self.doing == "done" and is_next:
            self.fail()
        elif self.doing in ("regroups", "arrives") and is_next:
            self.generation, self.doing = self.next, "arrives"
            self.leave_if_told()
            self.tell(phase="arrived", generation=self.generation, commit=self.commit, failed=None)
        elif (
            self.doing == "arrives"
            and self.view is not None
            and self.view.generation == self.generation
        ):
            self.use_view(self.view)

    def fail(self) -> None:
        """Leave the group."""
        self.doing = "regroups"
        if self.next <= self.generation:
            self.tell(phase="left", commit=self.commit, failed="an error")
        self.react()

    def leave_if_told(self) -> None:
        if self.wants_to_leave and not self.leaving and not self.signal:
            self.leaving = True
            self.tell()

    def use_view(self, view: View) -> None:
        self.generation, self.doing = view.generation, "forms"
        self.state = structs.replace(self.state, phase="member", generation=view.generation)
        if self.next > self.generation:
            self.doing = "regroups"
            self.react()
            return
        self.world.note_membership(self, view)
        self.contribute("forms")

    def contribute(self, what: object) -> None:
        """Take part in an operation of all members."""
        assert self.view is not None
        requests = self.wished == self.generation or self.leaving, bool(self.signal)
        for node in self.world.members(self.view):
            args = self, node, self.view, what, requests
            least, most = (0.2, 1.0) if isinstance(what, int) else (0.01, 0.2)
            self.world.after(least, most, self.world.contribution, *args)

    def begin_step(self) -> None:
        """Begin the next step, if the lease allows it."""
        view = self.view
        if self.is_dead or self.is_lost or self.doing != "steps":
            return
        if self.world.now >= self.leased_until:
            self.world.after(0.1, 0.3, self.if_still, view, self.begin_step)
            return
        self.leave_if_told()
        self.contribute(self.steps + 1)

    def if_still(self, view: View | None, call: Callable[[], None]) -> None:
        """Go on in the same membership."""
        if view is self.view:
            call()

    def advance(self, what: object) -> None:
        """All members may have contributed."""
        view = self.view
        if self.is_dead or view is None or self.generation != view.generation:
            return
        got = self.got.get((view.members, view.generation, what), {})
        due = self.steps + 1 if self.doing == "steps" else self.doing
        if what != due or set(got) != set(view.members):
            return
        if isinstance(what, int):
            if self.world.now >= self.leased_until:
                self.world.after(0.1, 0.3, self.if_still, view, partial(self.advance, what))
            else:
                self.complete_step(view, what, list(got.values()))
        elif what == "forms":
            self.get_state(view)
        else:
            self.go_on()

    def get_state(self, view: View) -> None:
        best = max(view.commits)
        known = {commit[1] for commit in view.commits if commit}
        if known and max(known) - min(known) > 1:
            raise PropertyError(f"survivors are at {known}")
        if best < self.commit:
            raise PropertyError(f"{self.commit} of {self.number} is taken back to {best}")
        if best == NO_STATE:
            self.doing = "outside"
            self.world.after(0.0, 0.3, self.if_still, view, self.enter)
        elif NO_STATE in view.commits:
            self.commit, self.doing = best, "confirms"
            self.contribute("confirms")
        else:
            self.commit = best
            self.go_on()

    def enter(self) -> None:
        """Begin the training."""
        if not self.is_dead:
            self.commit = (0, self.first)
            self.tell(fit=0, most=99, folder="run")
            self.go_on()
            self.react()

    def go_on(self) -> None:
        self.doing = "steps"
        if self.steps == STEPS:
            self.finish()
        else:
            self.begin_step()

    def finish(self) -> None:
        self.doing = "done"
        self.tell(phase="done")
        self.react()

    def complete_step(self, view: View, step: int, requests: list[tuple[bool, bool]]) -> None:
        self.world.note_step(self, view, step)
        self.commit = (0, step)
        if step % 7 == 0 and view.members[0] == self.number:
            self.world.after(0.05, 0.1, self.save, step)
        if any(stops for _, stops in requests) or step == STEPS:
            self.finish()
        elif any(regroups for regroups, _ in requests):
            self.doing = "regroups"
            self.tell(phase="left", commit=self.commit, failed=None)
            self.react()
        else:
            self.begin_step()

    def save(self, step: int) -> None:
        """Complete a checkpoint, on storage that all hosts see."""
        if not self.is_dead:
            self.world.checkpoint = max(self.world.checkpoint, step)
            self.workers.saved = f"step-{step}"

    def exit(self, code: int, is_finished: bool = False) -> None:
        """This process ends."""
        if self.is_dead:
            return
        self.is_dead = True
        self.workers.nodes.pop(self.number, None)
        self.workers.has_ended.append(Ended(self.number, code, is_finished, None))
        self.world.wake(self.workers)


# --- Hosts
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Launcher:
    """A launcher on a machine of its own; `queue` holds what happens while it does not run."""

    address: str
    part: Part | None = None
    dead: str = ""  # "killed", "power" or "ended"
    frozen_since: float = -1.0
    stops: list[tuple[float, float]] = field(default_factory=list)  # those that are over
    queue: list[Callable[[], None]] = field(default_factory=list)
    alone_since: float = -1.0
    waits_since: float = 0.0
    waits: bool = False  # to join


@dataclass(eq=False)
class Part:
    """What a launcher does under one number."""

    number: int
    launcher: Launcher
    host: Any
    is_over: bool = False


@dataclass(eq=False)
class Connection:
    """Of two hosts: who believes that it stands, when the last message arrives at each, and when
    one has arrived.
    """

    up: set[int]
    last: dict[int, float] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)


@dataclass
class Group:
    """A membership that was formed."""

    view: View
    began: float
    first: int  # the step that it begins after


class World:
    """One schedule: hosts, what connects them, workers, and what may happen to all of them."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now, self.count = 0.0, 0
        CLOCK.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], Any]]] = []
        self.launchers: list[Launcher] = []
        self.parts: dict[int, Part] = {}
        self.nodes: dict[tuple[int, int], Node] = {}
        self.cut_until: dict[frozenset[str], float] = {}
        self.cut_since: dict[frozenset[str], float] = {}
        self.connections: dict[frozenset[int], Connection] = {}
        self.claims: dict[int, HostView] = {}
        self.views: dict[int, HostView] = {}
        self.groups: list[Group] = []
        self.checkpoint = 0
        self.ends: list[str] = []
        self.faults: list[str] = []
        self.log: list[str] = []
        hosts = random.randint(2, 5)
        SimulatedPath.is_shared = self.is_shared = random.random() < 0.4
        self.is_storm = random.random() < 0.25
        self.slots = [random.randint(1, 2) for _ in range(hosts)]
        most = sum(self.slots)
        self.most = random.choice([1, most, random.randint(1, most)])
        self.minimum = random.choice([1, 1, 1, self.most])
        self.hung_s = HUNG_S
        self.delays = [0.001, 0.1, 0.5] if self.is_storm else [0.001, 0.002, 0.01, 0.1]
        self.far = set[int]()  # hosts behind a slow network
        self.on_deliver: Callable[[int, int, object], None] | None = None
        self.begin_together(seed % 10)
        hosts = len(self.slots)
        entries = [
            HostEntry(number, f"h{number}", f"a{number}", 1, self.slots[number])
            for number in range(hosts)
        ]
        for entry in entries:
            self.launchers.append(Launcher(entry.address))
            self.add(self.launchers[-1], entry)
        for entry in entries[1:]:
            self.parts[entry.number].host.join(None, HostWelcome(number=entry.number, leader=0))
        self.parts[0].host.found_job(entries, self.most)
        for part in self.parts.values():
            self.turn(part)
        for _ in range(random.choice([8, 16, 24] if self.is_storm else [0, 1, 2, 3, 5, 8])):
            self.at(random.uniform(0.3, FAULTS_UNTIL_S), self.fault)
        self.at(FAULTS_UNTIL_S + 30, self.heal)

    def at(self, when: float, what: Callable[..., Any], *args: Any) -> None:
        """Do something at a time."""
        self.count += 1
        heapq.heappush(self.queue, (when, self.count, partial(what, *args)))

    def after(self, least: float, most: float, what: Callable[..., Any], *args: Any) -> None:
        """Do something in so many seconds."""
        self.at(self.now + self.random.uniform(least, most), what, *args)

    def add(self, launcher: Launcher, entry: HostEntry) -> Part:
        """Let a launcher take part."""
        multiplexer = SimpleNamespace(
            write_message=partial(self.note, entry.name), is_blocked=False
        )
        limits = Limits(self.minimum, self.most, PAUSE_S)
        if entry.number in self.parts:
            raise PropertyError(f"two hosts have the number {entry.number}")
        setup: Any = SimpleNamespace(
            limits=limits,
            multiplexer=multiplexer,
            patience=Patience(self.hung_s / 2, self.hung_s),
            world=self,
        )
        mesh: Any = SimulatedMesh(self, entry)
        host: Any = ElasticHost(setup, entry, Path("/simulated"), None, mesh)  # type: ignore[arg-type]
        host.admission.check = lambda hello: None
        host._shared.world, host._shared.decided = self, Decided()
        part = launcher.part = self.parts[entry.number] = Part(entry.number, launcher, host)
        launcher.waits = False
        self.after(0.0, 0.5, self.tick, part)
        return part

    def note(self, name: str, text: str) -> None:
        """Note what a host, or a fault, has done."""
        self.log.append(f"{self.now:7.2f} {name}: {text}")

    def tick(self, part: Part) -> None:
        """Let some time pass for a host."""
        if not part.is_over:
            self.event(part, lambda: None)
            self.at(self.now + 0.5, self.tick, part)

    def event(self, part: Part, call: Callable[[], None]) -> None:
        """Let something happen to a host, now or when it runs again."""
        if part.is_over or part.launcher.dead:
            return
        if part.launcher.frozen_since >= 0:
            part.launcher.queue.append(call)
        else:
            call()
            self.turn(part)

    def turn(self, part: Part) -> None:
        """Let a host do what is due."""
        host = part.host
        if part.is_over:
            return
        try:
            host.turn()
        except OutsideError:
            self.leave_view(part)
            return
        except LockstepError as error:
            self.end(part, str(error))
            return
        view = host._election.view
        if view is not None and self.views.setdefault(view.number, view) != view:
            raise PropertyError(f"two views: {view} and {self.views[view.number]}")
        if host._over is not None:
            is_bad = host._over.reason and not host._over.signal
            self.end(
                part, host._over.reason if is_bad else "left" if self.has_left(host) else "well"
            )

    def has_left(self, host: Any) -> bool:
        return host._peers.me in host._knowledge.job.leaving and not host.knows_outcome

    def up(self, node: Node, message: Up) -> None:
        """Deliver what a worker has sent to its launcher."""
        part = self.part_of(node.workers)
        if part is not None:
            self.event(part, partial(node.workers.on_message, node.number, message))

    def wake(self, workers: SimulatedWorkers) -> None:
        """Let a launcher know that a worker has ended."""
        part = self.part_of(workers)
        if part is not None:
            self.event(part, lambda: None)

    def part_of(self, workers: SimulatedWorkers) -> Part | None:
        return next((part for part in self.parts.values() if part.host._workers is workers), None)

    # --- the end of a part, and another one

    def leave_view(self, part: Part) -> None:
        """The others go on without a host: its launcher joins them again."""
        self.note(part.host._peers.own_entry.name, "is outside")
        self.close(part)
        part.host._workers.end()
        self.wait_to_join(part.launcher)

    def wait_to_join(self, launcher: Launcher) -> None:
        launcher.waits, launcher.alone_since, launcher.part = True, -1.0, None
        launcher.waits_since = self.now
        self.after(0.1, 0.6, self.knock, launcher)

    def knock(self, launcher: Launcher) -> None:
        """Ask all launchers, one after the other, to be let in."""
        if launcher.dead or not launcher.waits:
            return
        are_there_others = False
        for other in self.launchers:
            answer = "" if other is launcher else self.ask(launcher, other)
            if isinstance(answer, tuple):
                self.join(launcher, *answer)
                return
            are_there_others = are_there_others or answer == "other"
        if self.now - launcher.waits_since >= PAUSE_S:
            launcher.dead, launcher.waits = "ended", False
            self.ends.append("the other hosts have not answered in time")
            return
        if are_there_others:
            launcher.alone_since = -1.0
        elif launcher.alone_since < 0:
            launcher.alone_since = self.now
        elif self.now - launcher.alone_since >= ALONE_S:
            launcher.dead, launcher.waits = "ended", False
            self.ends.append("all other hosts have ended")
            return
        self.after(0.5, 0.7, self.knock, launcher)

    def ask(self, launcher: Launcher, other: Launcher, redirected: bool = False) -> Any:
        """Return "" if nobody takes part there, "other" for another refusal, else the answer and
        who has given it.
        """
        if other.dead == "power" or self.is_cut(launcher, other) or other.frozen_since >= 0:
            return "other"
        if other.dead or other.waits or other.part is None:
            return ""
        entry = HostEntry(NEW, f"h{launcher.address}", launcher.address, 1, self.slots_of(launcher))
        answer = other.part.host.admission.answer(HostHello(host=entry))
        if isinstance(answer, HostWelcome):
            return answer, other.part
        assert isinstance(answer, HostRefused)
        if answer.ask is not None and not redirected and answer.ask.number in self.parts:
            return self.ask(launcher, self.parts[answer.ask.number].launcher, True)
        return "" if answer.reason == WAITS_TO_JOIN else "other"

    def slots_of(self, launcher: Launcher) -> int:
        return self.slots[self.launchers.index(launcher)]

    def join(self, launcher: Launcher, welcome: HostWelcome, leader: Part) -> None:
        entry = HostEntry(
            welcome.number, f"h{welcome.number}", launcher.address, 1, self.slots_of(launcher)
        )
        part = self.add(launcher, entry)
        self.note(entry.name, f"is let in by {leader.number}")
        part.host.join(None, welcome)
        self.turn(leader)
        self.turn(part)

    def end(self, part: Part, how: str) -> None:
        """A launcher ends in good order."""
        self.note(part.host._peers.own_entry.name, f"ends: {how}")
        self.ends.append(how)
        is_complete = any(node.steps == STEPS for node in self.nodes.values())
        if (
            how == "well"
            and not is_complete
            and not any(fault.split()[1] in ("stop", "leave") for fault in self.faults)
        ):
            raise PropertyError("the job has ended well without all of its steps")
        self.die(part.launcher, "ended")

    def close(self, part: Part) -> None:
        """The connections of a part end, and its launcher still listens."""
        part.is_over = True
        for pair, connection in self.connections.items():
            if part.number in pair and part.number in connection.up:
                (other,) = pair - {part.number}
                connection.up.discard(part.number)
                self.end_of(connection, part.number, other, Link.SILENT)

    def end_of(self, connection: Connection, number: int, other: int, link: Link) -> None:
        """A host reads the end of a connection after all that was sent on it, unless the network is
        cut.
        """
        when = max(self.now, connection.last.get(other, 0.0)) + 0.01
        if self.is_cut(self.parts[number].launcher, self.parts[other].launcher):
            self.after(SILENT_S, SILENT_S + 0.5, self.lose, connection, other, number, Link.SILENT)
        else:
            self.at(when, self.lose, connection, other, number, link)

    def die(self, launcher: Launcher, how: str, reset: bool = False) -> None:
        """A launcher's process, or its machine, is gone; with `reset` what it sent last may be
        lost.
        """
        part, launcher.dead = launcher.part, how
        launcher.waits = False
        if part is None or part.is_over:
            return
        part.is_over = True
        for node in list(part.host._workers.nodes.values()):
            node.is_lost = True
            self.after(0.0, 0.0 if how == "power" else 0.4, node.exit, -9)
        for pair, connection in list(self.connections.items()):
            if part.number not in pair or part.number not in connection.up:
                continue
            (other,) = pair - {part.number}
            connection.up.discard(part.number)
            if how == "power":
                self.after(
                    SILENT_S, SILENT_S + 0.5, self.lose, connection, other, part.number, Link.SILENT
                )
            elif reset and not self.is_cut(launcher, self.parts[other].launcher):
                self.lose(connection, other, part.number, Link.LOST)
            else:
                self.end_of(connection, part.number, other, Link.ENDED)

    # --- the network

    def is_cut(self, one: Launcher, other: Launcher) -> bool:
        """Return whether nothing passes between two machines now."""
        return self.cut_until.get(frozenset((one.address, other.address)), 0.0) > self.now

    def is_refused(self, number: int, other: int) -> bool:
        """Return whether nothing listens any more as the host `other`, as another one finds out."""
        found = self.parts[other]
        is_gone = found.is_over and found.launcher.dead != "power"
        return is_gone and not self.is_cut(self.parts[number].launcher, found.launcher)

    def says_that_it_is_out(self, number: int, other: int) -> bool:
        """Return whether a launcher tells a host that it is not `other` any more."""
        runs = not self.parts[other].launcher.dead and self.parts[other].launcher.frozen_since < 0
        return runs and self.is_refused(number, other)

    def silent_s(self, number: int, other: int) -> float:
        """Return for how long a host has not heard of another one, which sends something twice a
        second.
        """
        connection = self.connections.get(frozenset((number, other)))
        if connection is None or number not in connection.up:
            return float("inf")
        own, peer = self.parts[number].launcher, self.parts[other].launcher
        since = self.now - 0.2
        if peer.dead:
            since = 0.0
        if peer.frozen_since >= 0:
            since = min(since, peer.frozen_since)
        elif peer.stops:
            stopped, thawed = peer.stops[-1]
            if connection.heard.get(number, 0.0) < thawed and self.now < thawed + 1:
                # it tells that it runs only after what it does at first
                since = min(since, stopped)
        if self.is_cut(own, peer):
            since = min(since, self.cut_since[frozenset((own.address, peer.address))])
        for stopped, thawed in own.stops:
            if stopped <= since < thawed:
                since = thawed  # only then it read what had come meanwhile
        return self.now - since

    def dial(self, number: int, other: int) -> None:
        """Connect to a host as soon as that is possible."""
        self.after(0.001, 0.05, self.try_to_connect, number, other)

    def try_to_connect(self, number: int, other: int) -> None:
        one, peer = self.parts[number], self.parts[other]
        connection = self.connections.get(frozenset((number, other)))
        if one.is_over or peer.is_over or (connection is not None and number in connection.up):
            return
        if (
            self.is_cut(one.launcher, peer.launcher)
            or max(one.launcher.frozen_since, peer.launcher.frozen_since) >= 0
        ):
            self.after(0.5, 1.0, self.try_to_connect, number, other)
        else:
            self.connect(number, other)

    def connect(self, number: int, other: int) -> None:
        """Connect two hosts; an earlier connection that one of them knows ends."""
        pair = frozenset((number, other))
        before = self.connections.get(pair)
        self.connections[pair] = Connection(set(pair))
        for one, peer in ((number, other), (other, number)):
            part = self.parts[one]
            if before is not None and one in before.up:
                part.host.mesh.on_link(peer, Link.SILENT)
            part.host.mesh.on_link(peer, Link.CONNECTED)
            self.after(0.0, 0.01, self.event, part, lambda: None)

    def lose(self, connection: Connection, number: int, other: int, link: Link) -> None:
        """A host learns that a connection has ended."""
        if (
            number not in connection.up
            or self.connections[frozenset((number, other))] is not connection
        ):
            return
        part = self.parts[number]
        if part.launcher.frozen_since >= 0 and not part.is_over:
            part.launcher.queue.append(partial(self.lose, connection, number, other, link))
            return
        connection.up.discard(number)
        self.event(part, partial(part.host.mesh.on_link, other, link))
        if other in connection.up and link is Link.SILENT:
            self.end_of(connection, number, other, Link.SILENT)
        if number > other:
            self.dial(number, other)

    def send(self, number: int, other: int, message: object) -> None:
        """Send on a connection, which keeps the order; nothing is lost but with the connection."""
        connection = self.connections.get(frozenset((number, other)))
        if connection is not None and number in connection.up:
            delay = self.random.choice(self.delays)
            if other in self.far:
                delay += self.random.uniform(0.0, 1.0)
            when = connection.last[other] = max(self.now + delay, connection.last.get(other, 0.0))
            self.at(when, self.deliver, connection, number, other, message)

    def deliver(self, connection: Connection, number: int, other: int, message: object) -> None:
        """Deliver a message, after a cut if there is one."""
        sender, receiver = self.parts[number].launcher, self.parts[other]
        if (
            self.connections[frozenset((number, other))] is not connection
            or other not in connection.up
        ):
            return
        if self.is_cut(sender, receiver.launcher):
            until = self.cut_until[frozenset((sender.address, receiver.launcher.address))] + 0.01
            connection.last[other] = max(connection.last.get(other, 0.0), until)
            self.at(until, self.deliver, connection, number, other, message)
        else:
            self.event(receiver, partial(self.receive, connection, number, other, message))
            if self.on_deliver is not None:
                self.on_deliver(number, other, message)

    def receive(self, connection: Connection, number: int, other: int, message: object) -> None:
        """A host reads a message, unless it has ended the connection meanwhile."""
        if other in connection.up:
            connection.heard[other] = self.now
            self.parts[other].host.mesh.on_message(number, message)

    def cut(self, cut_off: set[str], seconds: float) -> None:
        """Let nothing pass between these machines and the others for a time."""
        self.cut_pairs(
            cut_off, {launcher.address for launcher in self.launchers} - cut_off, seconds
        )

    def cut_pairs(self, here: set[str], there: set[str], seconds: float) -> None:
        """Let nothing pass between these machines and those for a time."""
        for one in here:
            for other in there:
                key = frozenset((one, other))
                if self.cut_until.get(key, 0.0) <= self.now:
                    self.cut_since[key] = self.now
                self.cut_until[key] = max(self.cut_until.get(key, 0.0), self.now + seconds)
        for pair, connection in self.connections.items() if seconds > SILENT_S else ():
            for number in pair:
                (other,) = pair - {number}
                if self.is_cut(self.parts[number].launcher, self.parts[other].launcher):
                    self.after(SILENT_S, SILENT_S + 0.5, self.silence, connection, number, other)

    def silence(self, connection: Connection, number: int, other: int) -> None:
        """The kernel of the other side has acknowledged nothing for too long."""
        if self.is_cut(self.parts[number].launcher, self.parts[other].launcher):
            self.lose(connection, number, other, Link.SILENT)

    # --- workers

    def members(self, view: View) -> list[Node]:
        """Return the living members of a view."""
        return [
            node for node in self.nodes.values() if node.number in view.members and not node.is_dead
        ]

    def contribution(
        self, sender: Node, node: Node, view: View, what: object, requests: tuple[bool, bool]
    ) -> None:
        """What a member contributes reaches another one."""
        one, other = self.part_of(sender.workers), self.part_of(node.workers)
        if one is not None and other is not None and self.is_cut(one.launcher, other.launcher):
            self.after(0.2, 0.4, self.contribution, sender, node, view, what, requests)
        elif not node.is_dead:
            node.got.setdefault((view.members, view.generation, what), {})[sender.number] = requests
            node.advance(what)

    def note_membership(self, node: Node, view: View) -> None:
        """A worker forms a group: nothing may be lost that a worker in reach has."""
        group = next((group for group in self.groups if group.view == view), None)
        if group is None:
            best = max(view.commits)
            group = Group(view, self.now, best[1] if best else node.first)
            self.check_nothing_lost(node, group)
            self.groups.append(group)
        node.began = group.began

    def check_nothing_lost(self, node: Node, group: Group) -> None:
        """Check that the newest step is kept, or that nobody in reach has it any more."""
        for other in self.in_reach(node):
            if other.steps > group.first + 1:
                raise PropertyError(
                    f"{other.number} has made step {other.steps}, which is lost in {group.view}"
                )

    def check_number(self, node: Node) -> None:
        """Check that no other worker of the same side of the job has the number of a new one: of a
        host in the newest view that this one knows, and the other way round. Where the others have
        gone on without this host, it may start a worker before it learns that.
        """
        here = self.part_of(node.workers)
        for other in self.in_reach(node):
            there = self.part_of(other.workers)
            assert here is not None
            assert there is not None
            is_same_side = here.number in there.host._election.hosts
            if other.number == node.number and is_same_side:
                raise PropertyError(f"two workers have the number {node.number}")

    def in_reach(self, node: Node) -> Iterator[Node]:
        """Yield the living workers of the hosts with which that of a worker is in a view."""
        part = self.part_of(node.workers)
        view = None if part is None else part.host._election.view
        for other in self.nodes.values() if view is not None else ():
            at = self.part_of(other.workers)
            if at is not None and at.number in view.hosts and not at.is_over and not other.is_dead:
                yield other

    def note_step(self, node: Node, view: View, step: int) -> None:
        """A worker completes a step: no later group may have begun more than one step before it."""
        for group in self.groups:
            if group.began > node.began and step > group.first + 1:
                raise PropertyError(
                    f"{node.number} goes on with step {step} of {view.generation} {view.members}, "
                    f"{group.view.generation} {group.view.members} has begun after {group.first} "
                    f"at {group.began:.2f}"
                )

    # --- faults

    def begin_together(self, which: int) -> None:
        """Let faults come together that do harm only so.

        - A launcher is stopped just after the network to it was cut: it cannot hold the only
          worker, and the others, which have no state, begin without it.
        - So is a launcher that leads, cut off with one that follows it and has the only worker; in
          some of these schedules the worker was just started again, and who leads does not know yet
          that it trains.
        - Two hosts accept a view, tell the one that proposes it, and are killed before the others,
          which that one does not reach, have read of it.

        Args:
            which: of these; any other number for none.
        """
        random = self.random
        since = random.uniform(2.0, 12.0)
        if which in (FROZEN_LAUNCHER, FROZEN_LEADER):
            follows = which == FROZEN_LEADER
            # the one worker is started on the host with the most slots
            others = [1] * random.randint(1 + 2 * follows, 3)
            self.slots = [1, 2, *others] if follows else [2, 1, *others]
            self.most = self.minimum = 1
            # the others, and the workers, wait for a launcher as long as the user likes
            self.hung_s = random.choice([HUNG_S, 3 * HUNG_S, 6 * HUNG_S])
            cut_off = {"a0", "a1"} if follows else {"a0"}
            self.at(since, self.fault_of, "isolate a0", lambda: self.cut(cut_off, 30.0))
            frozen = since + random.uniform(0.0, SILENT_S)
            self.at(frozen, self.fault_of, "freeze a0", lambda: self.freeze(self.launchers[0], 40))
            if follows and random.random() < 0.7:
                self.at(
                    frozen - random.uniform(0.3, 1.5), self.fault_of, "worker a1", self.lose_all
                )
        elif which == CRASHES_IN_A_VOTE:
            self.slots = [1] * 5
            SimulatedPath.is_shared = self.is_shared = False
            self.far = {3, 4}
            apart = partial(self.cut_pairs, {"a0"}, {"a3", "a4"}, 30.0)
            self.at(since, self.fault_of, "isolate a0", apart)
            accepted_by = set[int]()

            def crash(host: int, other: int, message: object) -> None:
                if isinstance(message, Accepted) and other == 0 and self.now > since:
                    accepted_by.add(host)
                    if accepted_by >= {1, 2}:
                        self.on_deliver = None
                        for number in (1, 2):
                            die = partial(self.die, self.launchers[number], "killed", True)
                            self.fault_of(f"agent a{number}", die)

            self.on_deliver = crash
        self.most = min(self.most, sum(self.slots))
        self.minimum = min(self.minimum, self.most)

    def lose_all(self) -> None:
        """Kill all workers."""
        for node in list(self.nodes.values()):
            node.exit(-9)

    def fault_of(self, what: str, call: Callable[[], None]) -> None:
        """Let this go wrong."""
        self.faults.append(f"{self.now:.2f} {what}")
        self.note("---", what)
        call()

    def fault(self) -> None:
        """Let one thing go wrong."""
        random = self.random
        alive = [
            launcher
            for launcher in self.launchers
            if not launcher.dead and launcher.part is not None
        ]
        nodes = [node for node in self.nodes.values() if not node.is_dead]
        if not alive:
            return
        launcher, kind = random.choice(alive), random.choice(STORM if self.is_storm else FAULTS)
        seconds = random.choice([1.0, 2.0, 4.0, 6.0, 10.0, 30.0])
        addresses = sorted(each.address for each in alive)
        self.faults.append(f"{self.now:.2f} {kind} {launcher.address}")
        self.note("---", f"{kind} {launcher.address} {seconds}")
        if kind == "worker" and nodes:
            random.choice(nodes).exit(-9)
        elif kind == "workers":
            for node in random.sample(nodes, random.randint(0, len(nodes))):
                node.exit(-9)
        elif kind in ("agent", "power"):
            is_reset = launcher.frozen_since >= 0 or random.random() < 0.2
            self.die(launcher, "killed" if kind == "agent" else "power", is_reset)
        elif kind == "cut":
            self.cut(
                set(random.sample(addresses, random.randint(1, max(1, len(addresses) // 2)))),
                seconds,
            )
        elif kind == "isolate":
            self.cut({launcher.address}, seconds)
        elif kind == "freeze" and launcher.frozen_since < 0:
            self.freeze(launcher, random.choice([3.0, 20.0, 40.0]))
        elif kind == "fail" and nodes:
            node = random.choice(nodes)
            if node.doing == "steps":
                node.fail()
        elif kind == "join" and len(self.launchers) < 9:
            self.slots.append(random.randint(1, 2))
            self.launchers.append(Launcher(f"a{len(self.launchers)}"))
            self.wait_to_join(self.launchers[-1])
        elif kind in ("leave", "stop") and launcher.part is not None:
            number = signal.SIGTERM if kind == "leave" else signal.SIGINT
            launcher.part.host.user.signals.append(number)

    def freeze(self, launcher: Launcher, most: float) -> None:
        """Stop a launcher; its workers run, and the others wait for it for a while."""
        launcher.frozen_since = self.now
        self.after(1.0, most, self.thaw, launcher)
        dropped = self.now + self.hung_s
        self.at(dropped, self.drop_frozen, launcher, self.now)
        self.at(dropped + WORKERS_WAIT_S, self.end_workers_of_frozen, launcher, self.now)

    def drop_frozen(self, launcher: Launcher, since: float) -> None:
        """The others end their connections to a launcher that has not answered for too long."""
        part = launcher.part
        if launcher.frozen_since != since or launcher.dead or part is None:
            return
        for pair, connection in list(self.connections.items()):
            if part.number in pair:
                (other,) = pair - {part.number}
                self.lose(connection, other, part.number, Link.SILENT)

    def end_workers_of_frozen(self, launcher: Launcher, since: float) -> None:
        if launcher.frozen_since == since and launcher.part is not None and not launcher.dead:
            for node in list(launcher.part.host._workers.nodes.values()):
                node.exit(-9)

    def thaw(self, launcher: Launcher) -> None:
        """A stopped launcher runs again."""
        if launcher.frozen_since < 0 or launcher.dead:
            return
        gap = self.now - launcher.frozen_since
        launcher.stops.append((launcher.frozen_since, self.now))
        launcher.frozen_since = -1.0
        queue, launcher.queue = launcher.queue, []
        part = launcher.part
        if part is None or part.is_over:
            return
        part.host._pulse.lapse_s = gap
        part.host._note_turn()
        for call in queue:  # all that has come is read before anything follows from it
            call()
        self.turn(part)

    def heal(self) -> None:
        """No launcher stays stopped; cuts end by themselves."""
        for launcher in self.launchers:
            self.thaw(launcher)

    # --- the whole schedule

    def run(self) -> str:
        """Run until all have ended; returns how the job has.

        Raises:
            PropertyError: something waits for ever, or another property does not hold.
        """
        while self.queue and self.now <= LIMIT_S and not self.are_all_over():
            self.now, _, what = heapq.heappop(self.queue)
            CLOCK.now = self.now
            what()
        waiting = [launcher.address for launcher in self.launchers if not launcher.dead]
        running = [node.number for node in self.nodes.values() if not node.is_dead]
        if waiting or running:
            raise PropertyError(f"launchers {waiting} and workers {running} wait for ever")
        errors = {end for end in self.ends if end not in ("well", "left")}
        is_mild = self.minimum == 1 and all(fault.split()[1] in MILD for fault in self.faults)
        in_vain = "without any progress|killed by SIGKILL|before the job had begun"
        if (
            is_mild
            and "well" not in self.ends
            and not any(re.search(in_vain, error) for error in errors)
        ):
            raise PropertyError(f"a job that could go on has ended: {errors}")
        return (
            "success"
            if "well" in self.ends
            else "; ".join(sorted(errors)) or "all hosts were lost or left"
        )

    def are_all_over(self) -> bool:
        return all(launcher.dead for launcher in self.launchers) and all(
            node.is_dead for node in self.nodes.values()
        )


def try_schedules(seeds: Iterable[int]) -> Counter[str]:
    """Try schedules; returns how the jobs have ended, and how often.

    Raises:
        PropertyError: something does not hold; names the seed.
    """
    results = Counter[str]()
    with simulated():
        for seed in seeds:
            world = World(seed)
            try:
                result = world.run()
            except Exception as error:
                error.args = (f"seed {seed}: {type(error).__name__}: {error}; {world.faults}",)
                raise
            results["".join(letter for letter in result if not letter.isdigit())[:100]] += 1
    return results


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=5, help="broken schedules after which it ends")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(words)
    began, results, broken = time.process_time(), Counter[str](), 0
    with simulated():
        for seed in range(options.first, options.first + options.count):
            world = World(seed)
            try:
                result = world.run()
                results["".join(letter for letter in result if not letter.isdigit())[:100]] += 1
            except Exception as error:
                broken += 1
                print(f"seed {seed}: {type(error).__name__}: {error}\n  {world.faults}", flush=True)
                if options.verbose:
                    print("\n".join(world.log))
                    raise
                if broken >= options.most:
                    break
            if options.verbose:
                print("\n".join(world.log))
    for result, times in results.most_common(14):
        print(f"{times:7d}  {result}")
    print(
        f"{sum(results.values())} schedules in {time.process_time() - began:.0f} s of processor "
        f"time, {broken} broken"
    )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
