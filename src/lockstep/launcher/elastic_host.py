"""One host of an elastic job: its launcher runs workers, and takes part in the decision which launcher leads."""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from .. import environment, messages
from ..elastic.control import ControlSocket
from ..elastic.membership import Change, Events, HostMemory, HostReport, Publish, Up
from ..elastic.mesh import ASKS, NOBODY_LEADS, WAITS_TO_JOIN, HostEntry, Knock, Mesh, Refused, Welcome, Wire
from ..elastic.succession import Accept, HostMessage, HostView, Key, Link, Succession
from ..errors import InterruptedRunError, LockstepError, TransportError, WorkerError
from ..interruption import collect_signals
from ..system.job_folders import temporary_job_folder
from .elastic_job import (
    Ask,
    CutOff,
    ElasticJob,
    Ended,
    ForLeader,
    FromWorker,
    HostMessages,
    Hosts,
    JobState,
    Keep,
    Kept,
    Kill,
    Look,
    Looked,
    Over,
    Replied,
    Saved,
    Start,
    Tell,
    ToWorker,
)
from .elastic_workers import HostSetup, HostWorkers
from .host_protocol import HostDescription, check_compatible, describe_host
from .pulse import Pulse
from .worker_status import WorkerResults, raise_failure

__all__ = ["ALONE_S", "About", "ElasticHost", "OutsideError", "WireMessage", "describe_ended", "run_on_one_host"]


class About(msgspec.Struct, frozen=True):
    """What a host says of itself when it knocks: `node` is the number that it wants; -1 for any."""

    description: HostDescription
    node: int = -1


WireMessage = Wire | HostMessage | HostMessages
"""All messages between the launchers of two hosts."""

