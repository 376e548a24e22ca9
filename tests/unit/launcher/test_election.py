"""Which host leads, under random schedules of lost hosts, cut networks and joins; and its answers
one by one.

A schedule is tried again by its number: ``python tests/unit/launcher/test_election.py 4711``.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from lockstep.launcher.elastic_jobs.election import (
    Accepted,
    Ballot,
    Election,
    ElectionMessage,
    Free,
    HostView,
    Prepare,
    Promise,
    Proposal,
    Reject,
)
from lockstep.launcher.elastic_jobs.mesh import Link

MESSAGE: msgspec.msgpack.Decoder[ElectionMessage] = msgspec.msgpack.Decoder(ElectionMessage)

# --- random schedules
# ---------------------------------------------------------------------------------------


class Wire:
    """The connection of two hosts. What is in flight arrives in order, or is lost with the
    connection.
    """

    def __init__(self, one: int, other: int) -> None:
        self.flying: dict[int, deque[ElectionMessage]] = {one: deque(), other: deque()}
        self.broken_for: set[int] = set()  # the hosts that have noticed that it has ended
        self.is_reset = False


class Net:
    """Hosts, the wires between them, and everything that can happen to both."""

    def __init__(self, seed: int, size: int = 0, claims: str | None = None) -> None:
        self.random = random.Random(seed)
        self.claims = self.random.choice(["/shared", ""]) if claims is None else claims
        size = size or self.random.randrange(1, 7)
        first = HostView(0, 0, tuple(range(size)), self.claims)
        self.hosts = {number: Election(number, first) for number in range(size)}
        self.dead: dict[int, str] = {}
        self.cut: set[frozenset[int]] = set()
        self.wires: dict[frozenset[int], Wire] = {}
        self.claimed: dict[int, HostView] = {}
        self.views = {0: first}
        self.faults, self.fault_rate = (
            self.random.randrange(0, 16),
            self.random.choice([0.05, 0.15, 0.4]),
        )
        for number in self.hosts:
            for other in range(number):
                self.connect(frozenset((number, other)))

    def connect(self, pair: frozenset[int]) -> None:
        if pair not in self.cut:
            one, other = sorted(pair)
            self.wires[pair] = Wire(one, other)
            self.do(one, lambda host: host.set_link(other, Link.CONNECTED))
            self.do(other, lambda host: host.set_link(one, Link.CONNECTED))

    def do(self, number: int, event: Callable[[Election], None]) -> None:
        """Let an event happen on a host; check what it takes for decided, and send what it has to
        say.
        """
        host = self.hosts[number]
        event(host)
        if host.view is not None:
            assert self.views.setdefault(host.view.number, host.view) == host.view, (
                "two views have the same number"
            )
        for to, message in host.take_messages():
            wire = self.wires.get(frozenset((number, to)))
            if wire is not None and number not in wire.broken_for:
                wire.flying[to].append(MESSAGE.decode(msgspec.msgpack.encode(message)))
        claim = host.take_claim()
        if claim is not None:
            winner = self.claimed.setdefault(claim.number, claim)
            self.do(number, lambda host: host.claimed(winner))

    # --- what may happen

    def alive(self) -> list[int]:
        return [number for number in self.hosts if number not in self.dead]

    def notice(self, pair: frozenset[int], number: int) -> None:
        """A host notices that its connection to another has ended, and tries to connect again."""
        (other,) = pair - {number}
        wire, link = self.wires[pair], Link.SILENT
        if self.dead.get(other) == "process" and pair not in self.cut and not wire.broken_for:
            link = Link.LOST if wire.is_reset else Link.ENDED
        wire.broken_for.add(number)
        wire.flying[number].clear()
        self.do(number, lambda host: host.set_link(other, link))

    def events(self) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = []
        for pair, wire in self.wires.items():
            for number in pair - self.dead.keys():
                (other,) = pair - {number}
                is_gone = other in self.dead or pair in self.cut or other in wire.broken_for
                if wire.flying[number] and number not in wire.broken_for and pair not in self.cut:
                    found.append(lambda wire=wire, n=number, o=other: self.deliver(wire, n, o))
                elif is_gone and number not in wire.broken_for:
                    found.append(lambda pair=pair, n=number: self.notice(pair, n))
            if wire.broken_for == pair and pair not in self.cut and not pair & self.dead.keys():
                found.append(lambda pair=pair: self.connect(pair))
        return found

    def deliver(self, wire: Wire, number: int, other: int) -> None:
        message = wire.flying[number].popleft()
        self.do(number, lambda host: host.receive(other, message))

    def deliver_all(self, sender: int, to: int) -> None:
        """Deliver what is in flight from one host to another."""
        wire = self.wires[frozenset((sender, to))]
        while wire.flying[to]:
            self.deliver(wire, to, sender)

    def deliver_everything(self) -> None:
        while any(wire.flying[number] for wire in self.wires.values() for number in wire.flying):
            for pair in self.wires:
                one, other = pair
                self.deliver_all(one, other)
                self.deliver_all(other, one)

    def break_connection(self, one: int, other: int) -> None:
        """Cut two hosts from each other; both notice."""
        pair = frozenset((one, other))
        self.cut.add(pair)
        self.notice(pair, one)
        self.notice(pair, other)

    def end(self, number: int, *witnesses: int) -> None:
        """Kill the process of a host, in the sight of others."""
        self.dead[number] = "process"
        for witness in witnesses:
            self.deliver_all(number, witness)
            self.notice(frozenset((number, witness)), witness)

    def leading(self) -> list[int]:
        return [number for number in self.alive() if self.hosts[number].leads]

    def disturb(self) -> None:
        self.faults -= 1
        kinds = [
            "process",
            "process",
            "reset",
            "power",
            "cut",
            "cut",
            "split",
            "drop",
            "heal",
            "join",
            "exclude",
        ]
        kind = self.random.choice([*kinds, "tick", "confirm"])
        alive = self.alive()
        if kind in ("process", "reset", "power") and len(alive) > 1:
            self.kill(self.random.choice(alive), kind)
        elif kind == "cut" and len(alive) > 1:
            self.cut.add(frozenset(self.random.sample(alive, 2)))
        elif kind == "split":
            side = {number for number in self.hosts if self.random.random() < 0.5}
            self.cut |= {frozenset((a, b)) for a in side for b in self.hosts.keys() - side}
        elif kind == "heal":
            self.cut.clear()
        elif kind == "drop":
            self.drop()
        elif kind == "join":
            if leaders := self.leading():
                self.join(self.random.choice(leaders))
        elif kind == "exclude":
            for leader in self.leading()[:1]:
                self.exclude_one(leader)
        else:
            number = self.random.choice(alive)
            self.do(number, Election.tick if kind == "tick" else Election.confirm)

    def kill(self, number: int, kind: str) -> None:
        """Kill a host; where its connection is reset, the last messages are lost."""
        self.dead[number] = "power" if kind == "power" else "process"
        for pair, wire in self.wires.items() if kind == "reset" else ():
            if number in pair and self.random.random() < 0.7:
                (other,) = pair - {number}
                wire.is_reset = True
                for _ in range(self.random.randint(0, len(wire.flying[other]))):
                    wire.flying[other].pop()

    def drop(self) -> None:
        """A host takes one to which it is connected for hung, and ends the connection."""
        open_wires = [
            (number, pair)
            for pair, wire in self.wires.items()
            for number in pair
            if not wire.broken_for and not pair & self.dead.keys()
        ]
        if open_wires:
            number, pair = self.random.choice(open_wires)
            (other,) = pair - {number}
            self.wires[pair].broken_for.add(number)
            self.wires[pair].flying[number].clear()
            self.do(number, lambda host: host.set_link(other, Link.SILENT))

    def exclude_one(self, leader: int) -> None:
        view = self.hosts[leader].view
        followers = [
            number for number in (view.hosts if view is not None else ()) if number != leader
        ]
        if followers:
            excluded = self.random.choice(followers)
            self.do(leader, lambda host: host.exclude(excluded))

    def join(self, leader: int) -> None:
        number = len(self.hosts)
        self.hosts[number] = Election(number, None)
        pair = frozenset((leader, number))
        self.connect(pair)
        if pair in self.wires:
            self.do(leader, lambda host: host.add(number))
        for other in self.alive():
            if other not in pair:
                self.connect(frozenset((number, other)))

    def run(self) -> None:
        for _ in range(900):
            found = self.events()
            if self.faults and (not found or self.random.random() < self.fault_rate):
                self.disturb()
            elif found:
                self.random.choice(found)()
            else:
                break
        self.faults = 0
        self.cut.clear()
        for _ in range(40):
            for _ in range(3000):
                found = self.events()
                if not found:
                    break
                self.random.choice(found)()
            for number in self.alive():
                self.do(number, Election.tick)
        self.check_progress()

    def check_progress(self) -> None:
        """When nothing fails any more, one host leads all that are not outside, unless a dead one
        may have done so.
        """
        inside = [number for number in self.alive() if not self.hosts[number].is_outside]
        inside = [number for number in inside if self.hosts[number].view is not None]
        leaders = [number for number in inside if self.hosts[number].leads]
        assert len(leaders) <= 1, f"{leaders} lead"
        if leaders:
            followers = [number for number in inside if self.hosts[number].leader == leaders[0]]
            assert followers == inside, f"{leaders[0]} leads {followers} of {inside}"
        elif inside:
            hosts = [self.hosts[number] for number in inside]
            assert any(host.unanswered or host.lost for host in hosts), f"nobody leads {inside}"


def try_schedules(seeds: range) -> None:
    for seed in seeds:
        try:
            Net(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("block", range(4))
def test_of_all_sides_of_a_cut_network_one_goes_on_at_most(block: int) -> None:
    try_schedules(range(block * 2500, block * 2500 + 2500))


def test_the_views_of_random_schedules_change_often() -> None:
    """So that the test above is one."""
    nets = [Net(seed) for seed in range(200)]
    for net in nets:
        net.run()
    views = [view for net in nets for view in net.views.values()]
    assert len(views) > 600 and sum(net.claimed != {} for net in nets) > 10, len(views)
    assert len({view.leader for view in views}) > 3


# --- single answers
# -------------------------------------------------------------------------------------------


def test_a_host_that_was_never_connected_may_go_on() -> None:
    """When the leader is lost, who waits for it says so, and looks for it; nobody would know
    otherwise.
    """
    host = Election(1, HostView(2, 0, (0, 1, 2)))
    host.set_link(0, Link.CONNECTED)
    assert host.is_settled and host.unanswered == [2]
    host.set_link(0, Link.ENDED)
    assert not host.is_settled and host.unanswered == [2]
    host.set_link(2, Link.CONNECTED)
    assert host.unanswered == []


def test_who_is_connected_to_the_leader_rejects_all_others() -> None:
    net = Net(0, size=3, claims="")
    net.break_connection(0, 1)
    for _ in range(3):
        net.do(1, Election.tick)
        net.deliver_all(1, 2)
        net.deliver_all(2, 1)
    assert net.hosts[1].view == net.hosts[2].view == net.views[0]


@pytest.mark.parametrize("claims", ["", "/shared"])
def test_who_learns_a_moment_later_that_the_leader_has_ended_does_not_hold_up_the_others(
    claims: str,
) -> None:
    """No tick passes: it would be two or three seconds until the attempt is made again."""
    net = Net(0, size=4, claims=claims)
    net.deliver_everything()
    before = net.hosts[1].view
    assert before is not None and net.leading() == [0]
    net.end(0, 1)
    for follower in (2, 3):  # they have not noticed it yet, and reject what 1 attempts
        net.deliver_all(1, follower)
        net.deliver_all(follower, 1)
    assert net.leading() == [] and net.hosts[1].view == before
    for follower in (2, 3):  # one after the other
        net.end(0, follower)
        net.deliver_everything()
    assert net.leading() == [1]
    assert [net.hosts[number].view for number in (1, 2, 3)] == [
        HostView(before.number + 1, 1, (1, 2, 3), claims)
    ] * 3


def test_who_is_free_says_so_once_and_only_to_those_whom_it_has_rejected() -> None:
    view = HostView(4, 0, (0, 1, 2, 3))
    host = Election(3, view)
    for other in (0, 1, 2):
        host.set_link(other, Link.CONNECTED)
    host.receive(1, Prepare(view, Ballot(5, 1, 1)))
    list(host.take_messages())
    host.set_link(0, Link.LOST)
    assert list(host.take_messages()) == [(1, Free(4))]
    host.set_link(0, Link.CONNECTED)
    list(host.take_messages())
    host.set_link(0, Link.LOST)
    assert list(host.take_messages()) == []


def test_that_a_host_was_free_before_the_newest_view_begins_no_attempt() -> None:
    view = HostView(4, 0, (0, 1, 2))
    host = Election(1, view)
    host.set_link(2, Link.CONNECTED)
    host.set_link(0, Link.LOST)
    (prepare,) = [message for _, message in host.take_messages() if isinstance(message, Prepare)]
    host.receive(2, Free(4))  # the attempt goes on
    host.receive(2, Reject(prepare.ballot))
    host.receive(2, Free(3))
    assert list(host.take_messages()) == []
    host.receive(2, Free(4))
    assert list(host.take_messages()) == [(2, Prepare(view, Ballot(5, 2, 1)))]


def test_a_host_that_does_not_follow_learns_from_any_other_that_it_is_outside() -> None:
    net = Net(0, size=3, claims="")
    net.break_connection(0, 1)
    net.deliver_all(0, 2)
    net.deliver_all(2, 0)  # it promises
    net.deliver_all(0, 2)
    net.deliver_all(2, 0)  # and accepts: 0 leads 2
    net.deliver_all(0, 2)
    assert net.hosts[2].view == HostView(1, 0, (0, 2))
    for _ in range(3):
        net.do(1, Election.tick)
    net.deliver_all(1, 2)
    net.deliver_all(2, 1)
    assert net.hosts[1].is_outside


@pytest.mark.parametrize("link", [Link.ENDED, Link.LOST])
def test_one_of_two_hosts_goes_on_when_the_other_one_has_ended(link: Link) -> None:
    net = Net(0, size=2, claims="")
    net.dead[0] = "process"
    net.do(1, lambda host: host.set_link(0, link))
    assert net.leading() == [1] and net.hosts[1].view == HostView(1, 1, (1,))


@pytest.mark.parametrize("is_reset", [False, True], ids=["end of file", "reset"])
def test_who_has_ended_may_have_accepted_what_the_others_do_not_know(is_reset: bool) -> None:
    """When 0 has ended, 1 does not reach 2 and 5. It goes on with 3 and 4; these tell 2 and 5, and
    end.
    """
    net = Net(0, size=6, claims="")
    net.end(0, *range(1, 6))
    for other in (2, 5):
        net.break_connection(other, 1)
    for _ in range(3):
        for follower in (3, 4):
            net.deliver_all(1, follower)
            net.deliver_all(follower, 1)
    assert net.leading() == [1] and net.views[1].hosts == (1, 3, 4)
    for number in (3, 4):
        net.end(number, 1)
        for witness in (2, 5):
            wire = net.wires[frozenset((number, witness))]
            wire.is_reset = is_reset
            if is_reset:
                wire.flying[witness].clear()
            net.end(number, witness)
    for _ in range(4):
        for number in (1, 2, 5):
            net.do(number, Election.tick)
        for _ in range(3):
            for one, other in ((2, 5), (5, 2)):
                net.deliver_all(one, other)
    assert net.leading() == [1]
    assert net.hosts[2].is_outside is not is_reset  # who knows what the others had accepted


def test_hosts_that_were_lost_may_have_decided_among_themselves() -> None:
    net = Net(0, size=3, claims="")
    for lost in (0, 1):
        net.dead[lost] = "process"
        net.do(2, lambda host, lost=lost: host.set_link(lost, Link.LOST))
    assert net.leading() == [] and net.hosts[2].lost == [0, 1]


def test_half_of_the_hosts_are_no_quorum_while_the_others_may_run() -> None:
    net = Net(0, size=2, claims="")
    net.break_connection(0, 1)
    for _ in range(9):
        for number in (0, 1):
            net.do(number, Election.tick)
    assert net.leading() == [] and net.hosts[0].unanswered == [1]


def test_a_host_alone_claims_on_shared_storage_and_the_other_one_is_outside() -> None:
    net = Net(0, size=2, claims="/shared")
    net.break_connection(0, 1)
    assert net.leading() == [0] and net.hosts[1].is_outside


def test_who_leads_asks_before_it_leads_on_after_a_break() -> None:
    """What it has sent may be lost, so that all begin anew with the next view."""
    net = Net(0, size=2, claims="")
    net.break_connection(0, 1)
    assert net.leading() == []
    net.cut.clear()
    net.connect(frozenset((0, 1)))
    net.deliver_everything()
    assert net.leading() == [0] and net.hosts[1].view == HostView(1, 0, (0, 1))


def test_who_has_not_run_for_long_leads_only_if_nobody_else_does() -> None:
    net = Net(0, size=3, claims="")
    net.do(0, Election.confirm)
    assert net.leading() == []
    net.deliver_everything()
    assert net.leading() == [0] and net.views[1].hosts == (0, 1, 2)


def test_the_hosts_vote_again_where_one_does_not_see_the_shared_folder() -> None:
    net = Net(0, size=2, claims="")
    net.do(0, lambda host: host.set_claims("/shared"))
    net.deliver_everything()
    assert net.hosts[1].view == HostView(1, 0, (0, 1), "/shared") and not net.claimed
    net.do(0, lambda host: host.set_claims(""))
    net.deliver_everything()
    assert net.hosts[1].view == net.claimed[2] == HostView(2, 0, (0, 1))


def test_an_answer_to_an_attempt_at_another_view_is_none() -> None:
    net = Net(0, size=3, claims="")
    net.break_connection(0, 2)
    host = net.hosts[0]
    attempt = host._attempt
    assert attempt is not None
    stale = attempt.ballot._replace(view=0)
    host.receive(1, Promise(stale, None, (), ()))
    host.receive(1, Reject(stale))
    assert host._attempt is attempt and attempt.promises.keys() == {0}


def test_an_older_attempt_is_rejected() -> None:
    host = Election(1, HostView(0, 0, (0, 1, 2)))
    host.set_link(0, Link.SILENT)
    host.set_link(2, Link.CONNECTED)
    view = HostView(0, 0, (0, 1, 2))
    host.receive(2, Prepare(view, Ballot(1, 9, 2)))
    list(host.take_messages())
    host.receive(2, Prepare(view, Ballot(1, 8, 2)))
    host.receive(2, Proposal(Ballot(1, 8, 2), HostView(1, 2, (1, 2))))
    assert list(host.take_messages()) == [(2, Reject(Ballot(1, 9, 2)))] * 2


def test_a_connection_begins_with_what_its_host_has_accepted() -> None:
    proposal = Proposal(Ballot(1, 1, 0), HostView(1, 0, (0, 1)))
    host = Election(1, HostView(0, 0, (0, 1, 2)))
    host.set_link(0, Link.CONNECTED)
    host.receive(0, proposal)
    list(host.take_messages())
    host.set_link(2, Link.CONNECTED)
    assert list(host.take_messages()) == [
        (2, HostView(0, 0, (0, 1, 2))),
        (2, Accepted(proposal)),
    ]


if __name__ == "__main__":
    Net(int(sys.argv[1])).run()
