"""The decisions of an elastic job, which the launcher that leads makes: what follows from what its
hosts and workers say, and when the job ends.

Its parts are files of their own: the workers and their places (`job_workers`), how many there are
to be (`job_size`), what the end of one means (`worker_ends`), and what is told of it (`job_news`).
What it decides goes as messages to the launchers of all hosts, its own included (`elastic_host`).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterable

from msgspec import structs

from ...elastic.membership import (
    Coordinator,
    Finish,
    HostReport,
    Keep,
    Regroup,
    Up,
    View,
    WorkerState,
)
from ...errors import LockstepError, counted
from ...job.messages import Request
from ..handshake import HostEntry
from .host_messages import Ended, HostMessages, JobState, ToWorker
from .job_news import JobNews
from .job_record import JobRecord, KeptValues
from .job_size import JobSize, Limits
from .job_workers import JobWorkers, describe_workers
from .worker_ends import JobOutcome, WorkerEnds

_MOST_RESTARTS = 3  # of all workers, one after the other, without any progress
FENCE_S = 8.0
"""Seconds after which no worker of a host that was lost completes a step: a lease, twice (see
`membership.LEASE_S`).
"""


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
        limits: of the number of workers.
        hosts: that take part, by number.
        send: sends a message to the launcher of a host.
        others_may_join: whether other hosts can join the job.
        is_over: whether the last worker has ended, and no more are to be started.
    """

    def __init__(
        self,
        limits: Limits,
        state: JobState,
        hosts: dict[int, HostEntry],
        send: Callable[[int, HostMessages], None],
        log: Callable[[str], None],
        others_may_join: bool = True,
    ) -> None:
        self.limits = limits
        self.hosts = hosts
        self.send = send
        self.is_over = False
        self.others_may_join = others_may_join
        minimum = limits.minimum
        self._record = record = JobRecord(state, hosts, send, log)
        self._workers = workers = JobWorkers(record, minimum)
        self._size = JobSize(limits, record, workers)
        self._news = JobNews(minimum, record, workers)
        self._ends = WorkerEnds(minimum, record, workers, self._news)
        self._values = KeptValues()
        self._restart_reason = ""
        self._fenced_until = -math.inf

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the membership."""
        return self._workers.coordinator

    @property
    def state(self) -> JobState:
        """The state of the job, which all hosts are told."""
        return self._record.state

    @property
    def outcome(self) -> JobOutcome:
        """Why the job ends."""
        return self._ends.outcome

    def take_over(self, state: JobState) -> None:
        """Go on from a newer state, of which only some hosts have been told."""
        self._record.state = state

    def tell(self, text: str) -> None:
        """Print what has happened, and let all hosts know."""
        self._record.tell(text)

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
        workers = self._workers
        workers.forget_members()
        self._set_fenced()  # of the new coordinator, before it gives a view
        self._values.resume(kept)
        for message in kept:
            self.coordinator.keep(message)
        self.coordinator.resume(reports)
        has_finished = any(
            number >= self.state.first for report in reports for number in report.finished
        )
        workers.living = {
            record.number: report.host for report in reports for record in report.workers
        }
        workers.killed.clear()  # what was sent before may be lost: it is sent again
        leaving = {
            record.number for report in reports for record in report.workers if record.state.leaving
        }
        workers.kill(workers.living.keys() & workers.dismissed - leaving, gently=True)
        self._news.view = self.coordinator.view
        for record in (record for report in reports for record in report.workers):
            if record.state.faulty:
                self._retire(record.number)
        for number in self.state.stops[:1]:
            self.coordinator.stop(number)
        self._record.change(
            is_ending=self.state.is_ending or has_finished,
            leaving=tuple(host for host in self.state.leaving if host in self.hosts),
        )
        self._complete_kept_values(reports, kept)

    def _complete_kept_values(self, reports: Iterable[HostReport], kept: Iterable[Keep]) -> None:
        """Send the hosts those of the values of rank 0 that they do not keep: the launcher that led
        may have sent a value to this host only, or a connection have ended before it came.
        """
        names = {report.host: report.kept for report in reports}
        for host in self.hosts:
            for message in kept:
                if not message.is_of_callbacks and message.name not in names.get(host, ()):
                    self.send(host, message)

    def host_added(self, host: HostEntry) -> None:
        """A host has joined."""
        self.hosts[host.number] = host
        self._size.use_slots(host.slots)
        self.tell(f"{host.name} joined the job")

    def host_lost(self, number: int) -> None:
        """A host has ended, or does not answer; what it ran is told to the coordinator by
        `resume`.
        """
        host = self.hosts.pop(number, None)
        lost = set(self._workers.on(number))
        if host is not None and number not in self.state.leaving:
            left = [worker for worker in self.coordinator.members if worker not in lost]
            what = f"{host.name} was lost with {describe_workers(len(lost), '', '')}"
            self._news.tell_loss(what, len(lost), len(left))
        for worker in lost:
            del self._workers.living[worker]
        for worker, request in self._values.awaited:
            self.kept(number, worker, request)
        if number in self.state.leaving:
            leaving = tuple(host for host in self.state.leaving if host != number)
            self._record.change(leaving=leaving)

    def fence(self) -> None:
        """A host was lost that may still run: for some time nobody begins without the state that it
        may have.

        Who has the state goes on at once, as the other side lacks the contributions of these
        members.
        """
        self._fenced_until = time.monotonic() + FENCE_S
        self._set_fenced()

    def _set_fenced(self) -> bool:
        """Let the coordinator know whether that time is over; returns whether it is not."""
        is_fenced = time.monotonic() < self._fenced_until
        self.coordinator.set_fenced(is_fenced)
        return is_fenced

    def hold(self) -> bool:
        """Let all members leave their group at once, as other hosts may go on; returns whether
        there are any.
        """
        members = self.coordinator.members_in_training
        regroup = Regroup(self.coordinator.generation + 1, "at once")
        for number in members:
            self.send(self._workers.living.get(number, -1), ToWorker(number, regroup))
        return bool(members)

    def workers_on(self, host: int) -> int:
        """Return the number of workers on a host."""
        return len(self._workers.on(host))

    def rank_of(self, number: int) -> int:
        """Return the rank of a worker in the newest view that has it; its number if none has."""
        return self._workers.rank_of(number)

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
            self._record.change(folder=self.coordinator.folder)
        # a host has joined before the training had begun
        if self.state.target > self.coordinator.most:
            self._record.change(target=self.coordinator.most)

    def ended(self, host: int, end: Ended) -> None:
        """Decide what the end of a worker's process means."""
        self._ends.take(host, end)

    def _retire(self, number: int) -> None:
        """Use the device of a worker that computes wrong numbers no more; the worker leaves by
        itself.
        """
        host = self._workers.living.get(number, -1)
        if host not in self.hosts:
            return
        self._workers.dismissed.add(number)
        if number in self.state.faulty:
            return
        before = self.hosts[host]
        self.hosts[host] = structs.replace(before, slots=before.slots - 1)
        # which tells of the slot as well
        self._record.change(faulty=(*self.state.faulty, number))
        self._size.fit_to_slots(host)
        self.tell(
            f"rank {self.rank_of(number)}{self._record.on_host(host)} computes wrong numbers and "
            f"leaves; its device is used no more"
        )

    def saved(self, path: str) -> None:
        """A checkpoint was saved."""
        if path != self.state.checkpoint:
            self._record.change(checkpoint=path)

    def claims_in(self, folder: str) -> None:
        """Views are to be claimed in a folder, once all hosts see it."""
        if folder != self.state.claims:
            self._record.change(claims=folder)

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
                return self._size.resize(request.count)
            case "remove":
                return self._size.remove_host(request.host)
            case "leave":
                return self._size.remove_host(host)
            case "slots":
                return self._size.set_slots(host, request.count)
            case "stop":
                self._record.change(stops=(*self.state.stops, request.count))
                self.coordinator.stop(self.state.stops[0])
                return "the job saves and ends"
        raise LockstepError(f"unknown request {request.what!r}")

    def supervise(self) -> None:
        """Do what is due: start and end workers."""
        state = self.state
        workers = self._workers
        coordinator = self.coordinator
        self._news.tell_view()
        self._news.tell_waiting()
        self._end_wait()
        while coordinator.to_keep:
            message = coordinator.to_keep.popleft()
            self._values.sent(message, self.hosts)
            for host in self.hosts:
                self.send(host, message)
        is_fenced = self._set_fenced()
        if coordinator.failure and not (state.is_ending or state.stops or self._restart_reason):
            self._restart_reason = coordinator.failure
        if self._restart_reason:
            workers.kill(workers.living)  # again after `resume`: a connection may have lost it
            if not workers.living and not is_fenced:
                self._start_again()
            return
        if state.is_ending or state.stops:
            self._dismiss_candidates()
            if time.monotonic() >= self._ends.kill_at:
                workers.kill(workers.living)
            self.is_over = not workers.living
        elif not coordinator.complete:
            for _ in range(workers.missing()):
                if not workers.start():
                    break
            coordinator.expect(len(workers.living))
            leaving = len(coordinator.leaving)
            if not coordinator.candidates and 0 < leaving == len(coordinator.members):
                self._end_without_successors()

    def messages(self) -> None:
        """Send what the coordinator has to tell."""
        for number, message in self.coordinator.take_messages():
            if isinstance(message, Finish) and message.how == "stop" and not self.state.stops:
                # nobody has asked for it: all members leave, and nobody is about to join
                self.tell("all workers leave, and no other one joins; the job saves and ends")
                self._record.change(stops=(message.number,))
            host = self._workers.living.get(number)
            if host is not None:
                self.send(host, ToWorker(number, message))
            if isinstance(message, View):
                for other in self.hosts:
                    if other != host and other not in message.hosts:
                        self.send(other, ToWorker(-1, message))

    def _dismiss_candidates(self) -> None:
        """End the workers that would join a job that is ending, and would wait for its members for
        ever.
        """
        if self.coordinator.formed >= 0:
            candidates = self.coordinator.candidates
            self._workers.dismissed.update(candidates)
            self._workers.kill(candidates)

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
            self._record.change(is_ending=True)
            self.is_over = True
            return
        resume = state.checkpoint or state.resume
        where = f"from the checkpoint {resume}" if resume else "from the beginning"
        self.tell(f"{reason}; all workers are started again, {where}")
        self._workers.begin_again()
        self._news.view = ()
        self._values.forget_waits()
        self._record.change(
            restarts=state.restarts + 1,
            fruitless=fruitless,
            progress=max(progress, state.progress),
            first=state.started,
            resume=resume,
        )

    def _end_without_successors(self) -> None:
        """Save and end if all members wait in order to leave, and no host has a slot for others."""
        self.tell("all workers leave, and no host has a slot for others; the job saves and ends")
        self._record.change(stops=(signal.SIGTERM,))
        self.coordinator.stop(signal.SIGTERM)

    def _end_wait(self) -> None:
        """Save and end when the members have waited for others for too long."""
        least = self.limits.minimum
        limit_s = self.limits.pause_s
        if not self.coordinator.waiting or self.state.stops:
            return
        slots = sum(host.slots for host in self.hosts.values())
        if slots < least and not self.others_may_join:
            self.outcome.failure = (
                f"{counted(slots, 'worker')} can run without the devices that compute wrong "
                f"numbers, fewer than the {least} that the training needs"
            )
        elif self._news.waited_s >= limit_s:
            self.outcome.failure = (
                f"fewer than {counted(least, 'worker')} for {limit_s:g} s (--pause-timeout)"
            )
        else:
            return
        self.tell(f"{self.outcome.failure}; the job saves and ends")
        self._record.change(stops=(signal.SIGTERM,))
        self.coordinator.stop(signal.SIGTERM)
