"""How launchers of several hosts rendezvous, compare themselves and detect lost hosts: nodes are threads here."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed import TCPStore

from lockstep.errors import ConfigError, LockstepError, WorkerError
from lockstep.launcher import rendezvous
from lockstep.launcher.host_protocol import HostDescription, HostFailure, check_compatible, describe_host
from lockstep.launcher.options import JobOptions
from lockstep.launcher.rendezvous import (
    HostRendezvous,
    check_hosts,
    join_rendezvous,
    serve_job_store,
    single_host_rendezvous,
)
from lockstep.stores import LOOPBACK

LIMIT = 20.0


@contextmanager
def nodes(count: int) -> Iterator[list[HostRendezvous]]:
    """The rendezvous of `count` nodes."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    stores = [store, *(TCPStore(LOOPBACK, store.port, is_master=False) for _ in range(count - 1))]
    yield [HostRendezvous(each, LOOPBACK, node, count) for node, each in enumerate(stores)]


def all_at_once(members: list[HostRendezvous], call: Callable[[HostRendezvous], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [future.result(LIMIT) for future in [pool.submit(call, each) for each in members]]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failure(rank: int, at: int, host: str = "a") -> HostFailure:
    return HostFailure(rank, "ValueError", f"of {rank}", f"trace of {rank}", 3, host, "", at)


# --- rounds ---------------------------------------------------------------------------------------------------


def test_all_nodes_are_in_the_same_round_and_its_workers_find_nothing_old() -> None:
    with nodes(3) as members, ExitStack() as stack:
        first = all_at_once(members, HostRendezvous.next_rendezvous)
        assert [(info.rank, info.world_size) for info in first] == [(0, 3), (1, 3), (2, 3)]
        for each in members:
            stack.enter_context(each.monitored())
        before = first[0].bootstrap_store_info.master_port
        TCPStore(LOOPBACK, before, is_master=False).set("address of rank 0", "old")
        with ThreadPoolExecutor(3) as pool:
            opened = pool.submit(members[2].next_rendezvous)
            wait_until(lambda: all(each.num_nodes_waiting() for each in members[:2]))
            second = [*pool.map(HostRendezvous.next_rendezvous, members[:2]), opened.result(LIMIT)]
        assert [each.round for each in members] == [1, 1, 1]
        ports = {info.bootstrap_store_info.master_port for info in second}
        assert len(ports) == 1
        assert not TCPStore(LOOPBACK, ports.pop(), is_master=False).check(["address of rank 0"])


def test_nodes_that_fail_at_the_same_time_open_one_round() -> None:
    with nodes(3) as members:
        for expected in range(3):
            all_at_once(members, HostRendezvous.next_rendezvous)
            assert [each.round for each in members] == [expected] * 3


def test_workers_are_not_restarted_after_others_have_finished_or_the_wait_is_aborted() -> None:
    with nodes(2) as (first, second):
        all_at_once([first, second], HostRendezvous.next_rendezvous)
        second.stopping.set()
        second.finish()
        with pytest.raises(LockstepError, match="have finished already"):
            first.next_rendezvous()
    with nodes(2) as (first, _):
        first.stopping.set()
        with pytest.raises(LockstepError, match="stopped waiting for the other hosts"):
            first.next_rendezvous()


def test_one_host_waits_for_no_other() -> None:
    alone = single_host_rendezvous()
    assert alone.next_rendezvous().world_size == 1
    with alone.monitored():
        alone.finish()
        assert (alone.failure_reason(), alone.num_nodes_waiting()) == ("", 0)


# --- ends -----------------------------------------------------------------------------------------------------


def test_a_failure_on_one_node_ends_the_others_and_all_name_the_earliest() -> None:
    with nodes(3) as members, ExitStack() as stack:
        for each in members:
            stack.enter_context(each.monitored())
        own = [None, failure(1, 20, "b"), failure(2, 10, "c")]
        waiting = threading.Thread(target=members[0].finish)
        waiting.start()
        with ThreadPoolExecutor(3) as pool:
            later = pool.submit(members[1].first_failure, own[1], LIMIT)
            waiting.join(LIMIT)
            assert not waiting.is_alive()
            wait_until(lambda: bool(members[0].failure_reason()))
            assert "failed" in members[0].failure_reason()
            ended = [later, *(pool.submit(members[node].first_failure, own[node], LIMIT) for node in (2, 0))]
            found = [each.result(LIMIT) for each in ended]
        assert found == [replace(failure(2, 10, "c"), others="rank 1 on b failed later with ValueError")] * 3


def state_of(member: HostRendezvous, node: int) -> str:
    """The state of another node; `failure_reason` updates it."""
    member.failure_reason()
    liveness: Any = member._monitor and member._monitor._liveness
    heartbeat = liveness._heartbeat
    return "unknown" if heartbeat is None else str(heartbeat.state(node))


def test_a_node_that_has_left_while_others_continue_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1")
    with nodes(2) as (first, second), first.monitored():
        with second.monitored():
            wait_until(lambda: state_of(first, 1) == state_of(second, 0) == "alive")
        wait_until(lambda: state_of(first, 1) == "left")
        wait_until(lambda: bool(first.failure_reason()))
        assert first.failure_reason() == f"no heartbeat from {socket.gethostname()} for 1 s"


@pytest.mark.parametrize("gone", [0, 1])
def test_a_killed_launcher_is_detected_at_once_and_a_busy_one_is_not(gone: int) -> None:
    with nodes(2) as members, members[0].monitored(), members[1].monitored():
        left = members[1 - gone]
        wait_until(lambda: state_of(left, gone) == state_of(members[gone], 1 - gone) == "alive")
        liveness: Any = members[gone]._monitor and members[gone]._monitor._liveness
        liveness._heartbeat.close_in_child()  # as its kernel does
        wait_until(lambda: bool(left.failure_reason()))
        names = [f"the first host ({LOOPBACK}) no longer answers", f"on {socket.gethostname()} has ended"]
        assert names[gone] in left.failure_reason()


def test_nodes_that_can_only_reach_the_store_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1")
    monkeypatch.setattr(
        rendezvous.HeartbeatServer, "listen_for", lambda self, address: "127.0.0.1 1"
    )  # nobody listens there
    with nodes(2) as (first, second), first.monitored(), second.monitored():
        all_at_once([first, second], HostRendezvous.next_rendezvous)
        wait_until(lambda: state_of(second, 0) == "unknown" and first.store.check(["unreachable/1"]))
        begin = time.monotonic()
        while time.monotonic() - begin < 2:
            assert (first.failure_reason(), second.failure_reason()) == ("", "")
            time.sleep(0.05)


class UnresponsiveStore:
    """A store that would not answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> None:
        self.asked.append(name)


def test_a_first_node_that_does_not_answer_is_not_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1e-9")
    with nodes(2) as (first, second), second.monitored():
        wait_until(lambda: first.store.check(["address/1"]))
        assert second.failure_reason() == f"the first host ({LOOPBACK}) no longer answers"
        second.store = unresponsive = UnresponsiveStore()
        assert second.first_failure(failure(1, 1), LIMIT) == failure(1, 1)
    assert unresponsive.asked == []


@pytest.mark.parametrize("hung", [0, 1])
def test_a_launcher_that_hangs_is_said_and_then_out(hung: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_LAUNCHER_TIMEOUT", "1")
    monkeypatch.setattr(rendezvous, "_EXCHANGE_S", 0.01)
    with nodes(2) as members, ExitStack() as stack:
        members[hung].beats = lambda: False
        for each in members:
            stack.enter_context(each.monitored())
        notes: list[str] = []

        def is_out() -> bool:
            reason = members[1 - hung].failure_reason()
            notes.extend(members[1 - hung].take_notes())
            return bool(reason)

        wait_until(is_out)
        name = socket.gethostname()
        reason = members[1 - hung].failure_reason()
        assert notes == [f"the launcher of host {name} has not answered for 0.5 s", reason]
        assert reason == f"the launcher of host {name} has not answered for 1 s (LOCKSTEP_LAUNCHER_TIMEOUT)"
        assert members[1]._monitor is not None and members[1]._monitor.is_disconnected == (hung == 0)


def test_a_node_that_is_lost_before_it_connects_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "0.5")
    with nodes(2) as (first, second), first.monitored():
        all_at_once([first, second], HostRendezvous.next_rendezvous)
        wait_until(lambda: bool(first.failure_reason()))
        assert first.failure_reason().startswith("no heartbeat from node 1")


def test_a_failure_travels_as_it_is_and_on_the_common_clock() -> None:
    error = WorkerError(3, "ValueError", "no", "trace", 7)
    error.time, error.others = 1000, "rank 2 failed"
    sent = HostFailure.from_error(error, "b", clock_offset_ns=100)
    assert (sent.host, sent.time, sent.others) == ("b", 900, "rank 2 failed")
    back = sent.as_error()
    assert (back.rank, back.exit_code, back.host, str(back)) == (3, 7, "b", str(back))
    assert str(back).startswith("rank 3 on b: ValueError: no\n(rank 2 failed)\n\ntrace")
    assert HostFailure.earliest([]) is None


# --- comparing the hosts ----------------------------------------------------------------------------------------------


def config(**given: Any) -> JobOptions:
    return JobOptions(("train.py",), **{"nnodes": 2, "master_addr": LOOPBACK, "start_timeout": 5.0, **given})


def described(host: str, **given: Any) -> HostDescription:
    return HostDescription(**{"host": host, "lockstep": "1", "torch": "2", "python": "3.11", "workers": 2, **given})


def call(members: list[HostRendezvous], here: list[HostDescription], **given: Any) -> list[str]:
    def ask(each: HostRendezvous) -> str:
        try:
            check_hosts(each, here[each.node], config(**given))
        except LockstepError as error:
            return str(error)
        return ""

    return all_at_once(members, ask)


@pytest.mark.parametrize(
    ("other", "given", "said"),
    [
        ({}, {}, ""),
        ({"torch": "2.1"}, {}, "torch on all hosts, got 2 on a, 2.1 on b"),
        ({"lockstep": "0"}, {}, "lockstep on all hosts, got 1 on a, 0 on b"),
        ({"python": "3.10"}, {}, "python on all hosts"),
        ({"problem": "no script"}, {}, r"\(b\), got no script"),
        ({}, {"debug_rank": 4}, "debug_rank: expected a rank from 0 to 3"),
    ],
)
def test_all_nodes_get_the_same_verdict(other: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with nodes(2) as members:
        verdicts = call(members, [described("a"), described("b", **other)], **given)
        assert len(set(verdicts)) == 1
        assert re.search(said, verdicts[0]) if said else not verdicts[0]
        assert abs(members[1].clock_offset_ns) < 5e9


def test_a_node_that_does_not_join_is_named_and_so_is_a_duplicate_number() -> None:
    with nodes(2) as members:
        assert call(members[:1], [described("a")], start_timeout=0.1)[0].endswith("did not join within 0.1 s: 1")
        assert "no other host has" in call(members[:1], [described("c")], start_timeout=0.1)[0]


def test_the_launcher_of_the_first_node_may_come_later_but_not_too_late() -> None:
    with socket.create_server((LOOPBACK, 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"free on the first host, got {port}"):
            serve_job_store(LOOPBACK, port, config())
    with pytest.raises(ConfigError, match=r"answers within 0\.1 s"):
        join_rendezvous(config(node_rank=1, start_timeout=0.1), LOOPBACK, port)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(join_rendezvous, config(node_rank=1), LOOPBACK, port)
        first = join_rendezvous(config(), LOOPBACK, port)
        later.result(LIMIT).store.set("there", "1")
        assert first.wait_for(["there"], LIMIT)
    with pytest.raises(ConfigError, match="name that this host can resolve"):
        join_rendezvous(config(node_rank=1), "no.such.name.invalid", port)


def test_a_host_describes_itself() -> None:
    here = describe_host(3, "why", "10.0.0.1 50000 10.0.0.2 22")
    assert (here.host, here.workers, here.problem) == (socket.gethostname(), 3, "why")
    assert (here.caller, here.address) == ("10.0.0.1", "10.0.0.2")
    assert (describe_host(1).caller, describe_host(1).address) == ("", "")
    assert here.lockstep != "unknown" != here.torch
    check_compatible([replace(here, problem=""), replace(here, problem="", host="b")])
