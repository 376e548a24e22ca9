"""The workers of one host of an elastic job as members of its membership: what they say is passed
on, and what they are told is remembered.

Their processes are in `elastic_workers`.
"""

from __future__ import annotations

import selectors
import time
from pathlib import Path

from ...elastic.membership import (
    LEASE_S,
    CoordinatorMessage,
    Keep,
    Lease,
    Regroup,
    Up,
    View,
    WorkerState,
)
from ...job.messages import Hello
from .elastic_workers import ElasticSetup, ElasticWorkers
from .election import Election
from .host_knowledge import HostKnowledge
from .host_messages import FromWorker, Kept, Start
from .peers import Peers

_LEASE_EVERY_S = 0.5
_HEARD_S = 1.0  # within which a launcher must have heard of the one that leads to renew a lease


class LocalMembers:
    """Stands between the workers of this host and the host that leads.

    Args:
        setup: how to run workers.
        folder: a private directory.
        selector: of the launcher's loop.
        peers: the hosts of the job.
        election: of the one that leads.
        knowledge: of this host.

    Attributes:
        workers: their processes.
    """

    def __init__(
        self,
        setup: ElasticSetup,
        folder: Path,
        selector: selectors.BaseSelector,
        peers: Peers,
        election: Election,
        knowledge: HostKnowledge,
    ) -> None:
        self.workers = ElasticWorkers(setup, folder, selector, self._receive)
        self._peers = peers
        self._election = election
        self._knowledge = knowledge
        self._next_lease = 0.0

    def start(self, message: Start) -> None:
        """Start a worker."""
        self._knowledge.memory.started(message.number, message.joins)
        self.workers.start(message)

    def deliver(self, number: int, message: CoordinatorMessage) -> None:
        """Send a message to a worker; to none if the number is -1, and remember it."""
        self._knowledge.memory.note_down(number, message)
        if number >= 0:
            if isinstance(message, View) and self._peers.mesh is not None:
                # Also one that is over: a worker that has never got a lease takes its job for one
                # on a single host, and waits for none.
                self.workers.send(number, Lease(self._lease()))
            self.workers.send(number, message)

    def keep(self, message: Keep) -> None:
        """Keep what rank 0 has sent for workers that join later; those that join just now are given
        it.
        """
        for number in self._knowledge.memory.keep(message):
            self.workers.send(number, message)
        if message.request >= 0:
            self._peers.send_to_leader(Kept(message.worker, message.request))

    def note_ended_workers(self) -> None:
        """Tell who leads which workers have ended."""
        for end in self.workers.take_ended():
            self._knowledge.memory.ended(end.number, end.code == 0 and end.is_finished)
            self._peers.send_to_leader(end)

    def repeat_requests(self) -> None:
        """Ask who leads now for what it has not answered."""
        for number, message in self._knowledge.memory.unanswered:
            self._peers.send_to_leader(FromWorker(number, message))

    def hold(self) -> bool:
        """Let the members that train leave their group at once; returns whether there are any."""
        members = self._knowledge.memory.members_in_training
        regroup = Regroup(self._knowledge.memory.generation + 1, "at once")
        for number in members:
            self.deliver(number, regroup)
        return bool(members)

    def tick(self) -> None:
        """Renew the leases of all members if it is time."""
        if self._peers.mesh is not None and time.monotonic() >= self._next_lease:
            self._next_lease = time.monotonic() + _LEASE_EVERY_S
            until = self._lease()
            if until > 0.0:
                for number in self._knowledge.memory.members:
                    self.workers.send(number, Lease(until))

    def _lease(self) -> float:
        """Return until when members may complete steps: for some more seconds, if this host has
        just heard of the one that leads; else 0.

        A launcher that does not run holds nobody, and no more does one that follows it. One that
        runs again asks the others before it leads on: until they have answered, who follows it
        knows no more than while it did not run.
        """
        election = self._election
        hears = self._peers.silent_s(election.leader) < _HEARD_S
        if election.is_settled and hears and not election.is_vote_open:
            return time.monotonic() + LEASE_S
        return 0.0

    def _receive(self, number: int, message: Up) -> None:
        """Pass on what a worker has sent."""
        memory = self._knowledge.memory
        memory.note_up(number, message)
        if isinstance(message, Hello):
            for value in memory.values_for(number):
                self.workers.send(number, value)
        if isinstance(message, WorkerState) and message.faulty:
            self.workers.retire_device(number)
        self._peers.send_to_leader(FromWorker(number, message))
