"""The decisions of an elastic job, which the launcher that leads makes: which workers run where,
and when the job ends.

What it decides goes as messages to the launchers of all hosts, its own included (`elastic_host`).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from msgspec import structs

from ...elastic.membership import (
    NO_STATE,
    Commit,
    Coordinator,
    Down,
    HostReport,
    Keep,
    Regroup,
    Up,
    View,
    WorkerState,
)
from ...errors import LockstepError, counted
from ...job.messages import Failure, JobEnd, Reply, Request, Say
from ...messages import Integer, List, Tagged
from ...system.processes import UNKNOWN_EXIT_CODE, signal_name
from ..handshake import HostEntry

_MOST_FAILED_STARTS = 3  # workers, one after the other, that have ended before they became members
_SAME_ERROR_S = 1.0  # in which all workers raise the same error, if the input is bad
_MOST_RESTARTS = 3  # of all workers, one after the other, without any progress
_WAITING_S = 2.0  # after which it is said that the members wait for others
FENCE_S = 8.0
"""Seconds after which no worker of a host that was lost completes a step: a lease, twice (see
`membership.LEASE_S`).
"""


@dataclass(frozen=True)
class Limits:
    """How many workers an elastic job may have: below `minimum` the training waits, and never more
    than `maximum`.

    Attributes:
        pause_s: seconds for which it waits for workers, or for hosts that do not answer, before it
            ends.
    """

    minimum: int
    maximum: int
    pause_s: float = math.inf


class JobState(Tagged, frozen=True):
    """What a launcher that takes over has to know; the one that leads sends each change to all.

    Attributes:
        target: the number of workers that the job shall have.
        hosts: that take part.
        first: the number of the first worker since all were started.
        started: how many workers have been started.
        restarts: how often all workers have been started again.
        fruitless: how often in succession without progress.
        progress: the greatest commit before the last start of all workers.
        resume: the checkpoint from which all workers were started again; "" without one.
        folder: of the run; "" as long as it is not known, or if there is none.
        claims: the folder in which views are claimed once all hosts see it; "" without one.
        checkpoint: the newest one.
        stops: the signals with which the job was asked to end.
        is_ending: whether the job ends.
        leaving: the hosts that leave.
        lost: how many workers were lost, or have left.
        joined: how many joined the training later.
        faulty: the workers that computed wrong numbers, whose devices are used no more.
        version: how often it has changed; of two states the one that has more often is newer.
    """

    target: Integer
    hosts: List[HostEntry] = ()
    first: Integer = 0
    started: Integer = 0
    restarts: Integer = 0
    fruitless: Integer = 0
    progress: Commit = NO_STATE
    resume: str = ""
    folder: str = ""
    claims: str = ""
    checkpoint: str = ""
    stops: List[Integer] = ()
    is_ending: bool = False
    leaving: List[Integer] = ()
    lost: Integer = 0
    joined: Integer = 0
    faulty: List[Integer] = ()
    version: Integer = 0


class Start(Tagged, frozen=True):
    """Start a worker.

    Attributes:
        number: of the worker.
        rank, size: its rank, and of how many, until it is a member.
        local_size: the number of workers on its host.
        joins: whether the training runs already.
        attempt: how often all workers have been started again.
        resume: the checkpoint from which they begin then; "" without one.
        folder: where they have begun to train before; "" if they have not.
    """

    number: Integer
    rank: Integer
    size: Integer
    local_size: Integer
    joins: bool
    attempt: Integer
    resume: str
    folder: str


class Kill(Tagged, frozen=True):
    """Kill workers, or let them leave after their step."""

    numbers: List[Integer]
    gently: bool = False


class ToWorker(Tagged, frozen=True):
    """Pass this on to a worker; -1 for none, but remember it."""

    number: Integer
    message: Down


class AgentState(Tagged, frozen=True):
    """All that a host knows, for who leads; sent again at each new view of the hosts and
    connection, and when anything else than `report` has changed.

    Attributes:
        view: the number of the newest view that the sender knows.
        host: the sender.
        job: the newest state of the job that it has been told.
        report: on its workers, which say themselves what changes.
        saved: the newest checkpoint that its workers have saved; "" if the job knows of it, or of
            a newer one.
        sees_claims: whether it sees the folder in which views are to be claimed.
        unreachable: the hosts of the view that it does not reach.
    """

    view: Integer
    host: HostEntry
    job: JobState
    report: HostReport
    saved: str = ""
    sees_claims: bool = False
    unreachable: List[Integer] = ()


class FromWorker(Tagged, frozen=True):
    """A worker of this host has sent a message."""

    number: Integer
    message: Up


class Ended(Tagged, frozen=True):
    """A worker's process has ended; `code` is 0, too, if it was killed from here."""

    number: Integer
    code: Integer
    is_finished: bool
    report: Failure | None

    def without_pickle(self) -> Ended:
        """Return it as another host may read it, which unpickles nothing that it has not pickled
        itself.
        """
        report = None if self.report is None else structs.replace(self.report, pickled="")
        return structs.replace(self, report=report)


