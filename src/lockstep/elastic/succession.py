"""Which host coordinates an elastic job, and which side of a cut network goes on (pure).

The hosts of a job agree on one **host view** after another: a list of hosts, in order of seniority. The host that
proposed the newest one leads: its launcher runs the coordinator of the workers. When a host is lost, the leader
proposes a view without it; when the leader is lost, the most senior of the others proposes one, in a higher term. A
proposal is agreed on when all of its hosts have accepted it, and they are a quorum of each view that it may succeed:

- all hosts of that view, or the one side that has claimed its succession by a file on storage that all hosts share;
- where they share none: more than half of them, or of those that have not ended for certain. A host that has ended may
  have accepted another proposal before, so each host tells all others what it accepts, and who counts a host as ended
  needs a quorum of what that host had accepted, too.

So of two sides of a cut network at most one goes on. A host accepts only what is newer than all that it has accepted,
nothing from a stranger while its leader is connected, and tells the proposer what it knows. Terms and numbers of views
play the same part as in Raft (Ongaro, Ousterhout: In Search of an Understandable Consensus Algorithm, 2014).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from ..messages import Integer, List, Tagged

__all__ = ["Accept", "Agreed", "HostMessage", "HostView", "Link", "Outside", "Propose", "Reject", "Succession"]

Key = tuple[int, int, int]
"""The order of host views: (term, number, leader)."""


class HostView(msgspec.Struct, frozen=True, array_like=True):
    """The hosts of the job at one time.

    Attributes:
        term: increased by each host that takes over.
        number: increased by each view.
        leader: the host that has proposed it.
        hosts: their numbers, in order of seniority; a number is never used again.
        claims: the folder on storage that all hosts share, in which the succession is claimed; "" without one.
    """

    term: Integer
    number: Integer
    leader: Integer
    hosts: List[Integer]
    claims: str = ""

    @property
    def key(self) -> Key:
        """What orders views."""
        return self.term, self.number, self.leader


class Propose(Tagged, frozen=True):
    """The sender wants this to be the next host view, and leads then."""

    view: HostView


class Accept(Tagged, frozen=True):
    """The sender accepts a proposal, and follows who made it.

    Attributes:
        term, number: of the proposal.
        agreed: the newest view that the sender knows to be agreed on.
        pending: the newer ones that it has accepted, any of which may have been agreed on.
        ended: the hosts that have ended while they were connected to the sender.
        ended_after: the views that these had accepted, newer than `agreed`.
        report: what it knows of its workers.
    """

    term: Integer
    number: Integer
    agreed: HostView | None
    pending: List[HostView]
    ended: List[Integer]
    ended_after: List[HostView]
    report: bytes


class Accepted(Tagged, frozen=True):
    """The sender has accepted `view`, which the receiver did not propose."""

    view: HostView


class Reject(Tagged, frozen=True):
    """The sender has accepted something in `term` already, or follows a leader."""

    term: Integer


class Agreed(Tagged, frozen=True):
    """The view is agreed on."""

    view: HostView


class Outside(Tagged, frozen=True):
    """The others have agreed on `view`, without the receiver, which may join anew."""

    view: HostView


class Resigned(Tagged, frozen=True):
    """The sender does not lead any more, or is outside; its proposals `withdrawn` will not be agreed on."""

    withdrawn: List[tuple[int, int, int]]
    is_outside: bool = False


HostMessage = Propose | Accept | Accepted | Reject | Agreed | Outside | Resigned
"""Between the launchers of two hosts."""


class Link(Enum):
    """What a host knows of another one."""

    CONNECTED = "connected"
    SILENT = "silent"  # it does not answer, or has ended after it did not: it may have gone on without this host
    ENDED = "ended"  # its launcher has ended while it was connected


@dataclass
class Succession:
    """One host's part. Its methods are the events; `take_messages` and `take_claim` return what is to be done.

    Args:
        me: the number of this host.
        agreed: the newest view that this host knows to be agreed on; None for a host that joins.
        leader: the host that leads; -1 for a host that joins.

    Attributes:
        is_outside: whether the others have gone on without this host.
        report: returns what this host tells a new leader of its workers; set by the owner.
        reports: those of the hosts that have accepted this host's last proposal.
    """

    me: int
    agreed: HostView | None
    leader: int
    is_outside: bool = False
    report: Callable[[], bytes] = bytes
    reports: dict[int, bytes] = field(default_factory=dict)
    _links: dict[int, Link] = field(default_factory=dict)
    _pending: dict[Key, HostView] = field(default_factory=dict)  # accepted from others, newer than `agreed`
    _proposal: HostView | None = None
    _accepts: dict[int, Accept] = field(default_factory=dict)  # of the proposal
    _accepted_by: dict[int, dict[Key, HostView]] = field(default_factory=dict)  # what others told, newer than `agreed`
    _own: set[Key] = field(default_factory=set)  # proposals of this host since it has agreed or followed
    _withdrawn: set[Key] = field(default_factory=set)  # proposals that will not be agreed on
    _winners: dict[Key, Key] = field(default_factory=dict)  # of claims
    _claim: HostView | None = None
    _adding: list[int] = field(default_factory=list)
    _excluded: set[int] = field(default_factory=set)
    _folder: str | None = None
    _term: int = 0
    _is_rejected: bool = False
    _messages: deque[tuple[int, HostMessage]] = field(default_factory=deque)

    @property
    def newest(self) -> HostView | None:
        """The newest view that this host has accepted."""
        views = [view for view in (self.agreed, *self._pending.values(), self._proposal) if view is not None]
        return max(views, key=lambda view: view.key, default=None)

    @property
    def _accepted(self) -> HostView | None:
        """The newest view that this host has agreed to or accepted from another."""
        views = [view for view in (self.agreed, *self._pending.values()) if view is not None]
        return max(views, key=lambda view: view.key, default=None)

    @property
    def is_acting(self) -> bool:
        """Whether this host leads in a view that is agreed on and whose hosts are all connected."""
        return self.leader == self.me and self._proposal is None and self.agreed is not None and not self.is_outside

    @property
    def has_leader(self) -> bool:
        """Whether this host leads in an agreed view, or is connected to a host that does."""
        follows = self.leader != self.me and self._is_connected(self.leader)
        return self.is_acting or (follows and self.newest == self.agreed)

    @property
    def unanswered(self) -> list[int]:
        """The hosts of the newest view that do not answer, or never have, and have not ended for certain."""
        views = [view for view in (self.agreed, self._proposal, *self._pending.values(), *self._ended_after()) if view]
        views += [view for accept in self._accepts.values() for view in accept.pending if self._proposal is not None]
        hosts = {host for view in views for host in view.hosts}
        return sorted(host for host in hosts - {self.me} if self._links.get(host, Link.SILENT) is Link.SILENT)

    @property
    def knows_all(self) -> bool:
        """Whether every host that has ever taken part is connected, or has ended for certain."""
        return Link.SILENT not in self._links.values()

    @property
    def is_superseded(self) -> bool:
        """Whether others that have ended have gone on without this host, by a claim."""
        return self._proposal is not None and any(
            view.claims and view.key in self._winners and not self._is_quorum(view, self._proposal)
            for view in self._predecessors()
        )

    def take_messages(self) -> Iterator[tuple[int, HostMessage]]:
        """Yield the messages to send, each with the number of its host."""
        while self._messages:
            yield self._messages.popleft()

    def take_claim(self) -> tuple[HostView, Key] | None:
        """Return the view whose succession is to be claimed, and for which proposal; None if there is none."""
        view, self._claim = self._claim, None
        return None if view is None or self._proposal is None else (view, self._proposal.key)

    # --- events -------------------------------------------------------------------------------------------------------

    def set_link(self, host: int, link: Link) -> None:
        """The connection to a host has changed."""
        before = self._links.get(host)
        self._links[host] = link
        if link is Link.CONNECTED and before is not Link.CONNECTED:
            if self.leader != self.me:
                self._send(host, Resigned(tuple(self._withdrawn)))  # it may believe that this host leads
            for view in (self.agreed, *self._pending.values(), self._proposal):
                if view is not None and view.leader != host:
                    self._send(host, Accepted(view))
            self._greet(host)
        if link is not before:
            self._excluded.clear()  # the rest may not be enough now
            self._consider()

    def add(self, host: int) -> None:
        """A host that is connected wants to join; only for the leader."""
        self._adding.append(host)
        self._consider()

    def exclude(self, host: int) -> None:
        """Go on without a host that is connected, but not to all others; only for the leader, if the rest may go on."""
        agreed = self.agreed
        if not self.is_acting or agreed is None or host == self.me:
            return
        rest = [other for other in agreed.hosts if other != host and self._is_connected(other)]
        if agreed.claims or 2 * len(rest) > len(agreed.hosts):
            self._excluded.add(host)
            self._consider()

    def set_claims(self, folder: str) -> None:
        """All hosts share the storage of `folder`, or not any more (""); only for the leader."""
        self._folder = folder
        self._consider()

    def tick(self) -> None:
        """Some time has passed: try again what was not answered, or rejected."""
        proposal = self._proposal
        if self.is_outside:
            self._send_to_all(Resigned(tuple(self._withdrawn), is_outside=True))
        elif proposal is None:
            self._consider()
            self._ask_for_leader()
        elif self._is_rejected:
            self._tell_outsiders()
            self._propose(proposal.hosts)
        else:
            self._winners.clear()
            self._accepts = {self.me: self._acceptance(proposal)}  # the others may know more by now
            self._ask()

    def _ask_for_leader(self) -> None:
        """Tell the host that leads, if there is one, that this host does not follow it."""
        if self.newest is not None and not self._is_connected(self.leader):
            self._send_to_all(Reject(self._term))

    def claimed(self, view: HostView, winner: Key) -> None:
        """The succession of `view` belongs to the proposal `winner`."""
        self._winners[view.key] = winner
        self._evaluate()

    def receive(self, host: int, message: HostMessage) -> None:
        """Another host has sent a message."""
        match message:
            case Propose(view):
                self._note_accepted(host, view)
                self._answer(host, view)
            case Accept():
                self._note_accept(host, message)
            case Accepted(view):
                self._note_accepted(host, view)
                self._note_left(host, view)
            case Reject(term):
                self._term, self._is_rejected = max(self._term, term), True
                if self.is_acting and self.agreed is not None:
                    self._propose(self.agreed.hosts)
            case Agreed(view):
                if self.newest is not None and view.key == self.newest.key:
                    self._set_agreed(view)
            case Resigned():
                self._note_resigned(host, message)
            case Outside(view):
                self._note_outside(host, view)

    # --- the part of a host that follows ------------------------------------------------------------------------------

    def _answer(self, host: int, view: HostView) -> None:
        self._term = max(self._term, view.term)
        accepted = self._accepted
        if self.is_outside:
            self._send(host, Resigned(tuple(self._withdrawn), is_outside=True))
            return
        if self.me not in view.hosts:
            return
        if host != self.leader and self.has_leader:
            self._refuse(host, view)
        elif self.agreed is not None and not self._has_part(host):
            self._send(host, Reject(self._term))
            self._send(host, Outside(self.agreed))
        elif accepted is None or (view.key > accepted.key and self._is_better(view)):
            self._follow(host, view)
        elif host == self.leader and view == accepted:  # it was sent twice
            self._send(host, self._acceptance(view))
        else:
            self._send(host, Reject(self._term))

    def _has_part(self, host: int) -> bool:
        """Return whether a host is in a view that may be the newest agreed one."""
        return any(host in view.hosts for view in (self.agreed, *self._pending.values()) if view is not None)

    def _tell_outsiders(self) -> None:
        """Tell the hosts that are not in the agreed view; those that know a newer one ignore it."""
        for host, link in self._links.items():
            if self.agreed is not None and link is Link.CONNECTED and host not in (*self.agreed.hosts, *self._adding):
                self._send(host, Outside(self.agreed))

    def _resign(self) -> None:
        """Lead no more, and withdraw what this host has proposed and nobody has agreed on."""
        self._withdrawn |= self._own
        self._own.clear()
        if self.leader == self.me:
            self._send_to_all(Resigned(tuple(self._withdrawn)))
        self.leader, self._proposal = -1, None
        self._excluded.clear()

    def _note_resigned(self, host: int, message: Resigned) -> None:
        self._withdrawn.update(message.withdrawn)
        self._pending = {key: view for key, view in self._pending.items() if key not in self._withdrawn}
        if host == self.leader:
            self.leader = -1
        if message.is_outside:
            self.set_link(host, Link.SILENT)

    def _is_better(self, view: HostView) -> bool:
        """Return whether to give up an own proposal for `view`: the larger one wins, or that of the senior host."""
        own = self._proposal
        return own is None or (len(view.hosts), -view.leader) > (len(own.hosts), -own.leader)

    def _refuse(self, host: int, view: HostView) -> None:
        """Refuse the proposal of a host that does not know the leader."""
        self._send(host, Reject(self._term))
        if self.is_acting and self.agreed is not None and view.key > self.agreed.key:
            self._term = max(self._term, self.agreed.term + 1)
            self._propose(self.agreed.hosts)  # the other one believes a newer view only
        else:
            self._greet(host)

    def _follow(self, host: int, view: HostView) -> None:
        for other in self._links:
            if other != host and self._is_connected(other):
                self._send(other, Accepted(view))  # before the acceptance: if this host ends now, the others know it
        self._send(host, self._acceptance(view))
        self._resign()
        self.leader = host
        self._pending[view.key] = view
        self._adding.clear()

    def _note_accepted(self, host: int, view: HostView) -> None:
        if self.agreed is None or view.key > self.agreed.key:
            self._accepted_by.setdefault(host, {})[view.key] = view

    def _note_left(self, host: int, view: HostView) -> None:
        """Lead no more if a host of the newest view follows another one, that goes on without this host."""
        newest = self.newest
        if newest is None or self.leader != self.me or self.me in view.hosts:
            return
        if host in newest.hosts and view.key > newest.key:
            self._term = max(self._term, view.term)
            self._resign()

    def _ended_after(self) -> list[HostView]:
        """Return the views that hosts had accepted that have ended while they were connected to this one."""
        ended = [host for host, link in self._links.items() if link is Link.ENDED]
        views = {key: view for host in ended for key, view in self._accepted_by.get(host, {}).items()}
        return list(views.values())

    def _note_outside(self, host: int, view: HostView) -> None:
        accepted = self._accepted
        if accepted is None or self.me in view.hosts:
            return
        if view.key > accepted.key:
            self._resign()
            self.is_outside = True
        elif not self.has_leader:
            self._send(host, Reject(self._term))  # tell it in a newer term

    def _acceptance(self, view: HostView) -> Accept:
        ended = tuple(host for host, link in self._links.items() if link is Link.ENDED)
        pending, ended_after = tuple(self._pending.values()), tuple(self._ended_after())
        return Accept(view.term, view.number, self.agreed, pending, ended, ended_after, self.report())

    def _greet(self, host: int) -> None:
        """Tell a host that the others have gone on without it, or ask it again for its answer."""
        if self.has_leader and self.agreed is not None and self.newest == self.agreed:
            if self.is_acting and host in self.agreed.hosts:
                self._propose(self.agreed.hosts)
            elif host not in self.agreed.hosts and host not in self._adding:
                self._send(host, Outside(self.agreed))
        elif self._proposal is not None and host in self._proposal.hosts:
            self._send(host, Propose(self._proposal))

    # --- the part of a host that leads, or wants to -------------------------------------------------------------------

    def _is_connected(self, host: int) -> bool:
        return host == self.me or self._links.get(host) is Link.CONNECTED

    def _consider(self) -> None:
        """Propose a view if this host should, and has not done so."""
        newest = self.newest
        if self.is_outside or newest is None or self.agreed is None:
            return  # a host that joins does not lead before it is in
        if self.leader != self.me and self._is_connected(self.leader):
            return
        hosts = self._wanted_hosts(newest)
        if self.leader != self.me and hosts[:1] != [self.me]:
            return  # a more senior host does
        current = self._proposal or newest
        folder_changes = self._folder is not None and self._folder != current.claims
        if self.leader != self.me or tuple(hosts) != tuple(current.hosts) or folder_changes:
            self._propose(hosts)
        else:
            self._evaluate()  # a host may have ended for certain meanwhile

    def _wanted_hosts(self, newest: HostView) -> list[int]:
        earlier = self.agreed.hosts if self.agreed is not None else ()
        pending = [host for view in self._pending.values() for host in view.hosts]
        hosts = dict.fromkeys([*earlier, *pending, *newest.hosts, *self._adding])
        return [host for host in hosts if self._is_connected(host) and host not in self._excluded]

    def _propose(self, hosts: Iterable[int]) -> None:
        newest = self.newest
        assert newest is not None
        takes_over = self.leader != self.me or self._term > newest.term or self._is_rejected
        self._term = self._term + 1 if takes_over else newest.term
        claims = newest.claims if self._folder is None else self._folder
        view = HostView(self._term, newest.number + 1, self.me, tuple(hosts), claims)
        self.leader, self._proposal, self._accepts = self.me, view, {self.me: self._acceptance(view)}
        self._own.add(view.key)
        self._is_rejected = False
        for host in self._links:
            if host not in view.hosts and self._is_connected(host):
                self._send(host, Accepted(view))
        self._ask()

    def _ask(self) -> None:
        """Send the proposal to the hosts that have not accepted it."""
        assert self._proposal is not None
        for host in self._proposal.hosts:
            if host not in self._accepts:
                self._send(host, Propose(self._proposal))
        self._evaluate()

    def _note_accept(self, host: int, message: Accept) -> None:
        if self._proposal is not None and (message.term, message.number) == self._proposal.key[:2]:
            self._accepts[host] = message
            self._evaluate()

    def _evaluate(self) -> None:
        """Agree on the proposal if that is possible by now."""
        proposal = self._proposal
        if proposal is None or not self._accepts.keys() >= set(proposal.hosts):
            return
        for view in self._predecessors():
            if not self._is_quorum(view, proposal):
                self._look_for_quorum(view, proposal)
                return
        self.reports = {host: accept.report for host, accept in self._accepts.items()}
        self._adding = [host for host in self._adding if host not in proposal.hosts]
        self._proposal = None
        self._set_agreed(proposal)
        for host in proposal.hosts:
            if host != self.me:
                self._send(host, Agreed(proposal))
        self._tell_outsiders()

    def _look_for_quorum(self, view: HostView, proposal: HostView) -> None:
        """Claim the succession of `view`, or propose what may find a quorum of it."""
        missing = [host for host in view.hosts if self._is_connected(host) and host not in proposal.hosts]
        joining = [host for host, accept in self._accepts.items() if accept.agreed is None and view in accept.pending]
        rest = msgspec.structs.replace(proposal, hosts=tuple(host for host in proposal.hosts if host not in joining))
        if view.claims:
            self._claim = view if view.key not in self._winners else None
        elif missing and self._excluded.isdisjoint(missing):
            self._propose((*proposal.hosts, *missing))
        elif joining and self.agreed is not None and self._is_quorum(self.agreed, rest):
            self._excluded.update(joining)  # the others need not know of this view
            self._adding = [host for host in self._adding if host not in joining]
            self._propose(rest.hosts)

    def _predecessors(self) -> list[HostView]:
        """Return the views that may be the newest agreed one, by what the accepting hosts know."""
        agreed = [accept.agreed for accept in self._accepts.values() if accept.agreed is not None]
        newest = max(agreed, key=lambda view: view.key)
        pending = [view for accept in self._accepts.values() for view in accept.pending]
        dead = self._own | self._withdrawn
        later = {view.key: view for view in pending if view.key > newest.key and view.key not in dead}
        if all(self._is_majority(view) for view in (newest, *later.values())):
            return [newest, *later.values()]
        # some hosts are counted as ended: others may have gone on with them before
        ended_after = [view for accept in self._accepts.values() for view in accept.ended_after] + self._ended_after()
        later |= {view.key: view for view in ended_after if view.key > newest.key and view.key not in dead}
        return [newest, *later.values()]

    def _is_majority(self, view: HostView) -> bool:
        """Return whether more than half of a view's hosts accept the proposal; storage that they share decides, too."""
        return bool(view.claims) or 2 * len(self._accepts.keys() & set(view.hosts)) > len(view.hosts)

    def _is_quorum(self, view: HostView, proposal: HostView) -> bool:
        """Return whether the hosts of the proposal may go on after `view`."""
        ended = {host for accept in self._accepts.values() for host in accept.ended}
        ended |= {host for host, link in self._links.items() if link is Link.ENDED}
        alive = [host for host in view.hosts if host in proposal.hosts or host not in ended]
        present = [host for host in alive if host in proposal.hosts]
        if len(present) == len(view.hosts):
            return True
        if view.claims:
            winner = self._winners.get(view.key)
            return winner in self._own or winner in {known.key for known in self._predecessors()}
        return 2 * len(present) > len(alive) or not alive

    def _set_agreed(self, view: HostView) -> None:
        self.agreed = view
        self._excluded.clear()
        self._pending = {key: pending for key, pending in self._pending.items() if key > view.key}
        for host, views in self._accepted_by.items():
            self._accepted_by[host] = {key: each for key, each in views.items() if key > view.key}
        self._own.clear()

    def _send_to_all(self, message: HostMessage) -> None:
        for host, link in self._links.items():
            if link is Link.CONNECTED:
                self._send(host, message)

    def _send(self, host: int, message: HostMessage) -> None:
        self._messages.append((host, message))