_POLL_S = 0.1
_TICK_S = 1.0
_FLUSH_S = 2.0
_MOST_TOLD = 20
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
        requests: "leave" or "slots" with a number, of the launcher that was typed in; another thread may add to them.
        knows_outcome: whether the job is over for all hosts, and not only for this one.
        has_new_reader: set by another thread when somebody else reads this launcher's output from now on, who is then
            told what has happened so far.
    """

    def __init__(
        self,
        setup: HostSetup,
        entry: HostEntry,
        folder: Path,
        selector: selectors.BaseSelector,
        mesh: Mesh | None = None,
    ) -> None:
        self._setup, self._folder, self._selector, self._mesh = setup, folder, selector, mesh
        self._me, self._name = entry.number, entry.name
        self._log = setup.multiplexer.write_message
        self._hosts: dict[int, HostEntry] = {entry.number: entry}
        self._memory = HostMemory(entry.number)
        self._kept: list[tuple[int, Publish]] = []  # with the worker that has sent it
        self._events: Events | None = None
        self._state = JobState(0)
        self._job: ElasticJob | None = None
        self._workers = HostWorkers(setup, folder, selector, self._from_worker)
        self._control = ControlSocket(str(folder / "control"), self._ask_from_user, selector)
        self._replies: dict[int, Callable[[str, bool], None]] = {}
        self._asked = 0
        self._own: deque[tuple[int, Any]] = deque()  # messages to this host
        self._inbox = _Inbox()
        self._succession = Succession(entry.number, None, -1, report=self._report)
        self._agreed: HostView | None = None
        self._broken: set[int] = set()  # hosts whose connection has ended since the last view
        self._are_stopped = self._wants_to_leave = False
        self._next_tick = self._next_poll = 0.0
        self._over: Over | None = None
        self._checkpoint = ""
        self._shared = _SharedFolder()
        self._cut_off = _CutOffHosts()
        self._said = ""
        self._alone_since = math.inf
        self.signals: list[int] = []
        self.job_signals: list[int] = []
        self.requests: deque[tuple[str, int]] = deque()
        self.knows_outcome = self.has_new_reader = False
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        self._passed_on = [0, 0]
        self._to_add: set[int] = set()  # hosts that join
        self._founding: set[int] = set()  # hosts with which the job begins
        self._spec = ""
        self._description: HostDescription | None = None
        self._pulse = Pulse(self._beat, lambda: setup.multiplexer.is_blocked)
        if mesh is not None:
            mesh.on_message, mesh.on_link, mesh.on_silence = self._from_host, self._link_changed, self._say_silent
            mesh.warning_s, mesh.launcher_limit_s = setup.patience.warning_s, setup.patience.limit_s

    @classmethod
    @contextmanager
    def opened(
        cls, setup: HostSetup, entry: HostEntry, open_mesh: Callable[[selectors.BaseSelector], Mesh] | None = None
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

    # --- start --------------------------------------------------------------------------------------------------------

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
        view = HostView(0, 0, self._me, (self._me,))
        self._succession = Succession(self._me, view, self._me, report=self._report)
        self._state = JobState(workers)
        self._founding = set(self._hosts)
        self._spec = spec
        if self._mesh is not None:
            self._mesh.on_knock = self._let_in
        for host in hosts:
            if host.number != self._me:
                self._send(host.number, Hosts(tuple(self._hosts.values())))
                self._to_add.add(host.number)
                self._link_changed(host.number, Link.CONNECTED)
        self._tick_succession()

    def join(self, connection: Any, welcome: Welcome) -> None:
        """Take part in a job that has let this host in, by a connection to the host that leads it."""
        self._spec = welcome.about
        self._succession = Succession(self._me, None, -1, report=self._report)
        self._add_entries(welcome.hosts)
        self.mesh.on_knock = self._let_in
        self.mesh.adopt(connection, welcome.leader)

    def _add_entries(self, hosts: Iterable[HostEntry]) -> None:
        self._hosts |= {host.number: host for host in hosts}
        if self._mesh is not None:
            self._mesh.add_hosts([host for host in hosts if host.number != self._me])

    def _let_in(self, knock: Knock) -> Welcome | Refused:
        """Answer a host that wants to join, or only asks what the job is."""
        leader = self._hosts.get(self._succession.leader)
        if self._alone_since < math.inf:
            return Refused(WAITS_TO_JOIN)  # and will not lead: it would wait for who waits for it
        if not self._leads:
            is_known = leader is not None and leader.number != self._me and self._succession.has_leader
            return Refused(NOBODY_LEADS, leader if is_known else None)
        if knock.host.number == ASKS:
            return Welcome("", ASKS, about=self._spec)
        try:
            self.check(knock)
        except ValueError as error:  # ConfigError is one
            return Refused(str(error))
        if self._state.is_ending or self._state.stops:
            return Refused("the job is ending")
        if self._cut_off.is_refused(knock.host.address):
            return Refused("another host of the job does not reach this one; try again later")
        entry = msgspec.structs.replace(knock.host, number=max(self._hosts) + 1)
        self._add_entries([entry])
        self._to_add.add(entry.number)
        for host in self._hosts_in_view():
            if host != self._me:
                self._send(host, Hosts((entry,)))
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

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take part in the job until it is over.

        Raises:
            the error of the job.
        """
        while self._over is None:
            self.wait()
            self._note_ended_workers()
            self._take_signals()
            self._take_requests()
            self._tick()
            self._pump()
            self._tell_new_reader()
        self._flush()
        self._workers.end()
        if self._job is not None:
            self._raise_failure(self._job)
        elif self._over.message:
            self._raise_over(self._over)

    def wait(self) -> None:
        """Wait for messages, for a moment at most, and take them."""
        keys = [key for key, _ in self._selector.select(_POLL_S)]
        self._note_turn()
        for key in keys:
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.fileobj is key.fileobj:  # it may have been closed by an earlier one
                key.data()
        self._control.tick()
        self._workers.tick()
        if self._mesh is not None:
            self._mesh.tick()

    def _note_turn(self) -> None:
        """Note that this launcher runs; if it did not for so long that the others may be without it, believe nothing.

        It would otherwise lead, and start workers, until it has read that the others have ended their connections.
        """
        self._pulse.turn()
        if self._pulse.take_lapse_s() >= self._setup.patience.limit_s / 2 and self._mesh is not None:
            self._mesh.lose_all()

    def _beat(self) -> None:
        """Let workers know that this launcher runs, and others while it waits for who reads its output; in a thread."""
        self._workers.ping()
        if self._mesh is not None and self._setup.multiplexer.is_blocked:
            self._mesh.ping()

    def _say_silent(self, host: int, seconds: float) -> None:
        """Say that the launcher of another host is stopped, or hangs."""
        if host in self._hosts_in_view():
            limit = " (LOCKSTEP_LAUNCHER_TIMEOUT)" if seconds == self._setup.patience.limit_s else ""
            name = self._hosts[host].name
            self._log(f"lockstep: the launcher of host {name} has not answered for {seconds:g} s{limit}")

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
            self._tick_succession()
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
        return self._succession.is_acting and self._succession.agreed == self._agreed

    def _tick(self) -> None:
        if time.monotonic() < self._next_poll and not (self._state.is_ending or self._state.stops):
            return
        self._next_poll = time.monotonic() + _POLL_S / 2
        self._workers.supervise(self._state, self._memory.members_in_training)
        checkpoint = self._workers.newest_checkpoint()
        if checkpoint != self._checkpoint:
            self._checkpoint = checkpoint
            self._to_leader(Saved(checkpoint))
        if self._mesh is not None and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK_S
            self._say_what_it_waits_for()
            self._end_if_all_others_have()
            self._tell_whom_it_does_not_reach()
            self._succession.tick()
        if self._workers.is_empty and self._me in self._state.leaving and self._over is None:
            self._log(f"lockstep: {self._name} has left the job")
            self._over = Over()
            self._job = None
        if self._succession.is_outside and self._over is None:
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
                self._passed_on[kind] += 1
                if not self._succession.has_leader:
                    paused = "while the training was paused; nothing was saved"
                    when = paused if self._agreed is not None else "before this host had joined the job"
                    self._over = Over(f"stopped by {signal.Signals(number).name} {when}", number)
                    self._job = None
                    return
                self._wants_to_leave = self._wants_to_leave or not stops
                self._ask("stop" if stops else "leave", number, "", lambda text, accepted: None)

    def _take_requests(self) -> None:
        """Ask for what the launcher that was typed in asks of this host, once somebody leads who can answer."""
        while self.requests and self._succession.has_leader:
            what, number = self.requests.popleft()
            if what == "leave" and len(self._hosts_in_view()) < 2:
                continue  # the others have gone in the meantime: the job stays here
            self._wants_to_leave = self._wants_to_leave or what == "leave"
            self._ask(what, number, "", lambda text, accepted: None)

    def _hosts_in_view(self) -> tuple[int, ...]:
        return self._succession.agreed.hosts if self._succession.agreed is not None else ()

    def _say_what_it_waits_for(self) -> None:
        """Say once that this side of a cut network does not go on."""
        names = ", ".join(self._hosts[host].name for host in self._succession.unanswered if host in self._hosts)
        is_paused = not self._succession.has_leader and names
        text = f"lockstep: the training is paused on {self._name}, because {names} may go on" if is_paused else ""
        if text and text != self._said:
            self._log(text)
        self._said = text

    def _tell_whom_it_does_not_reach(self) -> None:
        if self._succession.has_leader and self._succession.unanswered:
            self._to_leader(CutOff(tuple(self._succession.unanswered)))

    def _end_if_all_others_have(self) -> None:
        """End what this host waits for in vain: nobody is left who could tell it how the others have gone on."""
        succession, now = self._succession, time.monotonic()
        waits = not succession.has_leader and (succession.unanswered or succession.is_superseded)
        if not waits or not self.mesh.have_ended(succession.unanswered):
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, now)
        if now - self._alone_since >= ALONE_S:
            self._over, self._job = Over(describe_ended(self._name)), None

    # --- who leads ----------------------------------------------------------------------------------------------------

    def _tick_succession(self) -> None:
        """Send what the succession has to tell, and follow what it has decided."""
        succession = self._succession
        if self._mesh is None and self._agreed is not None:
            return
        while (claim := succession.take_claim()) is not None:
            self._shared.claim(*claim)
        while self._shared.claimed:
            succession.claimed(*self._shared.claimed.popleft())
        for host, message in succession.take_messages():  # before what a new view has for consequences
            self.mesh.send(host, message)
        if succession.agreed is not self._agreed and succession.agreed is not None:
            self._follow_view(succession.agreed)
        if self._broken - set(self._state.leaving) and not succession.has_leader:
            self._stop_members()

    def _stop_members(self) -> None:
        """Let the members on this host leave their group at once: nobody leads, or it is open which hosts go on."""
        if self._are_stopped:
            return
        self._are_stopped = True
        generation = self._memory.generation + 1
        for number in self._memory.members_in_training:
            self._deliver(number, Change(generation))

    def _follow_view(self, view: HostView) -> None:
        """A view of the hosts is agreed on: lead the job, or follow who does."""
        before, self._agreed = self._agreed, view
        were_stopped, self._are_stopped = self._are_stopped, False
        if view.leader != self._me:
            self._broken.clear()
            self._job = None
            self._inbox.clear()
            self._repeat_requests()
            return
        earlier = before.hosts if before is not None else ()
        new = [host for host in view.hosts if host not in earlier]
        lost = [host for host in earlier if host not in view.hosts]
        if self._founding:
            if self._founding <= set(view.hosts):
                self._begin(view)
            return
        takes_over = self._job is None
        job = self._job = self._job or self._new_job(view)
        if takes_over:
            gone = [
                f"{self._hosts[host].name} {'has left' if host in self._state.leaving else 'was lost'}; "
                for host in lost
            ]
            job.tell(f"{''.join(gone)}{self._name} coordinates the job now")
        left = [host for host in lost if host in self._state.leaving and not job.workers_on(host)]
        for host in lost:
            job.host_lost(host)
        is_new_term = before is not None and view.term != before.term
        if takes_over or were_stopped or self._broken.union(lost).difference(left) or is_new_term:
            self._resume_job(job)
        for host in new if not takes_over else ():
            self._tell_new_host(host)
            job.host_added(self._hosts[host])
        self._broken.clear()
        self._look()

    def _new_job(self, view: HostView) -> ElasticJob:
        hosts = {host: self._hosts[host] for host in view.hosts if host in self._hosts}
        return ElasticJob(self._setup.limits, self._state, hosts, self._send, self._log)

    def _begin(self, view: HostView) -> None:
        """All hosts with which the job begins are there."""
        self._founding.clear()
        self._broken.clear()
        self._job = self._new_job(view)

    def _tell_new_host(self, host: int) -> None:
        """Send a host that has joined what the others keep."""
        for number, message in self._kept:
            self._send(host, Keep(number, message))
        if self._events is not None:
            self._send(host, Keep(-1, self._events))
        if self._memory.view is not None:
            self._send(host, ToWorker(-1, self._memory.view))

    def _repeat_requests(self) -> None:
        """Ask who leads now for what has not been answered."""
        for number, message in self._memory.unanswered:
            self._to_leader(FromWorker(number, message))
        if self._wants_to_leave:
            self._ask("leave", 0, "", lambda text, accepted: None)

    def _resume_job(self, job: ElasticJob) -> None:
        """Let the coordinator go on with what the hosts of the view have reported."""
        reports = [_decode_report(text) for host, text in self._succession.reports.items() if host != self._me]
        while self._own and isinstance(self._own[0][1], FromWorker | Ended):
            self._inbox.add(*self._own.popleft())
        self._inbox.mark(self._me)
        for host, ended in self._inbox.drop_reported():
            job.ended(host, ended)
        job.resume([self._memory.report(), *reports], self._kept, self._events)
        self._repeat_requests()

    def _link_changed(self, host: int, link: Link) -> None:
        if link is not Link.CONNECTED and host in self._hosts_in_view():
            self._broken.add(host)
        self._succession.set_link(host, link)
        if link is Link.CONNECTED and host in self._to_add:
            self._to_add.discard(host)
            self._succession.add(host)
        if link is Link.ENDED and self._mesh is not None:
            self._mesh.forget(host)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send(self, host: int, message: HostMessages) -> None:
        if host == self._me:
            self._own.append((host, message))
        elif self._mesh is not None:
            self._mesh.send(host, message)

    def _report(self) -> bytes:
        return msgspec.msgpack.encode(self._memory.report())

    def _to_leader(self, message: HostMessages) -> None:
        self._send(self._succession.leader, message)

    def _from_worker(self, number: int, message: Up) -> None:
        self._memory.note_up(number, message)
        self._to_leader(FromWorker(number, message))

    def _from_host(self, host: int, message: HostMessage | HostMessages) -> None:
        self._own.append((host, message))

    def _handle(self, host: int, message: Any) -> None:
        if isinstance(message, HostMessage):
            if isinstance(message, Accept):  # with a report
                self._inbox.mark(host)
            self._succession.receive(host, message)
        elif isinstance(message, ForLeader):
            if isinstance(message, Ended) and host != self._me:
                message = message.without_pickle()
            self._inbox.add(host, message)
        elif host == self._succession.leader or isinstance(message, Over | Hosts):
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
                case Saved(path):
                    job.saved(path)
                case Looked(path, found):
                    self._note_looked(host, path, found)
                case CutOff(hosts):
                    self._leave_out(job, host, hosts)
                case Ask():
                    self._answer(job, host, message)
        if job.state.folder and not self._shared.path:
            self._look()

    def _leave_out(self, job: ElasticJob, host: int, others: Sequence[int]) -> None:
        """Go on without a host that another one does not reach, though this one reaches both."""
        self._cut_off.note(host, others)
        for pair in self._cut_off.overdue(self._hosts_in_view()):
            one, other = (self._hosts[number] for number in pair)
            job.tell(f"{one.name} and {other.name} do not reach each other; the job goes on without {other.name}")
            self._cut_off.refuse(other.address)
            self._succession.exclude(other.number)

    def _answer(self, job: ElasticJob, host: int, request: Ask) -> None:
        try:
            reply = Replied(request.request, job.ask(host, request), True)
        except LockstepError as error:
            reply = Replied(request.request, str(error), False)
        self._send(host, reply)

    def _obey(self, message: HostMessages) -> None:
        match message:
            case JobState():
                self._state = message
            case Start():
                self._memory.started(message.number, message.joins)
                self._workers.start(message)
            case Kill(numbers, gently):
                self._workers.kill(numbers, gently)
            case ToWorker(number, inner):
                self._deliver(number, inner)
            case Keep(number, kept):
                self._keep(number, kept)
            case Hosts(hosts):
                self._add_entries(hosts)
            case Tell(text):
                self._workers.note(text)
                self._told.append(f"{time.strftime('%H:%M:%S')} {text}")
            case Look(path):
                self._to_leader(Looked(path, Path(path).exists()))
            case Over():
                self._over, self.knows_outcome = message, True
            case Replied(request, text, accepted):
                reply = self._replies.pop(request, None)
                if reply is not None:
                    reply(text, accepted)

    def _deliver(self, number: int, message: Any) -> None:
        self._memory.note_down(number, message)
        if number >= 0:
            self._workers.send(number, message)

    def _keep(self, worker_number: int, message: Publish | Events) -> None:
        if isinstance(message, Events):
            states = message.states or (self._events.states if self._events is not None else None)
            self._events = Events(message.commit, states)
        elif (worker_number, message.request) not in [(number, kept.request) for number, kept in self._kept]:
            self._kept.append((worker_number, message))
        if message.request >= 0:
            self._to_leader(Kept(worker_number, message.request))

    # --- shared storage -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out whether all hosts see the folder of the run, so that the succession can be claimed there."""
        job = self._job
        if job is None or not job.state.folder or self._mesh is None:
            return
        agreed = self._succession.agreed
        self._shared.make(Path(job.state.folder), agreed.claims if agreed is not None else "")
        for host in job.hosts:
            self._send(host, Look(self._shared.path))

    def _note_looked(self, host: int, path: str, found: bool) -> None:
        job, agreed = self._job, self._succession.agreed
        if path != self._shared.path or job is None:
            return
        if found:
            self._shared.seen_by.add(host)
        elif agreed is not None and agreed.claims:
            self._succession.set_claims("")
        if self._shared.seen_by >= job.hosts.keys() and len(job.hosts) > 1:
            self._succession.set_claims(path)

    # --- requests of users --------------------------------------------------------------------------------------------

    def _ask_from_user(self, what: str, number: int, name: str, reply: Callable[[str, bool], None]) -> None:
        if what == "address":
            reply(*self._address())
        elif what in ("resize", "remove"):
            self._ask(what, number, name, reply)
        else:
            reply(f"unknown request {what[:100]!r}", False)

    def _address(self) -> tuple[str, bool]:
        """Return how another machine joins the job, or why none can."""
        if self._mesh is None:
            return "expected a job that was started with -H, --nnodes or --master-addr: this one is on one host", False
        own, key = self._mesh.own, environment.job_key()
        return f"{f'LOCKSTEP_JOB_KEY={key} ' * bool(key)}lockstep join {own.address}:{own.port}", True

    def _ask(self, what: str, number: int, name: str, reply: Callable[[str, bool], None]) -> None:
        self._asked += 1
        self._replies[self._asked] = reply
        self._to_leader(Ask(self._asked, what, number, name))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, job: ElasticJob) -> None:
        """Tell all hosts that the job is over, and how."""
        try:
            self._raise_failure(job)
            over = Over()
        except (LockstepError, KeyboardInterrupt) as error:
            number = error.signal_number if isinstance(error, InterruptedRunError) else 0
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else number
            over = Over(str(error) or type(error).__name__, number)
        agreed = self._succession.agreed
        # a host that is cut off has to find that the others have gone on
        self._shared.leave(agreed.claims if agreed is not None else "", removes=self._succession.knows_all)
        for host in job.hosts:
            self._send(host, over)

    def _raise_failure(self, job: ElasticJob) -> None:
        if job.restart_failure:
            raise LockstepError(job.restart_failure)
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
    return f"the other hosts have ended while {name} was cut off, and may have finished; if they have not, {hint}"


