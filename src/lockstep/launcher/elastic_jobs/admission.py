"""How an elastic job lets other hosts in: who knocks is checked, and gets a number of its own."""

from __future__ import annotations

import msgspec

from ... import messages
from ...job.messages import HostDescription
from ..remote_hosts.host_description import check_compatible, describe_host
from .election import Election
from .host_knowledge import HostKnowledge
from .leadership import Leadership
from .mesh import ASKS, NOBODY_LEADS, WAITS_TO_JOIN, Knock, Refused, Welcome
from .peers import Peers
from .waiting import Waiting

# of hosts that are let in: who leads later may not have heard of all of them
_NUMBERS_A_VIEW = 1000


class About(msgspec.Struct, frozen=True):
    """What a host says of itself when it knocks: `node` is the number that it wants; -1 for any."""

    description: HostDescription
    node: int = -1


class Admission:
    """Answers the hosts that knock at this one.

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

    def answer(self, knock: Knock) -> Welcome | Refused:
        """Answer a host that wants to join, or only asks what the job is."""
        peers = self._peers
        election = self._election
        if self._waiting.is_alone:
            return Refused(WAITS_TO_JOIN)  # and will not lead: it would wait for who waits for it
        if self._leadership.led_job is None:
            leader = peers.hosts.get(election.leader)
            is_known = leader is not None and leader.number != peers.me and election.is_settled
            return Refused(NOBODY_LEADS, leader if is_known else None)
        if knock.host.number == ASKS:
            return Welcome("", ASKS, about=self.spec)
        try:
            self.check(knock)
        except ValueError as error:  # ConfigError is one
            return Refused(str(error))
        if self._knowledge.job.is_ending or self._knowledge.job.stops:
            return Refused("the job is ending")
        if self._leadership.refuses(knock.host.address):
            return Refused("another host of the job does not reach this one; try again later")
        assert election.view is not None
        number = max(max(peers.hosts) + 1, election.view.number * _NUMBERS_A_VIEW)
        peers.add([msgspec.structs.replace(knock.host, number=number)])
        self._let_in.add(number)
        return Welcome("", number, peers.me, tuple(peers.hosts.values()), self.spec)

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

    def connected(self, host: int) -> None:
        """A host is connected: if it was let in, it is to be in the next view."""
        if host in self._let_in:
            self._let_in.discard(host)
            self._election.add(host)
