"""The vote of the hosts of an elastic job on who of them leads, and on which side of a cut network
goes on (pure).

The hosts of a job agree on one **view** after another: a list of hosts, the most senior first, and
who of them leads. The launcher of that host runs the coordinator of the workers. View n + 1 is
chosen among the hosts of view n, in one of two ways, which view n names:

- by a vote, with Paxos (Lamport: The Part-Time Parliament, 1998), once for each view;
- by a file on storage that all hosts share (`claims`): who creates the file of view n + 1 decides.

Who attempts to change the view:

- who leads, when a host is lost, or joins, or when the connection to one has broken and messages
  may be lost;
- when the connection to the leader has ended: the most senior of those hosts that are connected to
  each other. Who is connected to the leader rejects all other attempts. The hosts learn of the
  leader's end within some milliseconds of each other, so that the first one is often rejected by
  one that is about to learn of it, too: that one then says that it is *free*, and the attempt is
  made again at once.

A vote has two phases. The proposer sends *prepare* with a **ballot** to the hosts of view n to
which it is connected. Each promises to accept no smaller ballot, and tells what it has accepted.
When all have promised, the proposer has the value: that of the greatest ballot that anybody has
accepted, or, if there is none, the hosts that are connected, and those that join. It sends
*accept*. A view is decided when a quorum has accepted it. All hosts of both views are told, and a
host that is not in the new view is *outside*: it may join anew. So of two sides of a cut network at
most one goes on.

A quorum is more than half of the hosts of view n. As the view changes with each host that is lost,
that would leave two hosts helpless when one of them ends. So hosts that have ended for certain do
not count, in one of two ways:

- A host has **ended** for who was connected to it and has read its connection to the end. Then all
  that it has accepted is known: it tells each host before the proposer what it accepts, and each
  connection begins with that. It does not count at all.
- A host is **lost** whose connection was reset before nothing listened at its address any more: a
  message may have been lost. It cannot accept anything from now on, but may have done so. A quorum
  is then more than half of those that are neither ended nor lost, and at least half of those that
  have not ended. Two such quorums that share no host would have to consist of one half each, and
  each of them would have to know a host of the other one as lost after that has accepted, and
  before it has accepted itself. Both cannot be.

Who has ended, or is lost, is settled when the value is chosen; any change of a link begins a new
attempt.

There is no clock: the owner calls `tick` about once a second, after which what was not answered is
tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...messages import Integer, List, Tagged
from .mesh import Link


class HostView(Tagged, frozen=True):
    """The hosts of the job at one time; as a message, the newest view that the sender knows to be
    decided.

    Attributes:
        number: increased by one with each view.
        leader: the host whose launcher coordinates the workers.
        hosts: their numbers, in order of seniority; a number is never used again.
        claims: the folder on shared storage in which the next view is decided; "" where the hosts
            vote on it.
    """

    number: Integer
    leader: Integer
    hosts: List[Integer]
    claims: str = ""


class Ballot(NamedTuple):
    """The order of the attempts to choose one view.

    Attributes:
        view: the number of the view to be chosen.
        round: greater than that of all attempts that its host knew.
        host: that makes the attempt.
    """

    view: Integer
    round: Integer
    host: Integer


class Prepare(Tagged, frozen=True):
    """Phase 1: promise to accept no smaller ballot for the view after `view`."""

    view: HostView
    ballot: Ballot


class Proposal(Tagged, frozen=True):
    """Phase 2: accept this view in this attempt; after that what a host has accepted."""

    ballot: Ballot
    view: HostView


class Promise(Tagged, frozen=True):
    """The answer to `Prepare`.

    Attributes:
        ballot: of the attempt.
        accepted: what the sender has accepted for the next view.
        ended: the hosts whose connection the sender has read to the end, each with what it had
            accepted.
        lost: those that have ended otherwise, which may have accepted more than the sender knows.
    """

    ballot: Ballot
    accepted: Proposal | None
    ended: List[tuple[Integer, Proposal | None]]
    lost: List[Integer]


class Reject(Tagged, frozen=True):
    """The sender has promised `ballot`, or follows another host."""

    ballot: Ballot


class Free(Tagged, frozen=True):
    """The sender has rejected an attempt because it followed another host, and does so no more.

    Attributes:
        view: the number of the newest view that it knows.
    """

    view: Integer


class Accepted(Tagged, frozen=True):
    """The sender has accepted a view."""

    proposal: Proposal


ElectionMessage = Prepare | Promise | Reject | Free | Proposal | Accepted | HostView
"""Between the launchers of two hosts."""

_NO_BALLOT = Ballot(0, 0, -1)
_ANSWER_TICKS = 2  # for which answers are waited for


@dataclass
class _Attempt:
    """This host's attempt to change the view.

    Attributes:
        promises: by host.
        ended, lost: the hosts that did not count, or not fully, when the value was chosen.
        proposal: the value that was chosen; None in phase 1.
        accepted_by: the hosts that have accepted it.
    """

    ballot: Ballot
    promises: dict[int, Promise] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    proposal: Proposal | None = None
    accepted_by: set[int] = field(default_factory=set)


@dataclass
class Election:
    """One host's part. Its methods are the events; `take_messages` and `take_claim` return what is
    to be done.

    Args:
        me: the number of this host.
        view: the newest view that this host knows to be decided; None for a host that joins.

    Attributes:
        is_outside: whether the others have decided on a view without this host.
    """

    me: int
    view: HostView | None
    is_outside: bool = False
    _links: dict[int, Link] = field(default_factory=dict)
    _joining: set[int] = field(default_factory=set)
    _excluded: set[int] = field(default_factory=set)
    # the claims that the next view shall have; None for those of this one
    _folder: str | None = None
    _promised: Ballot = _NO_BALLOT
    _accepted: Proposal | None = None  # for the next view
    _heard: dict[int, Proposal] = field(
        default_factory=dict
    )  # what other hosts have accepted for it
    _attempt: _Attempt | None = None
    _round: int = 0  # the greatest that was seen
    _must_confirm: bool = False
    _wait_ticks: int = 0
    # the hosts whose attempts at the next view were rejected because this host follows another one
    _rejected: set[int] = field(default_factory=set)
    _claim: HostView | None = None
    _messages: deque[tuple[int, ElectionMessage]] = field(default_factory=deque)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts of the newest view, in order of seniority; none for a host that joins."""
        return () if self.view is None else tuple(self.view.hosts)

    @property
    def leader(self) -> int:
        """The host that leads in the newest view; -1 for a host that joins."""
        return -1 if self.view is None else self.view.leader

    @property
    def leads(self) -> bool:
        """Whether this host leads, and is connected to all hosts of its view."""
        is_current = self._attempt is None and not self._must_confirm
        return (
            self.leader == self.me
            and is_current
            and not self.is_outside
            and not self._wants_another_view
        )

    @property
    def is_settled(self) -> bool:
        """Whether this host leads, or is connected to the host that does."""
        follows = self.leader not in (-1, self.me) and self.is_connected(self.leader)
        return (self.leads or follows) and not self.is_outside

    @property
    def is_vote_open(self) -> bool:
        """Whether this host has promised to take part in a vote on the next view that is not over:
        who leads may find that the others have gone on without it.
        """
        return self._promised.round > 0

    @property
    def unanswered(self) -> list[int]:
        """The hosts of the view that do not answer, or never have, and have not ended for
        certain.
        """
        return [host for host in self.hosts if host != self.me and self._link(host) is Link.SILENT]

    @property
    def lost(self) -> list[int]:
        """The hosts of the view that have ended, and of which it is not known what they have
        accepted.
        """
        return [host for host in self.hosts if self._link(host) is Link.LOST]

    @property
    def knows_all(self) -> bool:
        """Whether every host that has ever taken part is connected, or has ended for certain."""
        return Link.SILENT not in self._links.values()

    def is_connected(self, host: int) -> bool:
        """Return whether a host is connected, or this one."""
        return self._link(host) is Link.CONNECTED

    def take_messages(self) -> Iterator[tuple[int, ElectionMessage]]:
        """Yield the messages to send, each with the number of its host."""
        while self._messages:
            yield self._messages.popleft()

    def take_claim(self) -> HostView | None:
        """Return the view to be claimed in the folder of the newest view; None if there is none."""
        claim = self._claim
        self._claim = None
        return claim

    def set_link(self, host: int, link: Link) -> None:
        """What is known of a host has changed."""
        if self._links.get(host) is link:
            return
        self._links[host] = link
        if link is Link.CONNECTED:
            self._greet(host)
        else:
            self._joining.discard(host)
        if self.leader == self.me and host in self.hosts and link is not Link.CONNECTED:
            self._must_confirm = True  # what was sent to it may be lost
        if host == self.leader and link is not Link.CONNECTED:
            self._say_free()
        # other hosts count now
        self._attempt = None
        self._wait_ticks = 0
        self._consider()

    def found_job(self, others: Collection[int]) -> None:
        """Lead a new job on this host and others, which are all connected."""
        self.view = HostView(0, self.me, (self.me,))
        for host in others:
            self.set_link(host, Link.CONNECTED)
        self.add(*others)

    def add(self, *hosts: int) -> None:
        """Hosts that are connected want to join; only for who leads."""
        self._joining.update(hosts)
        self._consider()

    def exclude(self, host: int) -> None:
        """Go on without a host that is connected, but not to all others; only for who leads."""
        if self.leads and host in self.hosts and host != self.me:
            self._excluded.add(host)
            self._consider()

    def set_claims(self, folder: str) -> None:
        """Let the next views be decided in `folder`, which all hosts see, or by votes (""); only
        for who leads.
        """
        self._folder = folder
        self._consider()

    def confirm(self) -> None:
        """This host has not run for so long that the others may have another leader: it asks before
        it leads on.
        """
        if self.leader == self.me:
            self._must_confirm = True
            self._attempt = None
            self._wait_ticks = 0
            self._consider()

    def tick(self) -> None:
        """Some time has passed: try again what was not answered."""
        if self._wait_ticks > 0:
            self._wait_ticks -= 1
            return
        self._attempt = None
        self._consider()
        if self.view is not None and not self.is_settled:
            for host, link in self._links.items():
                if link is Link.CONNECTED:
                    self._send(host, self.view)  # who knows a newer one answers

    def claimed(self, winner: HostView) -> None:
        """The file of a view holds `winner`."""
        if self.view is not None and winner.number == self.view.number + 1:
            self._decide(winner)

    def receive(self, host: int, message: ElectionMessage) -> None:
        """Another host has sent a message."""
        match message:
            case Prepare(view, ballot):
                self._learn(view)
                self._answer(host, view, ballot)
            case Promise():
                self._note_promise(host, message)
            case Reject(ballot):
                self._note_rejection(ballot)
            case Free(number):
                self._try_again(number)
            case Proposal():
                self._accept(host, message)
            case Accepted(proposal):
                self._note_accepted(host, proposal)
            case HostView():
                self._tell_if_older(host, message)
                self._learn(message)

    def _link(self, host: int) -> Link:
        return Link.CONNECTED if host == self.me else self._links.get(host, Link.SILENT)

    def _greet(self, host: int) -> None:
        """Begin a connection with what its end is to have told."""
        if self.view is not None:
            self._send(host, self.view)
        if self._accepted is not None:
            self._send(host, Accepted(self._accepted))

    @property
    def _wanted_hosts(self) -> tuple[int, ...]:
        stay = [
            host for host in self.hosts if self.is_connected(host) and host not in self._excluded
        ]
        return (*stay, *sorted(host for host in self._joining if host not in self.hosts))

    @property
    def _wanted_claims(self) -> str:
        assert self.view is not None
        return self.view.claims if self._folder is None else self._folder

    @property
    def _wants_another_view(self) -> bool:
        return self.view is not None and (self._wanted_hosts, self._wanted_claims) != (
            self.hosts,
            self.view.claims,
        )

    def _consider(self) -> None:
        """Begin an attempt if this host should."""
        if self.view is None or self.is_outside or self._attempt is not None:
            return
        if self.leader == self.me:
            if self._must_confirm or self._wants_another_view:
                self._begin(self.view)
            return
        # it has been connected
        has_lost_leader = self._links.get(self.leader, Link.CONNECTED) is not Link.CONNECTED
        most_senior = next(host for host in self.hosts if self.is_connected(host))
        if has_lost_leader and most_senior == self.me:
            self._begin(self.view)

    def _send(self, host: int, message: ElectionMessage) -> None:
        self._messages.append((host, message))

    def _tell_if_older(self, host: int, view: HostView) -> None:
        if self.view is not None and view.number < self.view.number:
            self._send(host, self.view)

    def _answer(self, host: int, view: HostView, ballot: Ballot) -> None:
        self._tell_if_older(host, view)
        if self.view is None or view.number != self.view.number or self.is_outside:
            return
        follows = self.leader not in (host, self.me) and self.is_connected(self.leader)
        if follows:
            self._rejected.add(host)
        if follows or self.leads or ballot <= self._promised:
            self._send(host, Reject(self._promised))
            return
        self._promised = ballot
        self._attempt = None
        self._wait_ticks = _ANSWER_TICKS
        self._send(host, self._promise(ballot))

    def _promise(self, ballot: Ballot) -> Promise:
        ended = tuple(
            (host, self._heard.get(host)) for host in self.hosts if self._link(host) is Link.ENDED
        )
        return Promise(ballot, self._accepted, ended, tuple(self.lost))

    def _accept(self, host: int, proposal: Proposal) -> None:
        if self.view is None or self.is_outside:
            return
        if proposal.view.number != self.view.number + 1:
            # one of the two is behind, and the other one answers
            self._send(host, self.view)
        elif proposal.ballot < self._promised:
            self._send(host, Reject(self._promised))
        else:
            self._note_own(proposal)
            self._send(host, Accepted(proposal))

    def _note_own(self, proposal: Proposal) -> None:
        """Accept, and tell all hosts but the proposer, also those that do not answer: they may read
        it later.
        """
        self._promised = proposal.ballot
        self._accepted = proposal
        for host in self.hosts:
            if host not in (self.me, proposal.ballot.host):
                self._send(host, Accepted(proposal))

    def _begin(self, view: HostView) -> None:
        self._round = max(self._round, self._promised.round) + 1
        ballot = self._promised = Ballot(view.number + 1, self._round, self.me)
        self._attempt = _Attempt(ballot)
        self._wait_ticks = _ANSWER_TICKS
        # the others wait for the end of this vote, also if the reason for it has gone meanwhile
        self._must_confirm = self._must_confirm or self.leader == self.me
        for host in view.hosts:
            if host != self.me and self.is_connected(host):
                self._send(host, Prepare(view, ballot))
        self._note_promise(self.me, self._promise(ballot))

    def _note_rejection(self, ballot: Ballot) -> None:
        if self._attempt is not None and ballot.view == self._attempt.ballot.view:
            self._round = max(self._round, ballot.round)
            self._give_up()

    def _say_free(self) -> None:
        """The leader is not connected any more: tell those whose attempts were rejected for it."""
        assert self.view is not None  # there is a leader
        for host in sorted(self._rejected):
            self._send(host, Free(self.view.number))
        self._rejected.clear()

    def _try_again(self, number: int) -> None:
        """A host that has rejected an attempt at the view after `number` would not do so now."""
        if self.view is not None and number == self.view.number and self._attempt is None:
            self._wait_ticks = 0
            self._consider()

    def _give_up(self) -> None:
        """End the attempt; the more senior hosts are the first to try again."""
        self._attempt = None
        self._wait_ticks = 1 + self.hosts.index(self.me)

    def _note_promise(self, host: int, promise: Promise) -> None:
        attempt = self._attempt
        if attempt is None or promise.ballot != attempt.ballot or attempt.proposal is not None:
            return
        attempt.promises[host] = promise
        if all(other in attempt.promises for other in self.hosts if self.is_connected(other)):
            self._choose(attempt)

    def _choose(self, attempt: _Attempt) -> None:
        """All hosts that are connected have promised: choose the value, if they may decide."""
        assert self.view is not None
        promises = attempt.promises.values()
        attempt.ended = frozenset(host for promise in promises for host, _ in promise.ended)
        attempt.lost = (
            frozenset(host for promise in promises for host in promise.lost) - attempt.ended
        )
        value = HostView(self.view.number + 1, self.me, self._wanted_hosts, self._wanted_claims)
        if self.view.claims:
            self._claim = value
            return
        if not self._is_quorum(attempt.promises, attempt):
            return  # this side of a cut network pauses
        known = [promise.accepted for promise in promises] + [
            accepted for promise in promises for _, accepted in promise.ended
        ]
        newest = max(
            (accepted for accepted in known if accepted is not None),
            key=lambda accepted: accepted.ballot,
            default=None,
        )
        if newest is not None and newest.ballot > attempt.ballot:
            self._round = max(self._round, newest.ballot.round)
            self._give_up()
            return
        proposal = Proposal(attempt.ballot, value if newest is None else newest.view)
        attempt.proposal = proposal
        for host in attempt.promises:
            if host != self.me:
                self._send(host, proposal)
        self._note_own(proposal)
        self._count(self.me, attempt)

    def _note_accepted(self, host: int, proposal: Proposal) -> None:
        if self.view is None or proposal.view.number != self.view.number + 1:
            return
        if host not in self._heard or proposal.ballot > self._heard[host].ballot:
            self._heard[host] = proposal
        if self._attempt is not None and self._attempt.proposal == proposal:
            self._count(host, self._attempt)

    def _count(self, host: int, attempt: _Attempt) -> None:
        attempt.accepted_by.add(host)
        if self._is_quorum(attempt.accepted_by, attempt):
            assert attempt.proposal is not None
            self._decide(attempt.proposal.view)

    def _is_quorum(self, hosts: Iterable[int], attempt: _Attempt) -> bool:
        """Return whether so many hosts of the view may decide on the next one."""
        counted = [host for host in self.hosts if host not in attempt.ended]
        can_vote = [host for host in counted if host not in attempt.lost]
        votes = len(set(hosts).intersection(can_vote))
        return 2 * votes > len(can_vote) and 2 * votes >= len(counted)

    def _decide(self, view: HostView) -> None:
        told = {*self.hosts, *view.hosts, *self._joining} - {self.me}
        for host in sorted(told):
            self._send(host, view)
        self._learn(view)

    def _learn(self, view: HostView) -> None:
        """Adopt a decided view if it is newer."""
        is_in = self.me in view.hosts
        is_newer = is_in if self.view is None else view.number > self.view.number
        if not is_newer or self.is_outside:
            return  # or this host joins, and has not been let in yet
        self.view = view
        self.is_outside = not is_in
        self._promised = Ballot(view.number + 1, 0, -1)
        self._accepted = None
        self._heard.clear()
        self._rejected.clear()
        self._attempt = None
        self._claim = None
        self._round = self._wait_ticks = 0
        self._must_confirm = False
        self._joining -= set(view.hosts)
        self._excluded.clear()
        if view.leader != self.me:
            self._joining.clear()
            self._folder = None
        self._consider()
