"""What the host that leads an elastic job does: it lets the decisions of the job (`elastic_job`)
follow from what all hosts send, and begins to lead with what they know.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ...elastic.membership import HostReport
from ...errors import InterruptedRunError, LockstepError, WorkerError
from ...job.messages import JobEnd, Reply, Request
from ..worker_status import WorkerResults, raise_failure
from .claims import SharedFolder
from .elastic_job import ElasticJob
from .elastic_workers import ElasticWorkers
from .election import Election, HostView
from .host_knowledge import HostKnowledge
from .host_messages import AgentState, Ended, ForLeader, FromWorker, Kept, ToWorker
from .job_size import Limits
from .other_hosts import Inbox, UnreachableHosts
from .peers import Peers


class Leadership:
    """The part of a host that leads, or may have to at any time.

    Args:
        limits: of the number of workers.
        log: prints a message of the job.
        peers: the hosts of the job.
        election: of the one that leads.
        knowledge: of this host.
        workers: of this host.
        shared: the folder in which views are claimed.

    Attributes:
        job: decides on the workers; None as long as another host leads.
    """

    def __init__(
        self,
        limits: Limits,
        log: Callable[[str], None],
        peers: Peers,
        election: Election,
        knowledge: HostKnowledge,
        workers: ElasticWorkers,
        shared: SharedFolder,
    ) -> None:
        self.job: ElasticJob | None = None
        self._limits = limits
        self._log = log
        self._peers = peers
        self._election = election
        self._knowledge = knowledge
        self._workers = workers
        self._shared = shared
        self._inbox = Inbox()
        self._states: dict[int, AgentState] = {}  # of the other hosts
        self._resumes = False  # whether it waits for those of the newest view
        self._unreachable = UnreachableHosts()

    @property
    def led_job(self) -> ElasticJob | None:
        """The job, if this host leads it and knows all that the hosts of its view do; else None."""
        is_current = self._election.leads and self._election.view is self._knowledge.view
        return self.job if is_current and not self._resumes else None

    def refuses(self, address: str) -> bool:
        """Return whether the host at an address is not let in for some time, as another one does
        not reach it.
        """
        return self._unreachable.is_refused(address)

    def receive(self, host: int, message: ForLeader) -> None:
        """Take what a host sends to who leads, which may not be known yet."""
        if isinstance(message, AgentState):
            self._states[host] = message
            if host not in self._peers.hosts:  # another host has let it in, and was lost
                self._peers.add([message.host])
            self._inbox.mark(host)
        if isinstance(message, Ended) and host != self._peers.me:
            message = message.without_pickle()
        self._inbox.add(host, message)

    def resign(self) -> None:
        """Another host leads, or the part of this one is over."""
        self.job = None
        self._resumes = False
        self._inbox.clear()
        self._unreachable.forget()

    def begin(self, view: HostView) -> None:
        """Lead a new job, on the hosts of its first view."""
        self.job = self._new_job(view)

    def follow_view(
        self, before: HostView, view: HostView, broken: Collection[int], were_held: bool
    ) -> None:
        """A view is decided in which this host leads: go on, or begin to lead.

        Args:
            before: the view with which this host acted until now.
            view: the new one.
            broken: hosts of the view before whose connections have ended.
            were_held: whether members were told to leave their group meanwhile.
        """
        leaving = self._knowledge.job.leaving
        hosts = self._peers.hosts
        new = [host for host in view.hosts if host not in before.hosts]
        lost = [host for host in before.hosts if host not in view.hosts]
        takes_over = self.job is None
        job = self.job = self.job or self._new_job(view)
        if takes_over:
            gone = [
                f"{hosts[host].name} {'has left' if host in leaving else 'was lost'}; "
                for host in lost
                if host in hosts
            ]
            job.tell(f"{''.join(gone)}{self._peers.own_entry.name} coordinates the job now")
        left = [host for host in lost if host in leaving and not job.workers_on(host)]
        for host in lost if not takes_over else ():
            job.host_lost(host)
        if (takes_over or lost) and not self._election.knows_all:
            job.fence()
        unknown = {*broken, *lost}.difference(left)
        self._resumes = self._resumes or takes_over or were_held or bool(unknown)
        for host in new:
            self._tell_new_host(host)
        for host in new if not takes_over else ():
            self._add_to_job(job, host)
        self._make_shared_folder(job)

    def _new_job(self, view: HostView) -> ElasticJob:
        """Return the decisions of a job on the hosts of a view, from the state that was told."""
        known = self._peers.hosts
        hosts = {host: known[host] for host in view.hosts if host in known}
        others_may_join = self._peers.mesh is not None
        state = self._knowledge.job
        return ElasticJob(self._limits, state, hosts, self._peers.send, self._log, others_may_join)

    def _add_to_job(self, job: ElasticJob, host: int) -> None:
        """Let the job have a host, unless this one has never heard where it is, which its state
        tells.
        """
        if host in self._peers.hosts and host not in job.hosts:
            job.host_added(self._peers.hosts[host])

    def _tell_new_host(self, host: int) -> None:
        """Send a host that has joined what the others keep."""
        memory = self._knowledge.memory
        for message in memory.kept:
            self._peers.send(host, message)
        if memory.view is not None:
            self._peers.send(host, ToWorker(-1, memory.view))

    def resume_if_due(self) -> bool:
        """Let the coordinator go on with what the hosts know of their workers, as soon as all have
        told it; returns whether it does.

        They do so at each new view; who does not is lost soon.
        """
        job = self.job
        view = self._knowledge.view
        if job is None or view is None or not self._resumes or not self._election.leads:
            return False
        others = [host for host in view.hosts if host != self._peers.me]
        states = [self._states[host] for host in others if host in self._states]
        states = [state for state in states if state.view == view.number]
        if self._election.view is not view or len(states) < len(others):
            return False
        self._resumes = False
        for state in states:
            if state.job.version > job.state.version:  # of which who led told that host only
                job.take_over(state.job)
        self._knowledge.take_job_state(job.state)
        for state in states:
            self._add_to_job(job, state.host.number)
        # what a host remembers that has not heard of the newest start of all workers is of earlier
        # ones, which have all ended
        newest = [state for state in states if state.job.restarts == job.state.restarts]
        self._resume(job, [state.report for state in newest])
        return True

    def _resume(self, job: ElasticJob, reports: Sequence[HostReport]) -> None:
        """Let the coordinator go on with what the other hosts of the view have reported."""
        queue = self._peers.queue
        while queue and isinstance(queue[0][1], FromWorker | Ended):
            self._inbox.add(*queue.popleft())
        self._inbox.mark(self._peers.me)
        for host, ended in self._inbox.drop_reported():
            job.ended(host, ended)
        memory = self._knowledge.memory
        job.resume([memory.report(), *reports], memory.kept)

    def act(self, job: ElasticJob) -> None:
        """Handle what the hosts have sent, and do what is due."""
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
                    self._unreachable.note(host, message.unreachable)
                    self._note_claims_seen(job, host, message)
                case Request():
                    self._answer(job, host, message)
        if job.state.folder and not self._shared.path:
            self._make_shared_folder(job)
        if self._shared.path:
            job.claims_in(self._shared.path)
        job.supervise()
        job.messages()

    def _answer(self, job: ElasticJob, host: int, request: Request) -> None:
        """Do what a user asks for at a host, and let that host say what is done."""
        try:
            reply = Reply(request.number, job.ask(host, request), True)
        except LockstepError as error:
            reply = Reply(request.number, str(error), False)
        self._peers.send(host, reply)

    def leave_out_unreachable(self, job: ElasticJob) -> None:
        """Go on without a host that another one does not reach, though this one reaches both."""
        hosts = self._election.hosts
        for pair in self._unreachable.overdue(hosts):
            one, other = (self._peers.hosts[number] for number in pair)
            job.tell(
                f"{one.name} and {other.name} do not reach each other; the job goes on without "
                f"{other.name}"
            )
            self._unreachable.refuse(other.address)
            self._election.exclude(other.number)

    def _make_shared_folder(self, job: ElasticJob) -> None:
        """Make a folder within that of the run, or use the one that there is, so that the
        succession can be claimed there if all hosts see it.
        """
        if job.state.folder and self._peers.mesh is not None:
            self._shared.make(Path(job.state.folder), self._claims)

    @property
    def _claims(self) -> str:
        """The folder in which the next view is claimed; "" if there is none."""
        view = self._election.view
        return view.claims if view is not None else ""

    def _note_claims_seen(self, job: ElasticJob, host: int, state: AgentState) -> None:
        """Note whether a host sees the folder of claims: views are claimed if all do."""
        if not self._shared.path or state.job.claims != self._shared.path:
            return  # it has not looked yet
        if state.sees_claims:
            self._shared.seen_by.add(host)
        elif self._claims:
            self._election.set_claims("")
        if self._shared.seen_by >= job.hosts.keys() and len(job.hosts) > 1:
            self._election.set_claims(self._shared.path)

    def finish(self, job: ElasticJob) -> None:
        """Tell all hosts that the job is over, and how."""
        try:
            self.raise_failure(job)
            over = JobEnd()
        except (LockstepError, KeyboardInterrupt) as error:
            number = error.signal_number if isinstance(error, InterruptedRunError) else 0
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else number
            over = JobEnd(str(error) or type(error).__name__, number)
        # a host that is cut off has to find that the others have gone on
        self._shared.leave(self._claims, removes=self._election.knows_all)
        for host in job.hosts:
            self._peers.send(host, over)

    def raise_failure(self, job: ElasticJob) -> None:
        """Raise the error of a job that is over, if there is one."""
        reports = sorted(job.outcome.reports.values(), key=lambda report: report.time)
        workers = len(job.coordinator.view) or job.state.target
        results = WorkerResults(
            reports,
            (),
            job.outcome.codes,
            list(job.state.stops),
            self._workers.killed,
            workers,
            watchdog_report=self._workers.watchdog_report,
        )
        try:
            if job.outcome.failure:
                raise LockstepError(job.outcome.failure)
            raise_failure(results)
        except LockstepError as error:
            error.checkpoint = error.checkpoint or job.state.checkpoint or job.state.resume or None
            failed = error if isinstance(error, WorkerError) else error.__cause__
            if isinstance(failed, WorkerError):
                failed.host = failed.host or job.outcome.places.get(failed.rank, "")
            raise
