"""The launcher of one host of an elastic job, while the job runs: its loop, in which it takes what
has come and does what is due.

How a host comes to take part in a job is in `elastic_node`.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...elastic.membership import Keep
from ...errors import InterruptedRunError, LockstepError
from ...interruption import collect_signals
from ...job.connection import take_turn
from ...job.messages import JobEnd, Reply, Say
from ...system.job_folders import temporary_job_folder
from ..handshake import HostEntry, HostWelcome
from ..pulse import Pulse
from .admission import Admission
from .claims import SharedFolder
from .elastic_workers import ElasticSetup
from .election import Election, ElectionMessage, HostView
from .host_knowledge import HostKnowledge
from .host_messages import ForLeader, HostMessages, JobState, Kill, Start, ToWorker
from .leadership import Leadership
from .local_members import LocalMembers
from .mesh import Link, Mesh
from .peers import Peers
from .user_requests import UserRequests
from .waiting import TICK_S, OutsideError, Waiting

__all__ = ["ElasticHost", "run_on_one_host"]

_POLL_S = 0.1
_FLUSH_S = 2.0
# less than a lease, which a launcher that has not run must not renew before it knows who leads
_GAP_S = 2.0
_MOST_TOLD = 20


def run_on_one_host(setup: ElasticSetup) -> None:
    """Run an elastic job on this host alone, which no other one can join.

    Raises:
        as `FixedHost.run`.
    """
    entry = HostEntry(0, socket.gethostname(), "", 0, setup.limits.maximum)
    try:
        with ElasticHost.opened(setup, entry) as host:
            host.found_job([entry], setup.options.workers)
            host.run()
    finally:
        setup.multiplexer.close()


class ElasticHost:
    """This host, from its start to the end of the job.

    Args:
        setup: how to run workers.
        entry: this host.
        folder: a private directory.
        selector: of this launcher's loop.
        mesh: the connections to the other hosts; None for a job on one host.

    Attributes:
        user: what users ask of this host.
        admission: of hosts that join.
        knows_outcome: whether the job is over for all hosts, and not only for this one.
        has_new_reader: set by another thread when somebody else reads this launcher's output from
            now on, who is then told what has happened so far.
    """

    def __init__(
        self,
        setup: ElasticSetup,
        entry: HostEntry,
        folder: Path,
        selector: selectors.BaseSelector,
        mesh: Mesh | None = None,
    ) -> None:
        self.knows_outcome = False
        self.has_new_reader = False
        self._setup = setup
        self._selector = selector
        self._log = setup.multiplexer.write_message
        self._election = election = Election(entry.number, None)
        self._peers = peers = Peers(entry, election, mesh)
        self._knowledge = knowledge = HostKnowledge(peers, election)
        self._members = LocalMembers(setup, folder, selector, peers, election, knowledge)
        self._workers = self._members.workers
        self.user = UserRequests(folder, selector, peers, election, knowledge)
        self._shared = SharedFolder()
        self._leadership = Leadership(
            setup.limits, self._log, peers, election, knowledge, self._workers, self._shared
        )
        self._waiting = Waiting(self._log, setup.limits.pause_s, peers, election, knowledge)
        self.admission = Admission(peers, election, knowledge, self._leadership, self._waiting)
        self._pulse = Pulse(self._beat, lambda: setup.multiplexer.is_blocked)
        self._broken: set[int] = set()  # hosts whose connection has ended since the last view
        self._are_members_held = False  # since the last view
        self._next_poll = 0.0
        self._next_tick = 0.0
        self._over: JobEnd | None = None
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        if mesh is not None:
            mesh.on_silence = self._say_silent

    @classmethod
    @contextmanager
    def opened(
        cls,
        setup: ElasticSetup,
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
            stack.enter_context(collect_signals(host.user.signals))
            stack.callback(host.user.close)
            stack.enter_context(host._workers)
            stack.enter_context(host._pulse)
            yield host

    @property
    def mesh(self) -> Mesh:
        """The connections to the other hosts."""
        assert self._peers.mesh is not None
        return self._peers.mesh

    @property
    def other_hosts(self) -> list[HostEntry]:
        """The other hosts that there are or have been."""
        return self._peers.others

    def found_job(self, hosts: Sequence[HostEntry], workers: int, spec: str = "") -> None:
        """Lead a new job on these hosts, which are all connected.

        Args:
            hosts: this one and the others.
            workers: that the job shall have.
            spec: what other hosts have to run, for those that join later.
        """
        self._peers.add(hosts)
        self._knowledge.job = JobState(workers)
        self.admission.spec = spec
        if self._peers.mesh is not None:
            self._peers.mesh.on_hello = self.admission.answer
        self._election.found_job(self._peers.hosts.keys() - {self._peers.me})
        self._follow_election()

    def call_off(self, reason: str) -> None:
        """Tell the hosts that were let in for a new job why it does not begin."""
        for host in self.mesh.hosts:
            self.mesh.send(host, JobEnd(reason))
        self._flush()

    def join(self, connection: Any, welcome: HostWelcome) -> None:
        """Take part in a job that has let this host in, by a connection to the host that leads
        it.
        """
        self.admission.spec = welcome.spec
        self._waiting.let_in_by = welcome.leader
        self._peers.add(welcome.hosts)
        self.mesh.on_hello = self.admission.answer
        self.mesh.adopt(connection, welcome.leader)

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
        if self._leadership.job is not None:
            self._leadership.raise_failure(self._leadership.job)
        elif self._over.signal == signal.SIGINT:
            raise KeyboardInterrupt(self._over.reason)
        elif self._over.signal and self._over.reason:
            raise InterruptedRunError(self._over.reason, self._over.signal)
        elif self._over.reason:
            raise LockstepError(self._over.reason)

    def turn(self) -> None:
        """Do what is due, and what follows from all that has come.

        Raises:
            OutsideError: the others have gone on without this host.
        """
        self._members.note_ended_workers()
        over = self.user.take_signals(gives_up=self._waiting.has_paused)
        if over is not None:
            self._end(over)
        self.user.take_requests()
        self._tick()
        self._pump()
        # who leads may have asked, in what was read just now, whether it still does
        self._members.tick()
        if self.has_new_reader:
            self.has_new_reader = False
            for text in self._told:
                self._log(f"lockstep: {text}")

    def wait(self) -> None:
        """Wait for messages, for a moment at most, and take them."""
        take_turn(self._selector, _POLL_S, self._note_turn)
        self.user.tick()
        self._workers.tick()
        if self._peers.mesh is not None:
            self._peers.mesh.tick()

    def _note_turn(self) -> None:
        """Note that this launcher runs; if it did not for so long that the others may be without
        it, believe nothing.

        It would otherwise lead, start workers, and let them train, until it has read that the
        others have ended their connections. That it asks is the first thing that the others hear:
        a ping before it would let those that follow this one renew leases.
        """
        if self._pulse.take_lapse_s() >= _GAP_S and len(self._election.hosts) > 1:
            were_held = self._are_members_held
            self._election.confirm()
            self._send_of_election()
            self._hold_members()
            if self._election.leader != self._peers.me:
                # no other view follows, and they may be members again soon
                self._are_members_held = were_held
        self._pulse.turn()

    def _beat(self) -> None:
        """Let workers and other hosts know that this launcher runs, while its loop waits for
        something; in a thread.
        """
        self._workers.ping()
        if self._peers.mesh is not None:
            self._peers.mesh.ping()

    def _say_silent(self, host: int, seconds: float) -> None:
        """Say that the launcher of another host is stopped, or hangs."""
        if host in self._election.hosts:
            name = self._peers.hosts[host].name
            limit = ""
            if seconds == self._setup.patience.limit_s:
                limit = " (LOCKSTEP_LAUNCHER_TIMEOUT)"
            self._log(
                f"lockstep: the launcher of host {name} has not answered for {seconds:g} s{limit}"
            )

    def _flush(self) -> None:
        """Let the last messages reach the others."""
        mesh = self._peers.mesh
        deadline = time.monotonic() + _FLUSH_S
        while mesh is not None and mesh.has_unsent and time.monotonic() < deadline:
            self.wait()

    def _end(self, over: JobEnd) -> None:
        """End the part of this host, whatever becomes of the job."""
        self._over = over
        self._leadership.resign()

    def _pump(self) -> None:
        """Handle what there is to handle, until nothing is left."""
        leadership = self._leadership
        queue = self._peers.queue
        for _ in range(1000):
            self._follow_election()
            job = leadership.led_job
            if job is not None:
                leadership.act(job)
                if job.is_over and self._over is None:
                    leadership.finish(job)
            if not queue:
                return
            while queue:
                self._handle(*queue.popleft())

    def _tick(self) -> None:
        """Do what is due by the clock.

        Raises:
            OutsideError: the others have gone on without this host.
        """
        job = self._knowledge.job
        now = time.monotonic()
        if now < self._next_poll and not (job.is_ending or job.stops):
            return
        self._next_poll = now + _POLL_S / 2
        self._workers.supervise(job, self._knowledge.memory.members_in_training)
        self._knowledge.note_checkpoint(self._workers.newest_checkpoint())
        if self._peers.mesh is not None and now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick_hosts()
        if self._workers.is_empty and self._peers.me in job.leaving and self._over is None:
            self._log(f"lockstep: {self._peers.own_entry.name} has left the job")
            self._end(JobEnd())
        if self._election.is_outside and self._over is None:
            self._workers.end()
            name = self._peers.own_entry.name
            raise OutsideError(f"the others went on without {name}, which joins them again")

    def _tick_hosts(self) -> None:
        """Do what is due once a second in a job on several hosts."""
        over = self._waiting.tick()
        if over is not None:
            self._end(over)
        self._knowledge.note_unreachable_hosts()
        if self._leadership.led_job is not None:
            self._leadership.leave_out_unreachable(self._leadership.led_job)
        self._election.tick()
        self._waiting.tick_outside()

    def _follow_election(self) -> None:
        """Send what the election has to tell, and follow what it has decided."""
        election = self._election
        if self._peers.mesh is None and self._knowledge.view is not None:
            return
        claim = election.take_claim()
        if claim is not None and election.view is not None:
            self._shared.claim(election.view.claims, claim)
        while self._shared.decided:
            election.claimed(self._shared.decided.popleft())
        self._send_of_election()  # before what a new view has for consequences
        if election.view is not None and election.view is not self._knowledge.view:
            self._follow_view(election.view)
        if self._broken - set(self._knowledge.job.leaving) and not election.is_settled:
            self._hold_members()
        if self._leadership.resume_if_due():
            self._repeat_requests()

    def _send_of_election(self) -> None:
        """Send what the election has to tell."""
        for host, message in self._election.take_messages():
            self.mesh.send(host, message)

    def _follow_view(self, view: HostView) -> None:
        """A view of the hosts is decided: lead the job, or follow who does."""
        before = self._knowledge.view
        self._knowledge.view = view
        were_held = self._are_members_held
        self._are_members_held = False
        if self._peers.mesh is not None:  # before the job the launchers wait for each other
            self._peers.mesh.silence.patience = self._setup.patience
        if view.leader != self._peers.me:
            self._leadership.resign()
            self._knowledge.look_for_claims()
            self._repeat_requests()
        elif before is None:
            self._leadership.begin(view)
        else:
            self._leadership.follow_view(before, view, self._broken, were_held)
            self._knowledge.look_for_claims()
        self._broken.clear()

    def _repeat_requests(self) -> None:
        """Ask who leads now for what has not been answered."""
        self._members.repeat_requests()
        self.user.repeat()

    def _hold_members(self) -> None:
        """Let the members on this host leave their group at once: it is open which hosts go on.

        Who leads lets all members do so: those that follow it do not notice that it may not go on.
        """
        if not self._are_members_held:
            job = self._leadership.job
            are_all_held = job is not None and job.hold()
            self._are_members_held = self._members.hold() or are_all_held

    def _handle(self, host: int, message: Any) -> None:
        """Take what a host has sent, or a change of what is known of it."""
        if isinstance(message, Link):
            self._link_changed(host, message)
        elif isinstance(message, ElectionMessage):
            self._election.receive(host, message)
        elif isinstance(message, ForLeader):
            self._leadership.receive(host, message)
        elif host == self._election.leader or isinstance(message, JobEnd):
            self._obey(message)

    def _link_changed(self, host: int, link: Link) -> None:
        """Take a change of what is known of another host."""
        is_connected = link is Link.CONNECTED
        if not is_connected:
            if host in self._election.hosts:
                self._broken.add(host)
            self._waiting.disconnected(host)
        self._election.set_link(host, link)
        if is_connected:
            self.admission.connected(host)
            view = self._knowledge.view
            if view is not None and host == view.leader:
                self._knowledge.tell()
        if link in (Link.ENDED, Link.LOST):
            self.mesh.forget(host)

    def _obey(self, message: HostMessages) -> None:
        """Do what the host that leads says."""
        match message:
            case JobState():
                self._knowledge.take_job_state(message)
            case Start():
                self._members.start(message)
            case Kill(numbers, gently):
                self._workers.kill(numbers, gently)
            case ToWorker(number, inner):
                self._members.deliver(number, inner)
            case Keep():
                self._members.keep(message)
            case Say(text):
                self._workers.note(text)
                self._told.append(f"{time.strftime('%H:%M:%S')} {text}")
            case JobEnd():
                self._over = message
                self.knows_outcome = True
            case Reply():
                self.user.take_reply(message)
