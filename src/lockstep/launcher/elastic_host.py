"""The launcher of one host of an elastic job, while the job runs: it starts and ends workers,
passes on what they say to the launcher that leads, and takes part in the election of that one.

How a host comes to take part in a job is in `elastic_node`.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from .. import environment, messages
from ..elastic.control import ControlSocket, Reply, Request
from ..elastic.membership import (
    LEASE_S,
    HostMemory,
    HostReport,
    Keep,
    Lease,
    Regroup,
    Up,
    View,
    WorkerState,
)
from ..elastic.mesh import (
    ASKS,
    NOBODY_LEADS,
    WAITS_TO_JOIN,
    HostEntry,
    Knock,
    Link,
    Mesh,
    Refused,
    Welcome,
    Wire,
)
from ..errors import InterruptedRunError, LockstepError, WorkerError
from ..interruption import collect_signals
from ..job.connection import take_turn
from ..job.messages import HostDescription, Say
from ..system.job_folders import temporary_job_folder
from .claims import SharedFolder
from .elastic_job import (
    AgentState,
    ElasticJob,
    Ended,
    ForLeader,
    FromWorker,
    HostMessages,
    JobState,
    Kept,
    Kill,
    Over,
    Start,
    ToWorker,
)
from .elastic_workers import HostSetup, HostWorkers
from .election import Election, ElectionMessage, HostView
from .host_description import check_compatible, describe_host
from .other_hosts import Inbox, UnreachableHosts
from .pulse import Pulse
from .worker_status import WorkerResults, raise_failure

__all__ = [
    "ALONE_S",
    "About",
    "ElasticHost",
    "OutsideError",
    "WireMessage",
    "describe_ended",
    "run_on_one_host",
]


class About(msgspec.Struct, frozen=True):
    """What a host says of itself when it knocks: `node` is the number that it wants; -1 for any."""

    description: HostDescription
    node: int = -1


WireMessage = Wire | ElectionMessage | HostMessages
"""All messages between the launchers of two hosts."""

_POLL_S = 0.1
_TICK_S = 1.0
_PAUSE_TICKS = 2  # after which a signal to this host does not wait for the others any more
_LEASE_EVERY_S = 0.5
_FLUSH_S = 2.0
# less than a lease, which a launcher that has not run must not renew before it knows who leads
_GAP_S = 2.0
_HEARD_S = 1.0  # within which a launcher must have heard of the one that leads to renew a lease
_HUNG_S = 3.0  # after which a launcher that is connected may be one that does not run
_MOST_TOLD = 20
_NUMBERS_A_VIEW = (
    1000  # of hosts that are let in: who leads later may not have heard of all of them
)
ALONE_S = 10.0
"""How long a host that the others may have gone on without looks for a launcher of the job."""


def run_on_one_host(setup: HostSetup) -> None:
    """Run an elastic job on this host alone, which no other one can join.

    Raises:
        as `local.run_workers`.
    """
    entry = HostEntry(0, socket.gethostname(), "", 0, setup.limits.maximum)
    try:
        with ElasticHost.opened(setup, entry) as host:
            host.found([entry], setup.options.workers)
            host.run()
    finally:
        setup.multiplexer.close()


class OutsideError(LockstepError):
    """The other hosts of an elastic job have gone on without this one, which may join again."""


class ElasticHost:
    """This host, from its start to the end of the job.

    Args:
        setup: how to run workers.
        entry: this host.
        folder: a private directory.
        selector: of this launcher's loop.
        mesh: the connections to the other hosts; None for a job on one host.

    Attributes:
        signals: to this launcher: the first lets this host leave, or ends the job if it is alone.
        job_signals: to the whole job, which another thread may add to.
        requests: "leave" or "slots" with a number, of the launcher that was typed in; another
            thread may add to them.
        knows_outcome: whether the job is over for all hosts, and not only for this one.
        has_new_reader: set by another thread when somebody else reads this launcher's output from
            now on, who is then told what has happened so far.
    """

    def __init__(
        self,
        setup: HostSetup,
        entry: HostEntry,
        folder: Path,
        selector: selectors.BaseSelector,
        mesh: Mesh | None = None,
    ) -> None:
        self._setup = setup
        self._folder = folder
        self._selector = selector
        self._mesh = mesh
        self._me = entry.number
        self._name = entry.name
        self._log = setup.multiplexer.write_message
        self._hosts: dict[int, HostEntry] = {entry.number: entry}
        self._memory = HostMemory(entry.number)
        self._state = JobState(0)
        self._job: ElasticJob | None = None
        self._workers = HostWorkers(setup, folder, selector, self._from_worker)
        self._control = ControlSocket(str(folder / "control"), self._ask_from_user, selector)
        self._replies: dict[int, Callable[[str, bool], None]] = {}
        self._asked = 0
        self._own: deque[tuple[int, Any]] = deque()  # messages to this host
        self._inbox = Inbox()
        self._election = Election(entry.number, None)
        self._view: HostView | None = None  # on which this host acts
        self._let_in_by = -1
        self._outside_ticks = 0  # since this host was let in
        self._broken: set[int] = set()  # hosts whose connection has ended since the last view
        self._states: dict[int, AgentState] = {}  # of the other hosts
        self._resumes = False  # whether the coordinator waits for those of the newest view
        self._are_held = self._wants_to_leave = False
        self._next_tick = self._next_poll = self._next_lease = 0.0
        self._over: Over | None = None
        self._checkpoint = self._saved = ""  # of this host's workers; and which is to be told
        self._sees_claims = False
        self._unreachable: tuple[int, ...] = ()  # as it was told
        self._shared = SharedFolder()
        self._unreachable_hosts = UnreachableHosts()
        self._said = ""
        self._paused_ticks = 0
        self._alone_since = math.inf
        self.signals: list[int] = []
        self.job_signals: list[int] = []
        self.requests: deque[tuple[str, int]] = deque()
        self.knows_outcome = self.has_new_reader = False
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        self._passed_on = [0, 0]
        self._to_add: set[int] = set()  # hosts that join
        self._spec = ""
        self._description: HostDescription | None = None
        self._pulse = Pulse(self._beat, lambda: setup.multiplexer.is_blocked)
        if mesh is not None:
            mesh.on_message = self._from_host
            mesh.on_link = self._from_link
            mesh.on_silence = self._say_silent

    @classmethod
    @contextmanager
    def opened(
        cls,
        setup: HostSetup,
        entry: HostEntry,
        open_mesh: Callable[[selectors.BaseSelector], Mesh] | None = None,
    ) -> Iterator[ElasticHost]:
        """A host with its own folder, selector and mesh; all are closed at the end."""
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_job_folder())
            selector = stack.enter_context(selectors.DefaultSelector())
            mesh = None if open_mesh is None else open_mesh(selector)
            if mesh is not None:
                stack.callback(mesh.close)
            host = cls(setup, entry, folder, selector, mesh)
            stack.enter_context(collect_signals(host.signals))
            stack.callback(host._control.close)
            stack.enter_context(host._workers)
            stack.enter_context(host._pulse)
            yield host

    @property
    def mesh(self) -> Mesh:
        """The connections to the other hosts."""
        assert self._mesh is not None
        return self._mesh

    @property
    def other_hosts(self) -> list[HostEntry]:
        """The other hosts that there are or have been."""
        return [host for number, host in self._hosts.items() if number != self._me]

    def found(self, hosts: Sequence[HostEntry], workers: int, spec: str = "") -> None:
        """Lead a new job on these hosts, which are all connected.

        Args:
            hosts: this one and the others.
            workers: that the job shall have.
            spec: what other hosts have to run, for those that join later.
        """
        self._add_entries(hosts)
        self._election = Election(self._me, HostView(0, self._me, (self._me,)))
        self._state = JobState(workers)
        self._spec = spec
        if self._mesh is not None:
            self._mesh.on_knock = self._let_in
        others = self._hosts.keys() - {self._me}
        for host in others:
            self._election.set_link(host, Link.CONNECTED)
        self._election.add(*others)
        self._tick_election()

    def join(self, connection: Any, welcome: Welcome) -> None:
        """Take part in a job that has let this host in, by a connection to the host that leads
        it.
        """
        self._spec = welcome.about
        self._let_in_by = welcome.leader
        self._add_entries(welcome.hosts)
        self.mesh.on_knock = self._let_in
        self.mesh.adopt(connection, welcome.leader)

    def _add_entries(self, hosts: Iterable[HostEntry]) -> None:
        self._hosts |= {host.number: host for host in hosts}
        if self._mesh is not None:
            self._mesh.add_hosts([host for host in hosts if host.number != self._me])

    def _let_in(self, knock: Knock) -> Welcome | Refused:
        """Answer a host that wants to join, or only asks what the job is."""
        leader = self._hosts.get(self._election.leader)
        if self._alone_since < math.inf:
            return Refused(WAITS_TO_JOIN)  # and will not lead: it would wait for who waits for it
        if not self._leads:
            is_known = (
                leader is not None and leader.number != self._me and self._election.is_settled
            )
            return Refused(NOBODY_LEADS, leader if is_known else None)
        if knock.host.number == ASKS:
            return Welcome("", ASKS, about=self._spec)
        try:
            self.check(knock)
        except ValueError as error:  # ConfigError is one
            return Refused(str(error))
        if self._state.is_ending or self._state.stops:
            return Refused("the job is ending")
        if self._unreachable_hosts.is_refused(knock.host.address):
            return Refused("another host of the job does not reach this one; try again later")
        assert self._view is not None
        number = max(max(self._hosts) + 1, self._view.number * _NUMBERS_A_VIEW)
        entry = msgspec.structs.replace(knock.host, number=number)
        self._add_entries([entry])
        self._to_add.add(entry.number)
        return Welcome("", entry.number, self._me, tuple(self._hosts.values()), self._spec)

    def check(self, knock: Knock) -> About:
        """Return what a host says of itself that can take part.

        Raises:
            ConfigError: it cannot, as it runs other versions.
            ValueError: its description is damaged.
        """
        about = messages.decode(knock.about, About)
        self._description = self._description or describe_host(0)
        check_compatible([self._description, about.description])
        return about

    def run(self) -> None:
        """Take part in the job until it is over.

        Raises:
            the error of the job.
        """
        while self._over is None:
            self.wait()
            self.turn()
        self._flush()
        self._workers.end()
        if self._job is not None:
            self._raise_failure(self._job)
        elif self._over.message:
            self._raise_over(self._over)

    def turn(self) -> None:
        """Do what is due, and what follows from all that has come.

        Raises:
            OutsideError: the others have gone on without this host.
        """
        self._note_ended_workers()
        self._take_signals()
        self._take_requests()
        self._tick()
        self._pump()
        self._tell_new_reader()

    def wait(self) -> None:
        """Wait for messages, for a moment at most, and take them."""
        take_turn(self._selector, _POLL_S, self._note_turn)
        self._control.tick()
        self._workers.tick()
        if self._mesh is not None:
            self._mesh.tick()

    def _note_turn(self) -> None:
        """Note that this launcher runs; if it did not for so long that the others may be without
        it, believe nothing.

        It would otherwise lead, start workers, and let them train, until it has read that the
        others have ended their connections.
        """
        self._pulse.turn()
        if self._pulse.take_lapse_s() >= _GAP_S and len(self._hosts_in_view()) > 1:
            were_held = self._are_held
            self._hold_members()
            self._election.confirm()
            if self._election.leader != self._me:
                self._are_held = (
                    were_held  # no other view follows, and they may be members again soon
                )

    def _beat(self) -> None:
        """Let workers and other hosts know that this launcher runs, while its loop waits for
        something; in a thread.
        """
        self._workers.ping()
        if self._mesh is not None:
            self._mesh.ping()

    def _say_silent(self, host: int, seconds: float) -> None:
        """Say that the launcher of another host is stopped, or hangs."""
        if host in self._hosts_in_view():
            limit = (
                " (LOCKSTEP_LAUNCHER_TIMEOUT)" if seconds == self._setup.patience.limit_s else ""
            )
            name = self._hosts[host].name
            self._log(
                f"lockstep: the launcher of host {name} has not answered for {seconds:g} s{limit}"
            )

    def _tell_new_reader(self) -> None:
        if self.has_new_reader:
            self.has_new_reader = False
            for text in self._told:
                self._log(f"lockstep: {text}")

    def _flush(self) -> None:
        """Let the last messages reach the others."""
        deadline = time.monotonic() + _FLUSH_S
        while self._mesh is not None and self._mesh.has_unsent and time.monotonic() < deadline:
            self.wait()

    def _pump(self) -> None:
        """Handle what there is to handle, until nothing is left."""
        for _ in range(1000):
            self._tick_election()
            if self._job is not None and self._leads:
                self._handle_queued()
                self._job.supervise()
                self._job.messages()
                if self._job.is_over and self._over is None:
                    self._finish(self._job)
            if not self._own:
                return
            while self._own:
                self._handle(*self._own.popleft())

    @property
    def _leads(self) -> bool:
        return self._election.leads and self._election.view is self._view and not self._resumes

    def _tick(self) -> None:
        if time.monotonic() < self._next_poll and not (self._state.is_ending or self._state.stops):
            return
        self._next_poll = time.monotonic() + _POLL_S / 2
        self._workers.supervise(self._state, self._memory.members_in_training)
        checkpoint = self._workers.newest_checkpoint()
        if checkpoint != self._checkpoint:
            self._checkpoint = self._saved = checkpoint
            self._tell_state()
        if self._mesh is not None and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK_S
            self._say_what_it_waits_for()
            self._end_if_all_others_have()
            self._tell_whom_it_does_not_reach()
            self._election.tick()
            self._outside_ticks = (
                0 if self._view is not None or not self.other_hosts else self._outside_ticks + 1
            )
            if self._outside_ticks * _TICK_S >= ALONE_S:
                self._let_in_in_vain()
        if self._mesh is not None and time.monotonic() >= self._next_lease:
            self._next_lease = time.monotonic() + _LEASE_EVERY_S
            self._renew_leases(self._memory.members)
        if self._workers.is_empty and self._me in self._state.leaving and self._over is None:
            self._log(f"lockstep: {self._name} has left the job")
            self._over = Over()
            self._job = None
        if self._election.is_outside and self._over is None:
            self._workers.end()
            raise OutsideError(f"the others went on without {self._name}, which joins them again")

    def _note_ended_workers(self) -> None:
        for end in self._workers.take_ended():
            self._memory.ended(end.number, end.code == 0 and end.is_finished)
            self._to_leader(end)

    def _take_signals(self) -> None:
        for kind, numbers in enumerate((self.signals, self.job_signals)):
            for number in numbers[self._passed_on[kind] :]:
                alone = len(self._hosts_in_view()) < 2
                stops = kind == 1 or alone or number == signal.SIGINT or self._state.stops
                is_settled = self._election.is_settled
                if not is_settled and self._view is not None and self._paused_ticks < _PAUSE_TICKS:
                    return  # the hosts may be about to agree
                self._passed_on[kind] += 1
                if not is_settled:
                    paused = "while the training was paused; nothing was saved"
                    when = (
                        paused if self._view is not None else "before this host had joined the job"
                    )
                    self._over = Over(f"stopped by {signal.Signals(number).name} {when}", number)
                    self._job = None
                    return
                self._wants_to_leave = self._wants_to_leave or not stops
                self._ask("stop" if stops else "leave", number, "", lambda text, accepted: None)

    def _take_requests(self) -> None:
        """Ask for what the launcher that was typed in asks of this host, once somebody leads who
        can answer.
        """
        while self.requests and self._election.is_settled:
            what, number = self.requests.popleft()
            if what == "leave" and len(self._hosts_in_view()) < 2:
                continue  # the others have gone in the meantime: the job stays here
            self._wants_to_leave = self._wants_to_leave or what == "leave"
            self._ask(what, number, "", lambda text, accepted: None)

    def _hosts_in_view(self) -> tuple[int, ...]:
        return self._election.view.hosts if self._election.view is not None else ()

    def _say_what_it_waits_for(self) -> None:
        """Say once that this side of a cut network does not go on; end when it has waited for too
        long.
        """
        election = self._election
        limit_s = self._setup.limits.pause_s
        is_paused = self._view is not None and not election.is_settled
        names = ", ".join(
            self._hosts[host].name for host in election.unanswered if host in self._hosts
        )
        text = (
            f"the training is paused on {self._name}, because {names} may go on"
            if is_paused and names
            else ""
        )
        if text and text != self._said:
            self._log(f"lockstep: {text}")
        self._said = text
        # in which this launcher has run
        self._paused_ticks = self._paused_ticks + 1 if is_paused else 0
        if self._paused_ticks * _TICK_S >= limit_s and self._over is None:
            others = names or "the other hosts"
            self._over = Over(
                f"the training was paused on {self._name} for {limit_s:g} s, because {others} may "
                "go on (--pause-timeout)"
            )
            self._job = None

    def _tell_whom_it_does_not_reach(self) -> None:
        if self._election.is_settled and self._unreachable != tuple(self._election.unanswered):
            self._tell_state()
        if self._job is not None and self._leads:
            self._leave_out(self._job)

    def _end_if_all_others_have(self) -> None:
        """End what this host waits for in vain: nobody is left who could tell it how the others
        have gone on.
        """
        election = self._election
        now = time.monotonic()
        waits = not election.is_settled and (election.unanswered or election.lost)
        connected = [
            host
            for host in self._hosts_in_view()
            if host != self._me and election.is_connected(host)
        ]
        # which holds up the election
        may_hang = any(self.mesh.silent_s(host) > _HUNG_S for host in connected)
        if not waits or may_hang or not self.mesh.have_ended(election.unanswered):
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, now)
        if now - self._alone_since >= ALONE_S:
            self._over = Over(describe_ended(self._name))
            self._job = None

    def _tick_election(self) -> None:
        """Send what the election has to tell, and follow what it has decided."""
        election = self._election
        if self._mesh is None and self._view is not None:
            return
        claim = election.take_claim()
        if claim is not None and election.view is not None:
            self._shared.claim(election.view.claims, claim)
        while self._shared.decided:
            election.claimed(self._shared.decided.popleft())
        for (
            host,
            message,
        ) in election.take_messages():  # before what a new view has for consequences
            self.mesh.send(host, message)
        if election.view is not None and election.view is not self._view:
            self._follow_view(election.view)
        if self._broken - set(self._state.leaving) and not election.is_settled:
            self._hold_members()
        self._resume_if_due()

    def _hold_members(self) -> None:
        """Let the members on this host leave their group at once: it is open which hosts go on.

        Who leads lets all members do so: those that follow it do not notice that it may not go on.
        """
        if self._are_held:
            return
        if self._job is not None:
            self._are_held = self._job.hold()
        own = self._memory.members_in_training
        generation = self._memory.generation + 1
        for number in own:
            self._deliver(number, Regroup(generation, at_once=True))
        self._are_held = self._are_held or bool(own)

    def _renew_leases(self, members: Iterable[int]) -> None:
        """Let members complete steps for some more seconds, if this host has just heard of the one
        that leads.

        A launcher that does not run holds nobody, and no more does one that follows it. One that
        runs again asks the others before it leads on: until they have answered, who follows it
        knows no more than while it did not run.
        """
        leader = self._election.leader
        hears = leader == self._me or self.mesh.silent_s(leader) < _HEARD_S
        if self._election.is_settled and hears and not self._election.is_vote_open:
            lease = Lease(time.monotonic() + LEASE_S)
            for number in members:
                self._workers.send(number, lease)

    def _follow_view(self, view: HostView) -> None:
        """A view of the hosts is decided: lead the job, or follow who does."""
        before = self._view
        self._view = view
        were_held = self._are_held
        self._are_held = False
        if self._mesh is not None:  # before the job has begun the launchers wait for each other
            patience = self._setup.patience
            self._mesh.warning_s = patience.warning_s
            self._mesh.launcher_limit_s = patience.limit_s
        if view.leader != self._me:
            self._broken.clear()
            self._job = None
            self._resumes = False
            self._inbox.clear()
            self._unreachable_hosts.forget()
            self._look_for_claims()
            self._repeat_requests()
            return
        if before is None:
            self._job = self._new_job(view)  # which begins with these hosts
            return
        new = [host for host in view.hosts if host not in before.hosts]
        lost = [host for host in before.hosts if host not in view.hosts]
        takes_over = self._job is None
        job = self._job = self._job or self._new_job(view)
        if takes_over:
            gone = [
                f"{self._hosts[host].name} "
                f"{'has left' if host in self._state.leaving else 'was lost'}; "
                for host in lost
                if host in self._hosts
            ]
            job.tell(f"{''.join(gone)}{self._name} coordinates the job now")
        left = [host for host in lost if host in self._state.leaving and not job.workers_on(host)]
        for host in lost if not takes_over else ():
            job.host_lost(host)
        if (takes_over or lost) and not self._election.knows_all:
            job.fence()
        self._resumes = (
            self._resumes
            or takes_over
            or were_held
            or bool(self._broken.union(lost).difference(left))
        )
        for host in new:
            self._tell_new_host(host)
        for host in new if not takes_over else ():
            self._add_to_job(job, host)
        self._broken.clear()
        self._make_shared_folder()
        self._look_for_claims()

    def _tell_state(self) -> None:
        """Send who leads all that this host knows."""
        if self._view is None:
            return
        self._unreachable = tuple(self._election.unanswered)
        state = AgentState(
            self._view.number,
            self._hosts[self._me],
            self._state,
            self._memory.report(),
            self._saved,
            self._sees_claims,
            self._unreachable,
        )
        self._send(self._view.leader, state)

    def _resume_if_due(self) -> None:
        """Let the coordinator go on with what the hosts know of their workers, as soon as all have
        told it.

        They do so at each new view; who does not is lost soon.
        """
        job = self._job
        view = self._view
        if job is None or view is None or not self._resumes or not self._election.leads:
            return
        others = [host for host in view.hosts if host != self._me]
        states = [self._states[host] for host in others if host in self._states]
        states = [state for state in states if state.view == view.number]
        if self._election.view is view and len(states) == len(others):
            self._resumes = False
            for state in states:
                if state.job.version > job.state.version:  # of which who led told that host only
                    job.state = state.job
            self._take_job_state(job.state)
            for state in states:
                self._add_to_job(job, state.host.number)
            # what a host remembers that has not heard of the newest start of all workers is of
            # earlier ones, which have all ended
            newest = [state for state in states if state.job.restarts == job.state.restarts]
            self._resume_job(job, [state.report for state in newest])

    def _add_to_job(self, job: ElasticJob, host: int) -> None:
        """Let the job have a host, unless this one has never heard where it is, which its state
        tells.
        """
        if host in self._hosts and host not in job.hosts:
            job.host_added(self._hosts[host])

    def _new_job(self, view: HostView) -> ElasticJob:
        hosts = {host: self._hosts[host] for host in view.hosts if host in self._hosts}
        others_may_join = self._mesh is not None
        return ElasticJob(
            self._setup.limits, self._state, hosts, self._send, self._log, others_may_join
        )

    def _tell_new_host(self, host: int) -> None:
        """Send a host that has joined what the others keep."""
        for message in self._memory.kept:
            self._send(host, message)
        if self._memory.view is not None:
            self._send(host, ToWorker(-1, self._memory.view))

    def _repeat_requests(self) -> None:
        """Ask who leads now for what has not been answered."""
        for number, message in self._memory.unanswered:
            self._to_leader(FromWorker(number, message))
        if self._wants_to_leave:
            self._ask("leave", 0, "", lambda text, accepted: None)

    def _resume_job(self, job: ElasticJob, reports: Sequence[HostReport]) -> None:
        """Let the coordinator go on with what the other hosts of the view have reported."""
        while self._own and isinstance(self._own[0][1], FromWorker | Ended):
            self._inbox.add(*self._own.popleft())
        self._inbox.mark(self._me)
        for host, ended in self._inbox.drop_reported():
            job.ended(host, ended)
        job.resume([self._memory.report(), *reports], self._memory.kept)
        self._repeat_requests()

    def _link_changed(self, host: int, link: Link) -> None:
        election = self._election
        if link is not Link.CONNECTED and host in self._hosts_in_view():
            self._broken.add(host)
        if link is not Link.CONNECTED and host == self._let_in_by and election.view is None:
            self._let_in_in_vain()
        election.set_link(host, link)
        if link is Link.CONNECTED and host in self._to_add:
            self._to_add.discard(host)
            election.add(host)
        if link is Link.CONNECTED and self._view is not None and host == self._view.leader:
            self._tell_state()
        if link in (Link.ENDED, Link.LOST) and self._mesh is not None:
            self._mesh.forget(host)

    def _let_in_in_vain(self) -> None:
        """The host that has let this one in was lost, or leads no more, before the others knew of
        this one.
        """
        if self.other_hosts:
            raise OutsideError(
                f"the host that let {self._name} in leads no more; {self._name} joins the others "
                "again"
            )
        raise LockstepError(f"the host that let {self._name} in was lost before the job had begun")

    def _send(self, host: int, message: HostMessages) -> None:
        if host == self._me:
            self._own.append((host, message))
        elif self._mesh is not None:
            self._mesh.send(host, message)

    def _to_leader(self, message: HostMessages) -> None:
        self._send(self._election.leader, message)

    def _from_worker(self, number: int, message: Up) -> None:
        self._memory.note_up(number, message)
        if isinstance(message, WorkerState) and message.faulty:
            self._workers.retire_device(number)
        self._to_leader(FromWorker(number, message))

    def _from_host(self, host: int, message: ElectionMessage | HostMessages) -> None:
        self._own.append((host, message))

    def _from_link(self, host: int, link: Link) -> None:
        self._own.append((host, link))  # after what has come before on that connection

    def _handle(self, host: int, message: Any) -> None:
        if isinstance(message, Link):
            self._link_changed(host, message)
        elif isinstance(message, ElectionMessage):
            self._election.receive(host, message)
        elif isinstance(message, ForLeader):
            if isinstance(message, AgentState):
                self._states[host] = message
                if host not in self._hosts:  # another host has let it in, and was lost
                    self._add_entries([message.host])
                self._inbox.mark(host)
            if isinstance(message, Ended) and host != self._me:
                message = message.without_pickle()
            self._inbox.add(host, message)
        elif host == self._election.leader or isinstance(message, Over):
            self._obey(message)

    def _handle_queued(self) -> None:
        """As the leader, handle what the hosts have sent."""
        job = self._job
        assert job is not None
        for host, message in self._inbox.take():
            match message:
                case FromWorker(number, inner):
                    job.receive(number, inner)
                case Ended():
                    job.ended(host, message)
                case Kept(worker, request):
                    job.kept(host, worker, request)
                case AgentState():
                    if message.saved:
                        job.saved(message.saved)
                    self._unreachable_hosts.note(host, message.unreachable)
                    self._note_claims_seen(job, host, message)
                case Request():
                    self._answer(job, host, message)
        if job.state.folder and not self._shared.path:
            self._make_shared_folder()
        if self._shared.path:
            job.claims_in(self._shared.path)

    def _leave_out(self, job: ElasticJob) -> None:
        """Go on without a host that another one does not reach, though this one reaches both."""
        for pair in self._unreachable_hosts.overdue(self._hosts_in_view()):
            one, other = (self._hosts[number] for number in pair)
            job.tell(
                f"{one.name} and {other.name} do not reach each other; the job goes on without "
                f"{other.name}"
            )
            self._unreachable_hosts.refuse(other.address)
            self._election.exclude(other.number)

    def _answer(self, job: ElasticJob, host: int, request: Request) -> None:
        try:
            reply = Reply(request.number, job.ask(host, request), True)
        except LockstepError as error:
            reply = Reply(request.number, str(error), False)
        self._send(host, reply)

    def _obey(self, message: HostMessages) -> None:
        match message:
            case JobState():
                self._take_job_state(message)
            case Start():
                self._memory.started(message.number, message.joins)
                self._workers.start(message)
            case Kill(numbers, gently):
                self._workers.kill(numbers, gently)
            case ToWorker(number, inner):
                self._deliver(number, inner)
            case Keep():
                self._keep(message)
            case Say(text):
                self._workers.note(text)
                self._told.append(f"{time.strftime('%H:%M:%S')} {text}")
            case Over():
                self._over = message
                self.knows_outcome = True
            case Reply(number, text, accepted):
                reply = self._replies.pop(number, None)
                if reply is not None:
                    reply(text, accepted)

    def _take_job_state(self, state: JobState) -> None:
        """Take a newer state of the job. When all workers are started again, all that this host
        remembers is of earlier ones: if it leads later, workers that join may not be given it.
        """
        if state.restarts > self._state.restarts:
            self._memory = HostMemory(self._me)
        before = self._state
        self._state = state
        self._add_entries([host for host in state.hosts if self._hosts.get(host.number) != host])
        if state.checkpoint != before.checkpoint:
            self._saved = ""  # the job knows of it, or of a newer one
        if state.claims != before.claims:
            self._look_for_claims()

    def _deliver(self, number: int, message: Any) -> None:
        self._memory.note_down(number, message)
        if number >= 0:
            if isinstance(message, View) and self._mesh is not None:
                self._renew_leases([number])
            self._workers.send(number, message)

    def _keep(self, message: Keep) -> None:
        self._memory.keep(message)
        if message.request >= 0:
            self._to_leader(Kept(message.worker, message.request))

    def _make_shared_folder(self) -> None:
        """Make a folder within that of the run, or use the one that there is, so that the
        succession can be claimed there if all hosts see it.
        """
        job = self._job
        if job is None or not job.state.folder or self._mesh is None:
            return
        view = self._election.view
        self._shared.make(Path(job.state.folder), view.claims if view is not None else "")

    def _look_for_claims(self) -> None:
        """Tell who leads whether this host sees the folder of claims, with all else."""
        self._sees_claims = bool(self._state.claims) and Path(self._state.claims).exists()
        self._tell_state()

    def _note_claims_seen(self, job: ElasticJob, host: int, state: AgentState) -> None:
        """Note whether a host sees the folder of claims: views are claimed if all do."""
        view = self._election.view
        if not self._shared.path or state.job.claims != self._shared.path:
            return  # it has not looked yet
        if state.sees_claims:
            self._shared.seen_by.add(host)
        elif view is not None and view.claims:
            self._election.set_claims("")
        if self._shared.seen_by >= job.hosts.keys() and len(job.hosts) > 1:
            self._election.set_claims(self._shared.path)

    def _ask_from_user(
        self, what: str, number: int, name: str, reply: Callable[[str, bool], None]
    ) -> None:
        if what == "address":
            reply(*self._address())
        elif what in ("resize", "remove"):
            self._ask(what, number, name, reply)
        else:
            reply(f"unknown request {what[:100]!r}", False)

    def _address(self) -> tuple[str, bool]:
        """Return how another machine joins the job, or why none can."""
        if self._mesh is None:
            return (
                "expected a job that was started with -H, --nnodes or --master-addr: this one is "
                "on one host",
                False,
            )
        own = self._mesh.own
        key = environment.job_key()
        return (
            f"{f'LOCKSTEP_JOB_KEY={key} ' * bool(key)}lockstep join {own.address}:{own.port}",
            True,
        )

    def _ask(self, what: str, count: int, name: str, reply: Callable[[str, bool], None]) -> None:
        self._asked += 1
        self._replies[self._asked] = reply
        self._to_leader(Request(self._asked, what, count, name))

    def _finish(self, job: ElasticJob) -> None:
        """Tell all hosts that the job is over, and how."""
        try:
            self._raise_failure(job)
            over = Over()
        except (LockstepError, KeyboardInterrupt) as error:
            number = error.signal_number if isinstance(error, InterruptedRunError) else 0
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else number
            over = Over(str(error) or type(error).__name__, number)
        view = self._election.view
        # a host that is cut off has to find that the others have gone on
        self._shared.leave(
            view.claims if view is not None else "", removes=self._election.knows_all
        )
        for host in job.hosts:
            self._send(host, over)

    def _raise_failure(self, job: ElasticJob) -> None:
        reports = sorted(job.reports.values(), key=lambda report: report.time)
        workers = len(job.coordinator.view) or job.state.target
        results = WorkerResults(
            reports,
            (),
            job.codes,
            list(job.state.stops),
            self._workers.killed,
            workers,
            watchdog_report=self._workers.watchdog_report,
        )
        try:
            if job.failure:
                raise LockstepError(job.failure)
            raise_failure(results)
        except LockstepError as error:
            error.checkpoint = error.checkpoint or job.state.checkpoint or job.state.resume or None
            failed = error if isinstance(error, WorkerError) else error.__cause__
            if isinstance(failed, WorkerError):
                failed.host = failed.host or job.places.get(failed.rank, "")
            raise

    def _raise_over(self, over: Over) -> None:
        if over.signal == signal.SIGINT:
            raise KeyboardInterrupt(over.message)
        if over.signal:
            raise InterruptedRunError(over.message, over.signal)
        raise LockstepError(over.message)


def describe_ended(name: str) -> str:
    """Return why a host that was cut off does not go on."""
    hint = "`lockstep run --resume` goes on from the newest checkpoint"
    return (
        f"the other hosts have ended while {name} was cut off, and may have finished; if they "
        f"have not, {hint}"
    )