class _Inbox:
    """What the hosts send to who leads, in order; it is kept while it is open which host that is."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[HostMessages]] = {}
        self._marks: dict[int, int] = {}

    def add(self, host: int, message: HostMessages) -> None:
        """Add a message from a host."""
        self._queues.setdefault(host, deque()).append(message)

    def mark(self, host: int) -> None:
        """Note that a report of this host has come, which knows of all that it has sent so far."""
        self._marks[host] = len(self._queues.get(host, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._queues.clear()

    def take(self) -> Iterator[tuple[int, HostMessages]]:
        """Yield and remove all messages."""
        self._marks.clear()
        for host, queue in self._queues.items():
            while queue:
                yield host, queue.popleft()

    def drop_reported(self) -> list[tuple[int, Ended]]:
        """Remove what workers have sent before their hosts' reports, which say it already; returns what has ended."""
        ended = []
        for host, marked in self._marks.items():
            queue = self._queues.get(host, deque())
            reported = [queue.popleft() for _ in range(min(marked, len(queue)))]
            queue.extendleft(message for message in reversed(reported) if not isinstance(message, FromWorker | Ended))
            ended += [(host, message) for message in reported if isinstance(message, Ended)]
        return ended


# --- Hosts that do not reach each other -------------------------------------------------------------------------------