class Kept(Tagged, frozen=True):
    """This host has kept what a worker has sent with the number `request`."""

    worker: Integer
    request: Integer


ForLeader = AgentState | FromWorker | Ended | Kept | Request
"""What the launchers of all hosts send to the one that leads."""

HostMessages = ForLeader | JobState | Start | Kill | ToWorker | Keep | Say | JobEnd | Reply
"""All messages between them."""


class KeptValues:
    """The values that rank 0 has sent for workers that join later: which hosts have not kept them
    yet.

    A value is named by its worker and the number of the worker's request.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._missing: dict[tuple[int, int], set[int]] = {}

    def resume(self, kept: Iterable[Keep]) -> None:
        """This host begins to lead: hosts keep these values, and workers ask again for others."""
        self._known |= {
            (message.worker, message.request) for message in kept if not message.is_of_callbacks
        }
        self._missing.clear()

    def forget_waits(self) -> None:
        """No worker waits any more: all are started again."""
        self._missing.clear()

    def is_known(self, message: Keep) -> bool:
        """Return whether the hosts had been sent a value before this host led."""
        return (message.worker, message.request) in self._known

    def sent(self, message: Keep, hosts: Iterable[int]) -> None:
        """A value is sent to the hosts."""
        if message.request >= 0:
            self._missing[message.worker, message.request] = set(hosts)

    def kept_by(self, host: int, name: tuple[int, int]) -> bool:
        """A host has kept a value, or is lost; returns whether now all hosts have kept it."""
        missing = self._missing.get(name)
        if missing is None:
            return False
        missing.discard(host)
        if not missing:
            del self._missing[name]
        return not missing

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """The values that not all hosts have kept."""
        return list(self._missing)


@dataclass
class JobOutcome:
    """Why a job ends that does not end well.

    Attributes:
        reports, codes: of the workers that ended because of an error, by rank.
        places: the names of their hosts, if there are several.
        failure: why the job does not go on, though no worker has failed; "" as long as it does.
    """

    reports: dict[int, Failure] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    failure: str = ""


@dataclass
class ElasticJob:
    """Decides on the workers of the job. Its methods are the events; `supervise` does what is due.

    Args:
        limits: of the number of workers.
        state: what the launcher that led before knew.
        hosts: that take part.
        send: sends a message to the launcher of a host.
        log: prints a message of the job.
        others_may_join: whether other hosts can join the job.

    Attributes:
        coordinator: of the membership.
        is_over: whether the last worker has ended, and no more are to be started.
        outcome: why it ends.
    """

    limits: Limits
    state: JobState
    hosts: dict[int, HostEntry]
    send: Callable[[int, HostMessages], None]
    log: Callable[[str], None]
    others_may_join: bool = True
    coordinator: Coordinator = field(init=False)
    is_over: bool = False
    outcome: JobOutcome = field(default_factory=JobOutcome)
    _living: dict[int, int] = field(default_factory=dict)  # workers, with their hosts
    _dismissed: set[int] = field(default_factory=set)
    _killed: set[int] = field(default_factory=set)
    _failed_starts: int = 0
    _kill_at: float = math.inf
    _view: tuple[int, ...] = ()
    _restart_reason: str = ""
    _waits_since: float = math.inf
    _is_waiting_said: bool = False
    _fenced_until: float = -math.inf
    _values: KeptValues = field(default_factory=KeptValues)
    _plan: list[int] = field(default_factory=list)  # hosts for the first workers
    _ranks: dict[int, int] = field(default_factory=dict)  # in the newest view that has the worker
    # since the last view of as many workers as the training needs
    _losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = self._new_coordinator()

    def _new_coordinator(self, generation: int = 0) -> Coordinator:
        """Return a coordinator that knows no workers."""
        state = self.state
        return Coordinator(state.target, self.limits.minimum, generation, folder=state.folder)

    def resume(
        self,
        reports: Iterable[HostReport],
        kept: Collection[Keep],
    ) -> None:
        """Go on with what the hosts know of their workers; the workers of all other hosts are lost.

        Args:
            reports: of the hosts.
            kept: what all hosts keep.
        """
        reports = list(reports)
        self.coordinator = self._new_coordinator(self.coordinator.generation)
        self._values.resume(kept)
        for message in kept:
            self.coordinator.keep(message)
        self.coordinator.resume(reports)
        has_finished = any(
            number >= self.state.first for report in reports for number in report.finished
        )
        self._living = {
            record.number: report.host for report in reports for record in report.workers
        }
        self._killed.clear()  # what was sent before may be lost: it is sent again
        leaving = {
            record.number for report in reports for record in report.workers if record.state.leaving
        }
        self._kill(self._living.keys() & self._dismissed - leaving, gently=True)
        self._view = self.coordinator.view
        for record in (record for report in reports for record in report.workers):
            if record.state.faulty:
                self._retire(record.number)
        for number in self.state.stops[:1]:
            self.coordinator.stop(number)
        self._change_state(
            is_ending=self.state.is_ending or has_finished,
            leaving=tuple(each for each in self.state.leaving if each in self.hosts),
        )

    def host_added(self, host: HostEntry) -> None:
        """A host has joined."""
        self.hosts[host.number] = host
        self._use_slots(host.slots)
        self.tell(f"{host.name} joined the job")

    def host_lost(self, number: int) -> None:
        """A host has ended, or does not answer; what it ran is told to the coordinator by
        `resume`.
        """
        host = self.hosts.pop(number, None)
        lost = {worker for worker, at in self._living.items() if at == number}
        if host is not None and number not in self.state.leaving:
            left = [worker for worker in self.coordinator.members if worker not in lost]
            what = f"{host.name} was lost with {describe_workers(len(lost), '', '')}"
            self._tell_loss(what, len(lost), len(left))
        self._living = {worker: at for worker, at in self._living.items() if worker not in lost}
        for worker, request in self._values.awaited:
            self.kept(number, worker, request)
        if number in self.state.leaving:
            self._change_state(leaving=tuple(each for each in self.state.leaving if each != number))

    def fence(self) -> None:
        """A host was lost that may still run: for some time nobody begins without the state that it
        may have.

        Who has the state goes on at once, as the other side lacks the contributions of these
        members.
        """
        self._fenced_until = time.monotonic() + FENCE_S
        self.coordinator.is_fenced = True

    def hold(self) -> bool:
        """Let all members leave their group at once, as other hosts may go on; returns whether
        there are any.
        """
        members = self.coordinator.members_in_training
        regroup = Regroup(self.coordinator.generation + 1, "at once")
        for number in members:
            self.send(self._living.get(number, -1), ToWorker(number, regroup))
        return bool(members)

    def workers_on(self, host: int) -> int:
        """Return the number of workers on a host."""
        return sum(at == host for at in self._living.values())

    def receive(self, number: int, message: Up) -> None:
        """A worker has sent a message."""
        if isinstance(message, Keep):
            message = structs.replace(message, worker=number)
            if self._values.is_known(message):
                # asked again, as the launcher that led is gone
                self.coordinator.to_keep.append(message)
                return
        self.coordinator.receive(number, message)
        if isinstance(message, WorkerState) and message.faulty:
            self._retire(number)
        if self.coordinator.folder != self.state.folder:
            self._change_state(folder=self.coordinator.folder)
        # a host has joined before the training had begun
        if self.state.target > self.coordinator.most:
            self._change_state(target=self.coordinator.most)

    def ended(self, host: int, end: Ended) -> None:
        """Decide what the end of a worker's process means."""
        number = end.number
        code = end.code
        report = end.report
        if self._living.pop(number, None) is None:
            return
        coordinator = self.coordinator
        rank = self.rank_of(number)
        was_member = number in coordinator.members
        was_candidate = number in coordinator.candidates
        is_error = (
            was_member and report is not None and not report.stopped and not coordinator.failure
        )
        is_error = is_error or (was_member and self._has_crashed_after_the_training(end))
        if self.state.is_ending or self.state.stops or is_error:
            self._note_end(host, end)
            if is_error and not self.state.stops:
                self._end_with_error()
                return  # and the others do not go on
        was_told = number in self._dismissed and coordinator.complete and code == -signal.SIGTERM
        if (
            code == 0 and end.is_finished
        ) or was_told:  # told to leave when the training was complete
            coordinator.left(number)
            self._note_good_end(number, rank, was_member, was_candidate)
            return
        coordinator.lost(number)
        if (
            self.state.is_ending
            or self.state.stops
            or coordinator.failure
            or number in self._dismissed
        ):
            return
        if was_candidate:
            self._note_failed_start(host, end)
        elif was_member:
            lost = f"rank {rank}{self._on_host(host)} was lost ({_how(code)})"
            self._tell_loss(lost, 1, len(coordinator.members))

    def _retire(self, number: int) -> None:
        """Use the device of a worker that computes wrong numbers no more; the worker leaves by
        itself.
        """
        host = self._living.get(number, -1)
        if host not in self.hosts:
            return
        self._dismissed.add(number)
        if number in self.state.faulty:
            return
        before = self.hosts[host]
        self.hosts[host] = structs.replace(before, slots=before.slots - 1)
        self._change_state(faulty=(*self.state.faulty, number))  # which tells of the slot as well
        self._fit_to_slots(host)
        self.tell(
            f"rank {self.rank_of(number)}{self._on_host(host)} computes wrong numbers and leaves; "
            f"its device is used no more"
        )

    def _has_crashed_after_the_training(self, end: Ended) -> bool:
        """Return whether a worker has crashed, as native libraries may at exit, when all had
        completed the training.

        To start all workers again would train everything again, and most likely end in the same
        crash. One that was killed before the end of its program is lost, though, as the program may
        have more to do.
        """
        if (
            not self.coordinator.complete
            or self.coordinator.failure
            or end.number in {*self._killed, *self._dismissed}
        ):
            return False
        return end.code != 0 and (
            end.is_finished or end.code not in (-signal.SIGKILL, -signal.SIGTERM)
        )

    def saved(self, path: str) -> None:
        """A checkpoint was saved."""
        if path != self.state.checkpoint:
            self._change_state(checkpoint=path)

    def claims_in(self, folder: str) -> None:
        """Views are to be claimed in a folder, once all hosts see it."""
        if folder != self.state.claims:
            self._change_state(claims=folder)

    def kept(self, host: int, worker: int, request: int) -> None:
        """A host has kept what a worker has sent."""
        if self._values.kept_by(host, (worker, request)):
            self.coordinator.answer_kept(worker, request)

    def ask(self, host: int, request: Request) -> str:
        """Do what a user asks for, and return what is done.

        Raises:
            LockstepError: it cannot be done.
        """
        match request.what:
            case "resize":
                return self._resize(request.count)
            case "remove" | "leave":
                return self._remove_host(host if request.what == "leave" else request.host)
            case "slots":
                return self._set_slots(host, request.count)
            case "stop":
                self._change_state(stops=(*self.state.stops, request.count))
                self.coordinator.stop(self.state.stops[0])
                return "the job saves and ends"
        raise LockstepError(f"unknown request {request.what!r}")

    def supervise(self) -> None:
        """Do what is due: start and end workers."""
        coordinator = self.coordinator
        state = self.state
        self._announce_view()
        self._announce_waiting()
        self._end_wait()
        while self.coordinator.to_keep:
            message = self.coordinator.to_keep.popleft()
            self._values.sent(message, self.hosts)
            for host in self.hosts:
                self.send(host, message)
        is_fenced = time.monotonic() < self._fenced_until
        coordinator.set_fenced(is_fenced)
        if coordinator.failure and not (state.is_ending or state.stops or self._restart_reason):
            self._restart_reason = coordinator.failure
        if self._restart_reason:
            self._kill(self._living)  # again after `resume`: a connection may have lost it
            if not self._living and not is_fenced:
                self._start_again()
            return
        if state.is_ending or state.stops:
            self._dismiss_candidates()
            if time.monotonic() >= self._kill_at:
                self._kill(self._living)
            self.is_over = not self._living
        elif not coordinator.complete:
            for _ in range(self._missing()):
                if not self._start_worker():
                    break
            coordinator.expect(len(self._living))

    def messages(self) -> None:
        """Send what the coordinator has to tell."""
        for number, message in self.coordinator.take_messages():
            host = self._living.get(number)
            if host is not None:
                self.send(host, ToWorker(number, message))
            if isinstance(message, View):
                for other in self.hosts:
                    if other != host and other not in message.hosts:
                        self.send(other, ToWorker(-1, message))

    def tell(self, text: str) -> None:
        """Print what has happened, and let all hosts know."""
        self.log(f"lockstep: {text}")
        for host in self.hosts:
            self.send(host, Say(text))

    def rank_of(self, number: int) -> int:
        """Return the rank of a worker in the newest view that has it; its number if none has."""
        view = self.coordinator.view
        self._ranks |= {member: rank for rank, member in enumerate(view)}
        return self._ranks.get(number, number)

    def _on_host(self, number: int) -> str:
        """Return where a worker is, in a message; "" if there is one host only."""
        return (
            f" on {self.hosts[number].name}" if len(self.hosts) > 1 and number in self.hosts else ""
        )

    def _change_state(self, **values: object) -> None:
        """Change the state of the job, and tell all hosts."""
        version = self.state.version + 1
        hosts = tuple(self.hosts.values())
        self.state = structs.replace(self.state, version=version, hosts=hosts, **values)
        for host in self.hosts:
            self.send(host, self.state)

    def _free_slots(self, host: int) -> int:
        """Return how many workers more may run on a host."""
        if host in self.state.leaving:
            return 0
        return max(0, self.hosts[host].slots - len(self._staying_on(host)))

    def _staying_on(self, host: int) -> list[int]:
        """Return the workers on a host that stay."""
        staying = self._staying()
        return [worker for worker, at in self._living.items() if at == host and worker in staying]

    def _staying(self) -> set[int]:
        """Return the workers that have not been told to leave, and do not wait to be replaced so
        that they may.
        """
        return self._living.keys() - self._dismissed - set(self.coordinator.leaving)

    def _missing(self) -> int:
        """Return how many workers are to be started."""
        leavers = self._living.keys() & set(self.coordinator.leaving) - self._dismissed
        target = (
            max(self.limits.minimum, self.state.target - len(leavers))
            if leavers
            else self.state.target
        )
        return target - len(self._staying())

    def _start_worker(self) -> bool:
        """Start a worker on a host that has a slot for it; returns whether there is one."""
        state = self.state
        coordinator = self.coordinator
        if state.started == state.first:
            self._plan = self._places(state.target)
        host = self._plan.pop(0) if self._plan else next(iter(self._places(1)), None)
        if host is None:
            return False
        number = state.started
        joins = coordinator.formed >= 0
        before = len(coordinator.members) + len(coordinator.candidates)
        last = min(before, coordinator.most - 1)  # the view may have a lost worker still
        rank = last if joins else (number - state.first) % state.target
        size = rank + 1 if joins else state.target
        self._living[number] = host
        local_size = len(self._staying_on(host)) + self._plan.count(host)
        self._change_state(started=number + 1)
        coordinator.started(number, host)
        folder = state.folder if state.restarts else ""
        self.send(
            host, Start(number, rank, size, local_size, joins, state.restarts, state.resume, folder)
        )
        return True

    def _places(self, count: int) -> list[int]:
        """Return hosts for so many workers, in order: each time the one with the most free
        slots.
        """
        free = {number: self._free_slots(number) for number in sorted(self.hosts)}
        places = []
        for _ in range(min(count, sum(free.values()))):
            host = max(free, key=lambda number: free[number])
            free[host] -= 1
            places.append(host)
        return sorted(places)

    def _kill(self, numbers: Iterable[int], gently: bool = False) -> None:
        """Let hosts kill workers, or `gently` let them leave after their step."""
        by_host: dict[int, list[int]] = {}
        for number in numbers:
            if gently or number not in self._killed:
                by_host.setdefault(self._living.get(number, -1), []).append(number)
        if not gently:
            self._killed.update(number for some in by_host.values() for number in some)
        for host, some in by_host.items():
            self.send(host, Kill(tuple(some), gently))

    def _end_with_error(self) -> None:
        """End the job because of an error of the program, which other workers may be about to
        report as well.
        """
        self._change_state(is_ending=True)
        self._kill_at = min(self._kill_at, time.monotonic() + _SAME_ERROR_S)

    def _note_good_end(self, number: int, rank: int, was_member: bool, was_candidate: bool) -> None:
        """Note that a worker's program has ended, or that the worker has left."""
        if was_member or (was_candidate and self.coordinator.formed < 0):
            self._change_state(is_ending=True)
        elif not was_candidate:
            if number not in self._dismissed:
                self._change_state(target=max(self.limits.minimum, self.state.target - 1))
            self._tell_loss(f"rank {rank} has left", 1, len(self.coordinator.members))

    def _note_end(self, host: int, end: Ended) -> None:
        """Note how a worker has ended, which is to be told at the end of the job."""
        rank = self.rank_of(end.number)
        if end.code and end.number not in self._killed:
            self.outcome.codes[rank] = end.code
        if end.report is not None:
            self.outcome.reports[rank] = structs.replace(end.report, rank=rank)
        if len(self.hosts) > 1 and host in self.hosts:
            self.outcome.places[rank] = self.hosts[host].name

    def _note_failed_start(self, host: int, end: Ended) -> None:
        """Note that a worker has ended before it became a member; too many end the attempts."""
        self._failed_starts += 1
        report = end.report
        why = f"{report.kind}: {report.reason}" if report is not None else _how(end.code)
        members = len(self.coordinator.members)
        if members < self.limits.minimum:  # which would wait for others for ever
            if (report is not None and not members) or self._failed_starts > _MOST_FAILED_STARTS:
                self._note_end(host, end)
                self._end_with_error()
        elif self._failed_starts == _MOST_FAILED_STARTS:
            self._change_state(target=members)
            self.tell(
                f"no more workers are started, as {self._failed_starts} could not join ({why})"
            )

    def _dismiss_candidates(self) -> None:
        """End the workers that would join a job that is ending, and would wait for its members for
        ever.
        """
        if self.coordinator.formed >= 0:
            candidates = self.coordinator.candidates
            self._dismissed.update(candidates)
            self._kill(candidates)

    def _start_again(self) -> None:
        """Start all workers again from the newest checkpoint, unless that has been in vain."""
        state = self.state
        progress = self.coordinator.progress
        reason = self._restart_reason
        self._restart_reason = ""
        fruitless = 0 if progress > state.progress else state.fruitless + 1
        if fruitless > _MOST_RESTARTS:
            times = f"the workers were started again {_MOST_RESTARTS} times without any progress"
            self.outcome.failure = f"{times}, and then {reason}"
            self._change_state(is_ending=True)
            self.is_over = True
            return
        resume = state.checkpoint or state.resume
        where = f"from the checkpoint {resume}" if resume else "from the beginning"
        self.tell(f"{reason}; all workers are started again, {where}")
        self.coordinator = self._new_coordinator()
        self._view = ()
        self._failed_starts = 0
        self._values.forget_waits()
        self._change_state(
            restarts=state.restarts + 1,
            fruitless=fruitless,
            progress=max(progress, state.progress),
            first=state.started,
            resume=resume,
        )

    def _resize(self, workers: int) -> str:
        """Let the job have so many workers, and return what is done."""
        coordinator = self.coordinator
        (least, most) = (self.limits.minimum, self.limits.maximum)
        if not least <= workers <= most:
            raise LockstepError(
                f"expected {least} to {most} workers, as the job was started with, got {workers}"
            )
        if workers > coordinator.most:
            why = "each worker needs a virtual worker, or a sample of each global batch"
            raise LockstepError(
                f"expected at most {counted(coordinator.most, 'worker')}, got {workers}: {why}"
            )
        slots = sum(
            host.slots for number, host in self.hosts.items() if number not in self.state.leaving
        )
        if workers > slots:
            raise LockstepError(
                f"expected at most {counted(slots, 'worker')}, the slots of the hosts, got "
                f"{workers}"
            )
        if self.state.is_ending or self.state.stops or coordinator.complete:
            raise LockstepError("the job is ending")
        self._failed_starts = 0
        self._change_state(target=workers)
        newest_first = [*coordinator.candidates, *reversed(coordinator.members)]
        staying = [number for number in newest_first if number not in self._dismissed]
        before = len(staying)  # fewer than the job had wanted if a host was lost
        self._let_leave(staying[: max(0, before - workers)])
        return f"{counted(before, 'worker')} before, {workers} after the step in progress"

    def _remove_host(self, which: str | int) -> str:
        """Let all workers of a host leave, and then its launcher."""
        found = [
            number
            for number, host in self.hosts.items()
            if which in (number, host.name, host.address)
        ]
        if not found:
            names = ", ".join(host.name for host in self.hosts.values())
            raise LockstepError(f"expected one of the job's hosts, {names}, got {which}")
        (number,) = found[:1]
        others = self.hosts.keys() - {number, *self.state.leaving}
        if not others:
            raise LockstepError(f"{self.hosts[number].name} is the job's last host")
        there = self._staying_on(number)
        left = len(self._staying()) - len(there)
        free = sum(self._free_slots(other) for other in others)
        if left + free < self.limits.minimum and isinstance(which, str):
            raise LockstepError(
                f"expected at least {counted(self.limits.minimum, 'worker')}, without {which} "
                f"there are {left}"
            )
        if number not in self.state.leaving:
            target = max(self.limits.minimum, min(self.state.target, left + free))
            self._change_state(leaving=(*self.state.leaving, number), target=target)
            self._let_leave(there)
        return (
            f"{self.hosts[number].name} leaves after the step in progress, with "
            f"{describe_workers(len(there), '', '')}"
        )

    def _set_slots(self, host: int, slots: int) -> str:
        """Let a host have more or fewer workers from now on."""
        before = self.hosts[host]
        self.hosts[host] = structs.replace(before, slots=slots)
        if slots > before.slots:
            self._use_slots(slots - before.slots)
        else:
            self._fit_to_slots(host)
        return f"{before.name} had {counted(before.slots, 'slot')}, and has {slots} now"

    def _fit_to_slots(self, host: int) -> None:
        """Let workers of a host leave that has fewer slots now."""
        self._let_leave(self._staying_on(host)[self.hosts[host].slots :])
        living = len(self._staying())
        free = sum(self._free_slots(each) for each in self.hosts)
        self._change_state(target=max(self.limits.minimum, min(self.state.target, living + free)))

    def _use_slots(self, more: int) -> None:
        """Let the job have more workers, of which there are as many slots as `more`."""
        living = len(self._staying())
        free = sum(self._free_slots(each) for each in self.hosts)
        wanted = min(
            self.limits.maximum, self.coordinator.most, max(self.state.target, living + more)
        )
        self._failed_starts = 0
        self._change_state(target=min(wanted, living + free))

    def _let_leave(self, numbers: list[int]) -> None:
        """Let workers leave after the step in progress."""
        self._dismissed.update(numbers)
        self._kill(numbers, gently=True)

    def _announce_view(self) -> None:
        """Say who has joined with a new view."""
        view = self.coordinator.view
        joined = [
            str(view.index(number)) for number in view if self._view and number not in self._view
        ]
        if joined:
            self._failed_starts = 0
            self._change_state(joined=self.state.joined + len(joined))
            self.tell(
                f"rank{'s'[: len(joined) != 1]} {', '.join(joined)} joined; "
                f"{describe_workers(len(view))} on"
            )
        if view != self._view:
            if len(view) >= self.limits.minimum:
                self._losses.clear()
            self._ranks |= {member: rank for rank, member in enumerate(view)}
        self._view = view

    def _tell_loss(self, what: str, lost: int, left: int) -> None:
        """Say who was lost or has left, and what the workers that are left do.

        Args:
            what: in words.
            lost: the number of workers that were lost or have left.
            left: the number of those that go on.
        """
        self._change_state(lost=self.state.lost + lost)
        self._losses.append(f"{what} at {time.strftime('%H:%M:%S')}")
        least = self.limits.minimum
        is_enough = left >= least or self.coordinator.complete
        few = f"{describe_workers(left, 'is', 'are')} left of the {least} that the training needs"
        self.tell(f"{what}; {describe_workers(left)} on" if is_enough else f"{what}; {few}")

    def _announce_waiting(self) -> None:
        """Say once that the members wait because they are too few."""
        if not self.coordinator.waiting:
            self._waits_since = math.inf
            self._is_waiting_said = False
            return
        now = time.monotonic()
        self._waits_since = min(self._waits_since, now)
        if now - self._waits_since >= _WAITING_S and not self._is_waiting_said:
            self._is_waiting_said = True
            leaving = self.coordinator.leaving
            leave = [
                f"rank {self.rank_of(each)}{self._on_host(self._living.get(each, -1))} is to leave"
                for each in leaving
            ]
            why = "; ".join([*self._losses, *leave])
            count = len(self.coordinator.members) - len(leaving)
            missing = f"{self.limits.minimum - count} more{f' ({why})' if why else ''}"
            self.tell(f"{describe_workers(count, 'waits', 'wait')} for {missing}")

    def _end_wait(self) -> None:
        """Save and end when the members have waited for others for too long."""
        least = self.limits.minimum
        limit_s = self.limits.pause_s
        if self._waits_since == math.inf or self.state.stops:
            return
        slots = sum(host.slots for host in self.hosts.values())
        if slots < least and not self.others_may_join:
            self.outcome.failure = (
                f"{counted(slots, 'worker')} can run without the devices that compute wrong "
                f"numbers, fewer than the {least} that the training needs"
            )
        elif time.monotonic() - self._waits_since >= limit_s:
            self.outcome.failure = (
                f"fewer than {counted(least, 'worker')} for {limit_s:g} s (--pause-timeout)"
            )
        else:
            return
        self.tell(f"{self.outcome.failure}; the job saves and ends")
        self._change_state(stops=(signal.SIGTERM,))
        self.coordinator.stop(signal.SIGTERM)


def describe_workers(count: int, one: str = "goes", several: str = "go") -> str:
    """Return ``1 worker goes`` or ``3 workers go``."""
    verb = one if count == 1 else several
    return f"{count} worker{'s'[: count != 1]} {verb}".rstrip()


def _how(code: int) -> str:
    if code == UNKNOWN_EXIT_CODE:
        return "its exit code is not known"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
