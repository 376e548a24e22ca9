"""What hosts publish, poll, and find out about each other."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from lockstep import messages
from lockstep.flight_recorder import FlightRecorder, RecorderReader, activity, current
from lockstep.flight_recorder.layout import StateWords, rank_file
from lockstep.messages import convert
from lockstep.watchdog.cross_host import CrossHost, StateExchange
from lockstep.watchdog.program import Program
from lockstep.watchdog.report import Finding
from lockstep.watchdog.states import GroupState, HostState, JobStates, collect_state
from support.clock import Clock


class Store:
    underlying_store = None  # no connection to clone

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lost = False

    def set(self, key: str, value: str) -> None:
        if self.lost:
            raise RuntimeError("Broken pipe")
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.lost or any(key not in self.values for key in keys):
            raise RuntimeError("wait timeout")
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise NotImplementedError

    def set_timeout(self, timeout: object) -> None:
        return


class Host:
    """A rank's `CrossHost` with what it sees of the watchdog's state; all of what it finds is in
    `found`.
    """

    def __init__(self, rank: int, store: Store, peers: dict[int, Any] | None = None) -> None:
        self.found: list[Finding] = []
        self.monitors: list[Any] = []
        self.state: Any = SimpleNamespace(
            folder=Path("/nowhere"),
            rank=rank,
            uneven_batches=0,
            peers=peers or {},
            readers={},
            recorder=SimpleNamespace(set_word=lambda word, value: None),
            rendezvous=SimpleNamespace(hosts=((0,), (1, 2)), store=store, heartbeat=None),
            health=SimpleNamespace(gone=set(), is_stopped=lambda rank: False),
            limits=SimpleNamespace(
                debugging=True, strict=False, stall_s=600.0, warning_s=5.0, heartbeat_s=30.0
            ),
            fail=self.found.append,
        )
        self.cross_host = CrossHost(self.state, self.monitors)

    def wait_since(self, entered: float) -> None:
        first = SimpleNamespace(entered=entered)
        monitor = SimpleNamespace(remote_ranks=(0,), key=9, ranks=(0, 1, 2))
        monitor.first_pending = lambda: first
        monitor.limits = self.state.limits
        self.monitors[:] = [monitor]

    def rows(self, *rows: tuple[int, str]) -> None:
        told = [[rank, state, "ValueError: no", "", 1] for rank, state in rows]
        vars(self.cross_host)["_own_state"] = lambda: convert({"ranks": told}, HostState)


def test_the_end_of_the_store_is_no_fault_unless_somebody_waits(clock: Clock) -> None:
    """The first rank, which may keep the store, may have come to its end while others still save
    their results.
    """
    store = Store()
    places = [Host(0, store), Host(1, store)]
    for place in places:
        place.rows()
    store.lost = True
    for _ in range(20):
        clock.pass_s(0.6)
        places[1].cross_host.tick(0.1)
    assert not places[1].found
    places[1].wait_since(clock.now)  # just now: others may still come
    places[1].cross_host.tick(0.1)
    clock.pass_s(0.6)
    places[1].cross_host.tick(0.1)
    assert not places[1].found
    clock.pass_s(3)
    places[1].cross_host.tick(0.1)
    assert [finding.kind for finding in places[1].found] == ["lost"]


def test_a_host_that_has_published_nothing_yet_is_waited_for(clock: Clock) -> None:
    store = Store()
    place = Host(1, store)
    place.rows()
    place.wait_since(0.0)
    for _ in range(20):
        clock.pass_s(0.6)
        place.cross_host.tick(0.1)
    assert not place.found


def test_silence_counts_only_while_somebody_listens(clock: Clock) -> None:
    store = Store()
    one, other = StateExchange(store, 0, 2), StateExchange(store, 1, 2)
    for each in (one, other):
        each.initialize()
        each.publish(HostState())
    one.poll()
    clock.pass_s(3600)
    assert one.silent_s(1) == 3600
    one.reset_silence()
    assert one.silent_s(1) == 0
    clock.pass_s(2)
    one.poll()
    assert one.silent_s(1) == 2  # still nothing new


@pytest.mark.parametrize("heartbeat_s, speaks", [(0.1, False), (2.0, True)])
def test_a_rank_publishes_for_one_that_holds_its_interpreter(
    clock: Clock, heartbeat_s: float, speaks: bool
) -> None:
    peer = SimpleNamespace(phase="runs", floats={StateWords().heartbeat: clock.now - heartbeat_s})
    assert Host(2, Store(), {1: peer}).cross_host._represents_host() is speaks


def test_a_rank_that_raises_gives_other_hosts_time_to_raise_the_same(clock: Clock) -> None:
    store = Store()
    place = Host(0, store)
    Host(1, store)
    place.rows()
    other = StateExchange(store, 1, 2)
    told = [[rank, "raised" if rank == 1 else "runs", "ValueError: no", "", 1] for rank in (1, 2)]
    for _ in range(4):
        other.publish(convert({"ranks": told}, HostState))
        place.cross_host.tick(0.1)
        clock.pass_s(0.6)
    assert not place.found
    place.cross_host.tick(0.1)
    assert [finding.sentence for finding in place.found] == ["Rank 1 raised ValueError: no."]


def test_a_rank_that_raises_while_others_wait_is_found_at_once() -> None:
    told = {
        0: {
            "ranks": [[0, "waits"]],
            "groups": {"9": [[[0], 3, 3, 0.1, 0.0, [], "barrier()", "a.py:1"]]},
        },
        1: {
            "ranks": [[1, "raised"]],
            "groups": {"9": [[[1], 2, 0, 0.0, 0.0, [], "barrier()", "a.py:1"]]},
        },
    }
    states = {host: convert(state, HostState) for host, state in told.items()}
    place = Host(0, Store()).cross_host
    groups = {9: (0, 1)}
    assert place._find_exception(JobStates(((0,), (1,)), states, groups)) is not None
    states[0].groups = {}
    assert place._find_exception(JobStates(((0,), (1,)), states, groups)) is None


def test_hosts_that_wait_for_the_first_one_notice_that_it_has_left() -> None:
    """Nobody compares for the others any more."""
    store = Store()
    first, place = Host(0, store), Host(1, store)
    first.rows((0, "ended"))
    first.cross_host.tick(0.1)
    waits = {"groups": {"9": [[[1], 4, 4, 0.5, 0.0, [], "barrier()", "a.py:3 in f"]]}}
    vars(place.cross_host)["_own_state"] = lambda: convert(waits, HostState)
    place.monitors[:] = [
        SimpleNamespace(remote_ranks=(0,), key=9, ranks=(0, 1), first_pending=lambda: None)
    ]
    place.cross_host.tick(0.1)
    assert [(finding.kind, finding.culprits) for finding in place.found] == [("left", (0,))]


def last_of(rank: int, fingerprint: int) -> HostState:
    group = [
        [rank],
        4,
        0,
        0.0,
        0.0,
        [[4, fingerprint, 1, -1, 0, 0]],
        "barrier()",
        "a.py:3 in f",
        "",
    ]
    return convert({"groups": {"9": [group]}, "final": True}, HostState)


@pytest.mark.parametrize("fingerprint, kinds", [(7, []), (8, ["desync"])])
def test_what_was_called_last_is_compared_at_the_end(fingerprint: int, kinds: list[str]) -> None:
    """A program may be over before the next round."""
    store = Store()
    places = [Host(0, store), Host(1, store)]
    for place, rank, last in zip(places, (0, 1), (7, fingerprint), strict=True):
        place.state.error, place.state.program = None, Program(place.state.recorder)
        place.wait_since(0.0)
        vars(place.cross_host)["_own_state"] = functools.partial(last_of, rank, last)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda place: place.cross_host.compare_at_exit(), places))
    assert [[finding.kind for finding in place.found] for place in places] == [kinds, kinds]


@pytest.mark.parametrize("own_work, warned", [([], True), ([0], False), ([1, 2], True)])
def test_a_straggler_on_another_host_is_named_with_its_callback(
    own_work: list[int], warned: bool
) -> None:
    host, said = Host(1, Store()), []
    host.state.write_message, host.state.seconds_since_solo = said.append, lambda seconds: 0.0
    activities = {0: "the callback Curve.on_train_end"}
    for seconds, expected in ((20.0, warned), (31.0, True)):
        waiting = GroupState([1, 2], 3, 3, seconds, what="barrier()", call_site="t.py:3 in f")
        first = HostState(
            groups={7: [GroupState([0], 2)]}, activities=activities, own_work=own_work
        )
        host.cross_host._states = {0: first, 1: HostState(groups={7: [waiting]})}
        assert (
            host.cross_host._check_stragglers(host.cross_host._joined(host.cross_host._states))
            is None
        )
        assert bool(said) == expected
    assert said[0].splitlines() == [
        f"straggler: rank 0 has not reached barrier() at t.py:3 in f for {20 if warned else 31}.0 "
        "s; other ranks wait.",
        "  Rank 0 is in the callback Curve.on_train_end",
    ]


def test_other_hosts_learn_what_the_program_of_a_rank_is_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path, 0, 2, "here", "program")
    reader = RecorderReader(rank_file(tmp_path, 0))
    monkeypatch.setattr(current, "recorder", recorder)
    with activity("the callback Curve.on_train_end", is_own=True):
        busy = collect_state({0: reader}, (), (), ())
    after = collect_state({0: reader}, (), (), ())
    reader.close()
    recorder.close()
    assert (busy.activities, busy.own_work) == ({0: "the callback Curve.on_train_end"}, [0])
    assert (after.activities, after.own_work) == ({}, [])
    assert convert(json.loads(messages.encode(busy)), HostState).activities == busy.activities


def test_who_was_stopped_before_this_host_was_absent_may_run_again(clock: Clock) -> None:
    """A whole job may be stopped, one rank after the other, and go on."""
    store = Store()
    first, second = Host(0, store), StateExchange(store, 1, 2)
    first.rows((0, "waits"))
    first.state.limits.debugging, first.state.limits.expects_losses = False, False
    vars(first.cross_host)["_represents_host"] = lambda: True
    second.initialize()
    first.cross_host.tick(0.1)
    assert first.cross_host._may_be_stopped() == set()
    clock.pass_s(0.6)
    first.cross_host.tick(3600)
    assert first.cross_host._may_be_stopped() == {1, 2}
    second.publish(HostState())
    clock.pass_s(0.6)
    first.cross_host.tick(0.1)
    assert first.cross_host._may_be_stopped() == set()


def test_a_host_that_is_silent_within_a_collective_is_named_once(clock: Clock) -> None:
    """Whether the first host hears nothing of another, or the others nothing of it."""
    store = Store()
    places = [Host(0, store), Host(1, store)]
    said: list[list[str]] = [[], []]
    for place, texts in zip(places, said, strict=True):
        place.state.write_message, place.state.seconds_since_solo = texts.append, lambda wait: 0.0
        place.state.limits.debugging, place.state.limits.expects_losses = False, False
        place.state.own_reader = SimpleNamespace(raw=lambda number: None)
        place.cross_host._exchange.initialize()  # type: ignore[union-attr]
    within = GroupState([0], 3, 3, 6.0, what="barrier()", call_site="t.py:3 in f")
    waits = {0: within, 1: structs.replace(within, ranks=[1, 2])}
    rows = {0: [[0, "waits", "", "a", 1]], 1: [[1, "waits", "", "b", 1], [2, "waits", "", "b", 2]]}
    states = {host: HostState(ranks=rows[host], groups={9: [waits[host]]}) for host in (0, 1)}
    for number, place in enumerate(places):
        place.wait_since(clock.now)
        place.monitors[0].first_pending = lambda: SimpleNamespace(entered=990.0, number=1)
        place.monitors[0].preflight = object()
        vars(place.cross_host)["_own_state"] = functools.partial(states.get, number)
        vars(place.cross_host)["_represents_host"] = lambda: True
    for place in reversed(places):  # the first host then knows that the second is in it as well
        place.cross_host.tick(0.1)
    assert said == [[], []]
    for place in (places[0], places[0], places[1], places[1]):
        clock.pass_s(5.1)
        place.cross_host.tick(0.1)
    assert said[0] == [
        "held up: rank 0 has waited in barrier() at t.py:3 in f for 6.0 s, though all have called "
        "it.\n  Rank 1 is silent: its host b has published nothing for 5.1 s; its processes may be "
        "stopped\n  Rank 2 is silent: its host b has published nothing for 5.1 s; its processes "
        "may be stopped"
    ]
    assert len(said[1]) == 1
    assert "Rank 0 is silent: its host a has published nothing for" in said[1][0]
