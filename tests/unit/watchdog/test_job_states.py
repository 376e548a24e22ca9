"""What is wrong between hosts, from the states that they publish."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.messages import convert
from lockstep.watchdog.cross_host import CrossHost, StateExchange, find_fault, find_stragglers
from lockstep.watchdog.report import Finding, RankStatus, Report, read
from lockstep.watchdog.session import Session
from lockstep.watchdog.states import HostState, JobStates, to_row

HOSTS, GROUPS = ((0, 1), (2, 3)), {9: (0, 1, 2, 3)}


def together(states: Any, lost: dict[int, tuple[str, str]] | None = None) -> JobStates:
    return JobStates(HOSTS, states, GROUPS, lost)


def told(state: str = "runs", head: int = 5, waits: Any = None, **record: int) -> dict[str, Any]:
    values = {"fingerprint": 1, "line": 1, "batch": 1, "loop": 1, "named": 0, **record}
    records = [[number, *values.values()] for number in range(max(1, head - 3), head + 1)]
    return {"state": state, "groups": {"9": [head, waits, records]}}


def said(*parts: dict[str, Any]) -> dict[int, Any]:
    """What two hosts say of two ranks each."""
    found = {}
    for number, part in enumerate(parts):
        ranks = [2 * number, 2 * number + 1]
        rows = [[rank, part["state"], "", f"host{number}", 1] for rank in ranks]
        head, waits, records = part["groups"]["9"]
        group = [ranks, head, *(waits or [0, 0.0, 0.0]), records, "barrier()", "a.py:1 in f\nx"]
        found[number] = convert({"ranks": rows, "groups": {"9": [group]}}, HostState)
    return found


def found(lost: str, *parts: dict[str, Any]) -> str:
    finding = find_fault(together(said(*parts), {1: (lost, "why")} if lost else {}))
    return "" if finding is None else f"{finding.kind}: {finding.sentence}"


def test_hosts_that_make_equal_calls_have_no_finding() -> None:
    assert found("", told(), told(head=7)) == ""
    assert found("lost", told(), told()) == ""  # nobody waits for it


def test_calls_that_differ_between_hosts_are_found() -> None:
    assert found("", told(), told(fingerprint=2)).startswith(
        "desync: Desync at collective #2 of the default group: rank 0 called"
    )
    assert found("", told(), told(batch=2)) == (
        "batches: Batch mismatch at collective #2 of the default group: rank 0 is on batch 1, "
        "rank 2 is on batch 2."
    )
    assert found("", told(), told(batch=2, loop=2)) == ""


@pytest.mark.parametrize("state, kind", [("died", "lost"), ("ended", "left"), ("frozen", "frozen")])
def test_a_rank_that_will_not_come_is_found(state: str, kind: str) -> None:
    assert found("", told(waits=[5, 1.0, 0.0]), told(state, head=4)).startswith(
        f"{kind}: Rank 2 on host1 "
    )
    assert found("", told(waits=[5, 1.0, 0.0]), told(state, head=5)) == ""
    assert found("", told(waits=[5, 1.0, 0.0]), told(head=4)) == ""


def test_a_rank_that_is_stopped_within_a_collective_is_found() -> None:
    """All have called it, so that nobody is missing."""
    within = told(waits=[5, 1.0, 0.0])
    frozen = told("frozen", waits=[5, 1.0, 0.0])
    assert found("", within, frozen).startswith("frozen: Rank 2 on host1 is stopped while other")
    assert found("", frozen, frozen) == ""  # nobody runs who could wait for them
    assert found("", told(head=6), frozen) == ""  # nor does anybody wait
    excused = find_fault(together(said(within, frozen)), may_be_stopped={2, 3})
    assert excused is None


def test_a_lost_host_is_a_failure_if_others_wait_for_it() -> None:
    waits = told(waits=[5, 1.0, 0.0])
    assert found("", waits, told(head=4)) == ""
    assert found("lost", waits, told(head=4)).startswith(
        "lost: Rank 2 on host1 and its host are unreachable while other ranks wait"
    )
    assert found("died", waits, told(head=4)).startswith(
        "lost: Rank 2 on host1 died while other ranks waited"
    )
    assert found("died", waits, told("ended", head=4)).startswith(
        "left: "
    )  # it has told that before
    never = together({0: said(waits)[0], 1: HostState()}, {1: ("lost", "")})
    assert find_fault(never) is not None  # it has never said anything
    rows = together({}, {1: ("lost", "for 30 s")}).rows
    assert [(rank, row.state) for rank, row in rows.items()] == [(2, "lost"), (3, "lost")]


def test_slow_ranks_are_named() -> None:
    states = said(told(waits=[5, 6.0, 0.0]), told(head=4))
    assert [(late, waiting.ranks) for _, waiting, late in find_stragglers(together(states))] == [
        ([2, 3], [0, 1])
    ]


class Store:
    underlying_store = None  # no connection to clone

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.messages = 0

    def set(self, key: str, value: str) -> None:
        self.values[key], self.messages = value, self.messages + 1

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.messages += 1
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def set_timeout(self, timeout: timedelta) -> None:
        assert timeout <= timedelta(seconds=5)  # the watch goes on without a store


def test_each_host_sends_two_messages_a_round_and_the_first_receives_all() -> None:
    store = Store()
    exchanges = [StateExchange(store, number, 125) for number in range(125)]
    for exchange in exchanges:
        exchange.initialize()
    store.messages = 0
    for number, exchange in enumerate(exchanges):
        exchange.publish(HostState(ranks=[to_row(RankStatus(number, "runs"))]))
    heard = [exchange.poll() for exchange in exchanges]
    assert store.messages == 250
    assert [len(values) for _, values in heard] == [125] + [1] * 124
    assert JobStates([], {7: heard[0][1][7]}).rows == {7: RankStatus(7, "runs")}
    assert exchanges[7].publish_report("first") == "first"
    assert exchanges[8].publish_report("second") == "first"
    assert {exchange.poll()[0] for exchange in exchanges} == {"first"}


def report(sentence: str) -> Report:
    return Report("lost", sentence, (), (1,), (), "", "", 0.0, "")


def test_the_first_report_of_any_host_is_that_of_all(tmp_path: Path) -> None:
    store = Store()
    job = SimpleNamespace(hosts=((0,), (1,)), store=store, heartbeat=None)
    limits = SimpleNamespace(heartbeat_s=30.0)
    states = [SimpleNamespace(rendezvous=job, rank=rank, limits=limits) for rank in (0, 1)]
    one, two = (CrossHost(cast("Any", state), []) for state in states)
    assert one.publish_report(report("first")) == report("first")
    session = SimpleNamespace(
        state=SimpleNamespace(error=None, folder=tmp_path),
        poll_report=lambda: False,
        cross_host=two,
        make_report=lambda finding: report(finding.sentence),
    )
    taken: list[Report] = []
    session.adopt_report = taken.append
    Session.fail(cast("Any", session), Finding("lost", "it follows from the first", ()))
    assert read(tmp_path / "report.json") == report("first")
    assert taken == [report("first")]  # also where the file cannot be read back
    store.values["report"] = "damaged"
    assert two.publish_report(report("second")) == report("second")