_CUT_OFF_S = 5.0  # after which this host itself would have noticed that one of the two does not answer
_REPEATED_S = 3 * _TICK_S
_REFUSED_S, _MOST_REFUSED_S = 10.0, 600.0


class _CutOffHosts:
    """Which hosts say that they do not reach each other, and which are left out for that reason."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # until when, and for how long

    def note(self, host: int, others: Iterable[int]) -> None:
        """Note that a host does not reach others."""
        now = time.monotonic()
        for pair in ((host, other) for other in others):
            if now - self._last.get(pair, -math.inf) > _REPEATED_S:
                self._since[pair] = now
            self._last[pair] = now

    def overdue(self, hosts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first two of the `hosts`, in order of seniority, for which that has lasted too long, or none."""
        now = time.monotonic()
        for pair, since in self._since.items():
            if set(pair) <= set(hosts) and now - since >= _CUT_OFF_S and now - self._last[pair] <= _REPEATED_S:
                senior, junior = sorted(pair, key=hosts.index)
                return [(senior, junior)]
        return []

    def refuse(self, address: str) -> None:
        """Do not let the host at an address in again for some time, longer each time."""
        _, seconds = self._refused.get(address, (0.0, _REFUSED_S / 2))
        seconds = min(2 * seconds, _MOST_REFUSED_S)
        self._refused[address] = (time.monotonic() + seconds, seconds)

    def is_refused(self, address: str) -> bool:
        """Return whether that time is not over."""
        return time.monotonic() < self._refused.get(address, (0.0, 0.0))[0]


