"""What a host of an elastic job knows of the job, and tells the host that leads.

Each host knows enough for any other one to lead next: who leads then puts together what all of them
tell.
"""

from __future__ import annotations

from pathlib import Path

from ...elastic.membership import HostMemory
from .election import Election, HostView
from .host_messages import AgentState, JobState
from .peers import Peers


class HostKnowledge:
    """What this host knows; its methods are what changes it.

    Args:
        peers: the hosts of the job.
        election: of the one that leads.

    Attributes:
        view: the hosts with which this one acts; None before the first view.
        job: the newest state of the job that this host has been told.
        memory: what messages have said of the workers of this host.
    """

    def __init__(self, peers: Peers, election: Election) -> None:
        self.view: HostView | None = None
        self.job = JobState(0)
        self.memory = HostMemory(peers.me)
        self._peers = peers
        self._election = election
        self._checkpoint = ""  # the newest that workers of this host have saved
        self._untold_checkpoint = ""  # the same, as long as the job knows of no newer one
        self._sees_claims = False
        self._unreachable: tuple[int, ...] = ()  # as it was told

    def tell(self) -> None:
        """Send who leads all that this host knows."""
        if self.view is None:
            return
        self._unreachable = tuple(self._election.unanswered)
        state = AgentState(
            self.view.number,
            self._peers.own_entry,
            self.job,
            self.memory.report(),
            self._untold_checkpoint,
            self._sees_claims,
            self._unreachable,
        )
        self._peers.send(self.view.leader, state)

    def take_job_state(self, state: JobState) -> None:
        """Take a newer state of the job. When all workers are started again, all that this host
        remembers is of earlier ones: if it leads later, workers that join may not be given it.
        """
        if state.restarts > self.job.restarts:
            self.memory = HostMemory(self._peers.me)
        before = self.job
        self.job = state
        known = self._peers.hosts
        self._peers.add([host for host in state.hosts if known.get(host.number) != host])
        if state.checkpoint != before.checkpoint:
            self._untold_checkpoint = ""  # the job knows of it, or of a newer one
        if state.claims != before.claims:
            self.look_for_claims()

    def note_checkpoint(self, path: str) -> None:
        """Note which checkpoint is the newest that workers of this host have saved; "" without
        one.
        """
        if path != self._checkpoint:
            self._checkpoint = self._untold_checkpoint = path
            self.tell()

    def note_unreachable_hosts(self) -> None:
        """Tell which hosts of the view this one does not reach, if these are others than before."""
        if self._election.is_settled and self._unreachable != tuple(self._election.unanswered):
            self.tell()

    def look_for_claims(self) -> None:
        """Tell who leads whether this host sees the folder of claims, with all else."""
        self._sees_claims = bool(self.job.claims) and Path(self.job.claims).exists()
        self.tell()
