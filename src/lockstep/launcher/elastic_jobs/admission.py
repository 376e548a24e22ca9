"""How an elastic job lets other hosts in: who asks is checked, and gets a number of its own."""

from __future__ import annotations

import msgspec

from ...job.messages import HostDescription
from ..handshake import HostHello, HostRefused, HostWelcome
from ..remote_hosts.host_description import check_compatible, describe_host
from .election import Election
from .host_knowledge import HostKnowledge
from .leadership import Leadership
from .mesh import ASKS, NOBODY_LEADS, WAITS_TO_JOIN
from .peers import Peers
from .waiting import Waiting

# of hosts that are let in: who leads later may not have heard of all of them
_NUMBERS_A_VIEW = 1000


class Admission:
    """Answers the hosts that ask this one.

    Args:
        peers: the hosts of the job.
        election: of the one that leads.
        knowledge: of this host.
        leadership: of this host.
        waiting: what this host waits for.

    Attributes:
        spec: what a host that joins has to run; "" until it is known.
    """

    def __init__(
        self,
        peers: Peers,
        election: Election,
        knowledge: HostKnowledge,
        leadership: Leadership,
        waiting: Waiting,
    ) -> None:
        self.spec = ""
        self._peers = peers
        self._election = election
        self._knowledge = knowledge
        self._leadership = leadership
        self._waiting = waiting
        self._let_in: set[int] = set()  # and not connected yet
        self._description: HostDescription | None = None  # of this host

    def answer(self, hello: HostHello) -> HostWelcome | HostRefused:
        """Answer a host that wants to join, or only asks what the job is."""
        assert hello.host is not None  # which `Mesh` has seen
        peers = self._peers
        election = self._election
        if self._waiting.is_alone:
            return HostRefused(
                WAITS_TO_JOIN
            )  # and will not lead: it would wait for who waits for it
        if self._leadership.led_job is None:
            leader = peers.hosts.get(election.leader)
            is_known = leader is not None and leader.number != peers.me and election.is_settled
            return HostRefused(NOBODY_LEADS, leader if is_known else None)
        if hello.host.number == ASKS:
            return HostWelcome(spec=self.spec)
        try:
            self.check(hello)
        except ValueError as error:  # ConfigError is one
            return HostRefused(str(error))
        if self._knowledge.job.is_ending or self._knowledge.job.stops:
            return HostRefused("the job is ending")
        if self._leadership.refuses(hello.host.address):
            return HostRefused("another host of the job does not reach this one; try again later")
        assert election.view is not None
        number = max(max(peers.hosts) + 1, election.view.number * _NUMBERS_A_VIEW)
        peers.add([msgspec.structs.replace(hello.host, number=number)])
        self._let_in.add(number)
        return HostWelcome(
            number=number,
            leader=peers.me,
            hosts=tuple(peers.hosts.values()),
            spec=self.spec,
        )

    def check(self, hello: HostHello) -> None:
        """Check that a host can run what this one runs.

        Raises:
            ConfigError: it cannot, as it runs other versions.
            ValueError: it does not say which.
        """
        if hello.description is None:
            raise ValueError("expected a description of the host that wants to join")
        self._description = self._description or describe_host(0)
        check_compatible([self._description, hello.description])

    def connected(self, host: int) -> None:
        """A host is connected: if it was let in, it is to be in the next view."""
        if host in self._let_in:
            self._let_in.discard(host)
            self._election.add(host)