# --- Claims on shared storage -----------------------------------------------------------------------------------------


class _SharedFolder:
    """A folder in that of the run, where the succession is claimed if all hosts see it.

    Attributes:
        path: the folder; "" as long as there is none.
        seen_by: the hosts that see it.
        claimed: results of claims: a view, and the proposal that succeeds it.
    """

    def __init__(self) -> None:
        self.path = ""
        self.seen_by: set[int] = set()
        self.claimed: deque[tuple[HostView, Key]] = deque()

    def make(self, run: Path, existing: str) -> None:
        """Make the folder, or use the `existing` one, and ask anew who sees it."""
        self.seen_by.clear()
        self.path = self.path or existing or str(run / ".hosts" / f"job-{os.getpid()}-{time.time_ns():x}")
        with suppress(OSError):
            Path(self.path).mkdir(parents=True, exist_ok=True)

    def claim(self, view: HostView, proposal: Key) -> None:
        """Claim the succession of a view, in a thread: a server may not answer."""

        def claim() -> None:
            with suppress(OSError, ValueError):
                self.claimed.append((view, claim_succession(Path(view.claims), view, proposal)))

        threading.Thread(target=claim, name="lockstep claim", daemon=True).start()

    def leave(self, other: str, removes: bool) -> None:
        """At the end of the job, remove the folder and the `other` one that was used before."""
        for folder in {self.path, other} - {""}:
            if removes:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # there is that of another job
                Path(folder).parent.rmdir()


def claim_succession(folder: Path, view: HostView, proposal: Key) -> Key:
    """Claim on shared storage that `proposal` succeeds `view`; returns the proposal that does.

    Raises:
        OSError: the storage does not answer.
        ValueError: what is there is damaged.
    """
    path = folder / f"after-{'-'.join(map(str, view.key))}.json"
    draft = folder / f"{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    draft.write_text(json.dumps(list(proposal)))
    try:
        os.link(draft, path)  # atomic, on NFS as well
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    term, number, leader = messages.decode(path.read_text(), tuple[int, int, int])
    return term, number, leader


def _decode_report(data: bytes) -> HostReport:
    try:
        return msgspec.msgpack.decode(data, type=HostReport)
    except msgspec.DecodeError as error:
        raise TransportError(f"another host has sent a damaged report: {error}") from None
