"""The launchers of several hosts: how they meet, what each learns of the others, and what the loss
of one is called.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep.errors import ConfigError, LockstepError, WorkerError
from lockstep.job.connection import Connection
from lockstep.job.messages import Failure, HostDescription
from lockstep.launcher.coordinator import Round
from lockstep.launcher.host_rendezvous import listen_for_hosts
from lockstep.launcher.links import FixedHosts, HostHello, OneHost, Wire
from lockstep.launcher.options import JobOptions
from lockstep.launcher.remote_hosts.host_description import check_compatible, describe_host
from lockstep.stores import LOOPBACK

LIMIT = 60.0


def config(**given: Any) -> JobOptions:
    return JobOptions(
        ("train.py",), **{"nnodes": 2, "master_addr": LOOPBACK, "start_timeout": LIMIT, **given}
    )


def described(host: str, **given: Any) -> HostDescription:
    return HostDescription(
        **{"host": host, "lockstep": "1", "torch": "2", "python": "3.11", "workers": 2, **given}
    )


def failure(rank: int, at: int, host: str = "") -> Failure:
    return Failure(rank, at, "ValueError", f"of {rank}", f"trace of {rank}", 3, host)


def meet(descriptions: Sequence[HostDescription], **given: Any) -> list[FixedHosts | str]:
    """Let so many hosts meet; returns each one, or its error."""
    nodes = len(descriptions)
    with ThreadPoolExecutor(nodes) as pool:
        listener = listen_for_hosts(LOOPBACK, 0)
        port = int(listener.getsockname()[1])

        def one(node: int) -> FixedHosts | str:
            hosts = FixedHosts(LOOPBACK, port, node, nodes)
            try:
                hosts.meet(descriptions[node], config(**given), listener if node == 0 else None)
            except LockstepError as error:
                hosts.close()
                return str(error)
            return hosts

        return list(pool.map(one, range(nodes)))


@contextmanager
def met(count: int) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        found: list[Any] = meet([described(chr(ord("a") + node)) for node in range(count)])
        for each in found:
            stack.callback(each.close)
        yield found


def turn_until(hosts: Sequence[FixedHosts], is_done: Callable[[], bool]) -> list[list[str]]:
    """Let the loops of these launchers turn; returns what each has to say."""
    said: list[list[str]] = [[] for _ in hosts]
    deadline = time.monotonic() + LIMIT
    while not is_done():
        assert time.monotonic() < deadline
        for number, each in enumerate(hosts):
            each.turn(0.005)
            said[number] += each.tick()
    return said


def join_all(hosts: Sequence[FixedHosts], count: int = 2) -> None:
    for each in hosts:
        each.join(count + each.node)
    turn_until(hosts, lambda: all(each.place is not None for each in hosts))


# --- one host
# --------------------------------------------------------------------------------------------------


def test_one_host_waits_for_nobody_and_has_a_store_of_its_own_for_each_start() -> None:
    alone = OneHost()
    ports = []
    for number in range(2):
        alone.join(3)
        assert alone.place is not None
        ports.append(alone.place.port)
        assert alone.place == Round(number, 0, 3, ports[-1])
        store = TCPStore(LOOPBACK, ports[-1], is_master=False)
        assert not store.check(["address of rank 0"])
        store.set("address of rank 0", "old")
    alone.done()
    assert alone.all_done and not alone.reason and alone.tick() == []
    alone.close()


# --- meeting
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "given", "said"),
    [
        ({"torch": "2.1"}, {}, "torch on all hosts, got 2 on a, 2.1 on b"),
        ({"lockstep": "0"}, {}, "lockstep on all hosts, got 1 on a, 0 on b"),
        ({"python": "3.10"}, {}, "python on all hosts"),
        ({"problem": "no script"}, {}, r"\(b\), got no script"),
        ({}, {"debug_rank": 4}, "debug_rank: expected a rank from 0 to 3"),
    ],
)
def test_all_hosts_get_the_same_verdict(
    other: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    verdicts = meet([described("a"), described("b", **other)], **given)
    assert len(set(verdicts)) == 1
    assert isinstance(verdicts[0], str) and re.search(said, verdicts[0])


def test_hosts_that_can_run_the_program_together_have_one_clock() -> None:
    with met(2) as (first, second):
        assert first.clock_offset_ns == 0 and abs(second.clock_offset_ns) < 5e9


def test_a_host_that_does_not_come_is_named() -> None:
    listener = listen_for_hosts(LOOPBACK, 0)
    hosts = FixedHosts(LOOPBACK, 1, 0, 3)
    with pytest.raises(LockstepError, match=r"of 3 nodes, these did not join within 0\.1 s: 1, 2"):
        hosts.meet(described("a"), config(start_timeout=0.1), listener)
    hosts.close()


def test_a_number_that_two_hosts_have_is_refused() -> None:
    with ThreadPoolExecutor(3) as pool:
        listener = listen_for_hosts(LOOPBACK, 0)
        port = int(listener.getsockname()[1])
        first, *others = (FixedHosts(LOOPBACK, port, node, 3) for node in (0, 1, 1, 2))
        meeting = pool.submit(first.meet, described("a"), config(), listener)
        results = [pool.submit(each.meet, described("b"), config(), None) for each in others[:2]]
        while not any(each.done() for each in results):
            time.sleep(0.01)
        (refused,) = [each for each in results if each.done()]
        with pytest.raises(
            ConfigError, match="node_rank: expected a number that no other host has, got 1"
        ):
            refused.result()
        others[2].meet(described("c"), config(), None)
        meeting.result(LIMIT)
        (accepted,) = [each for each in results if each is not refused]
        accepted.result(LIMIT)  # who is closed before it has met leaves its connection open
        for each in (first, *others):
            each.close()


def test_the_launcher_of_the_first_host_may_come_later_but_not_too_late() -> None:
    with socket.create_server((LOOPBACK, 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"free on the first host, got {port}"):
            listen_for_hosts(LOOPBACK, port)
    with (
        closing(FixedHosts(LOOPBACK, port, 1, 2)) as late,
        pytest.raises(ConfigError, match=r"answers within 0\.1 s"),
    ):
        late.meet(described("b"), config(start_timeout=0.1), None)
    with ThreadPoolExecutor(1) as pool:
        second = FixedHosts(LOOPBACK, port, 1, 2)
        later = pool.submit(second.meet, described("b"), config(), None)
        first = FixedHosts(LOOPBACK, port, 0, 2)
        first.meet(described("a"), config(), listen_for_hosts(LOOPBACK, port))
        later.result(LIMIT)
        for each in (first, second):
            each.close()
    for address in ("no.such.name.invalid", "x" * 70):
        lost = FixedHosts(address, port, 1, 2)
        with closing(lost), pytest.raises(ConfigError, match="name that this host can resolve"):
            lost.meet(described("b"), config(), None)


def test_who_does_not_know_the_key_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen_for_hosts(LOOPBACK, 0)
    port = int(listener.getsockname()[1])
    monkeypatch.setenv("LOCKSTEP_JOB_KEY", "secret")
    first, second = (FixedHosts(LOOPBACK, port, node, 2) for node in (0, 1))
    monkeypatch.setenv("LOCKSTEP_JOB_KEY", "guessed")
    stranger = FixedHosts(LOOPBACK, port, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(first.meet, described("a"), config(), listener)
        with pytest.raises(
            LockstepError, match="is no launcher of the job, has another key, or has just ended"
        ):
            stranger.meet(described("x"), config(), None)
        second.meet(described("b"), config(), None)
        meeting.result(LIMIT)
    for each in (first, second, stranger):
        each.close()


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\2\xc1\xc1", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b""]
)
def test_strangers_do_not_keep_a_job_from_starting(data: bytes) -> None:
    listener = listen_for_hosts(LOOPBACK, 0)
    port = int(listener.getsockname()[1])
    first, second = (FixedHosts(LOOPBACK, port, node, 2) for node in (0, 1))
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        meeting = pool.submit(first.meet, described("a"), config(), listener)
        for _ in range(100):
            end = stack.enter_context(socket.create_connection((LOOPBACK, port)))
            end.send(data)
        second.meet(described("b"), config(), None)
        meeting.result(LIMIT)
    for each in (first, second):
        each.close()


def test_a_replayed_proof_is_worth_nothing_and_nobody_is_let_in_later() -> None:
    listener = listen_for_hosts(LOOPBACK, 0)
    port = int(listener.getsockname()[1])
    first, second, third = (FixedHosts(LOOPBACK, port, node, 3) for node in range(3))
    seen: list[HostHello] = []
    greet = first._greet

    def spy(link: Any, hello: Any) -> None:
        seen.append(hello)
        greet(link, hello)

    first._connections._on_hello = spy
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        meeting = [pool.submit(first.meet, described("a"), config(), listener)]
        meeting.append(pool.submit(second.meet, described("b"), config(), None))
        while not seen:
            time.sleep(0.01)
        end = stack.enter_context(socket.create_connection((LOOPBACK, port)))
        replayed: Connection[Any, Any] = Connection(end, Wire)
        assert isinstance(replayed.receive(), HostHello)
        replayed.send(replace(seen[0], node=2))
        assert replayed.receive() is None
        third.meet(described("c"), config(), None)
        for each in meeting:
            each.result(LIMIT)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port))
    for hosts in (first, second, third):
        hosts.close()


def test_a_host_describes_itself() -> None:
    here = describe_host(3, "why", "10.0.0.1 50000 10.0.0.2 22")
    assert (here.host, here.workers, here.problem) == (socket.gethostname(), 3, "why")
    assert (here.caller, here.address) == ("10.0.0.1", "10.0.0.2")
    assert (describe_host(1).caller, describe_host(1).address) == ("", "")
    assert here.lockstep != "unknown" != here.torch
    check_compatible([replace(here, problem=""), replace(here, problem="", host="b")])


# --- starts
# --------------------------------------------------------------------------------------------------


def test_all_hosts_have_the_same_store_and_its_workers_find_nothing_old() -> None:
    with met(3) as hosts:
        join_all(hosts)
        port = hosts[0].place.port
        assert [each.place for each in hosts] == [Round(0, first, 9, port) for first in (0, 2, 5)]
        TCPStore(LOOPBACK, port, is_master=False).set("address of rank 0", "old")
        hosts[2].join(4)
        turn_until(hosts, lambda: hosts[0].next_is_open and hosts[1].next_is_open)
        assert not hosts[2].next_is_open
        for each in hosts[:2]:
            each.join(2 + each.node)
        turn_until(hosts, lambda: all(each.place is not None for each in hosts))
        again = hosts[0].place.port
        assert [each.place for each in hosts] == [Round(1, first, 9, again) for first in (0, 2, 5)]
        assert not TCPStore(LOOPBACK, again, is_master=False).check(["address of rank 0"])


def test_all_hosts_know_when_all_have_finished() -> None:
    with met(2) as hosts:
        join_all(hosts)
        hosts[1].done()
        hosts[0].turn(0.1)
        assert not hosts[0].all_done
        hosts[0].done()
        turn_until(hosts, lambda: all(each.all_done for each in hosts))
        hosts[0].close()  # which may be faster
        turn_until(hosts[1:], lambda: not hosts[1]._connections.of_host)
        assert not hosts[1].is_disconnected and not hosts[1].reason


# --- ends
# --------------------------------------------------------------------------------------------------


def test_a_failure_on_one_host_ends_the_others_and_all_name_the_earliest() -> None:
    with met(3) as hosts, ThreadPoolExecutor(3) as pool:
        join_all(hosts)
        later = pool.submit(hosts[1].end, failure(1, 20, "b"), LIMIT)
        turn_until([hosts[0], hosts[2]], lambda: bool(hosts[0].reason and hosts[2].reason))
        assert hosts[2].reason == "another host's workers have failed" and hosts[
            2
        ].failure == failure(1, 20, "b")
        ended = [
            later,
            pool.submit(hosts[2].end, failure(2, 10, "c"), LIMIT),
            pool.submit(hosts[0].end, None, LIMIT),
        ]
        found = [each.result(LIMIT) for each in ended]
    assert (
        found
        == [replace(failure(2, 10, "c"), others="rank 1 on b failed later with ValueError")] * 3
    )


def test_who_takes_too_long_to_end_is_not_waited_for() -> None:
    with met(2) as hosts, ThreadPoolExecutor(1) as pool:
        join_all(hosts)
        ending = pool.submit(hosts[1].end, failure(1, 20, "b"), 0.1)
        assert ending.result(LIMIT) == failure(1, 20, "b")
        assert hosts[0].end(failure(0, 10, "a"), LIMIT) is not None


@pytest.mark.parametrize("gone", [0, 1])
def test_a_killed_launcher_is_noticed_at_once(gone: int) -> None:
    with met(2) as hosts:
        join_all(hosts)
        left = hosts[1 - gone]
        (link,) = hosts[gone]._connections.of_host.values()
        link.connection.socket.shutdown(socket.SHUT_RDWR)  # as its kernel does
        turn_until([left], lambda: bool(left.reason))
        reasons = [f"the first host ({LOOPBACK}) no longer answers", "the launcher on b has ended"]
        assert left.reason == reasons[gone]
        assert left.is_disconnected == (gone == 0)
        assert left.end(failure(1 - gone, 1), LIMIT) == failure(1 - gone, 1)


def test_a_host_whose_kernel_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with met(2) as hosts:
        join_all(hosts)
        link = hosts[0]._connections.of_host[1]

        def time_out(_: float) -> Any:
            raise TimeoutError(110, "Connection timed out")

        monkeypatch.setattr(link.connection, "receive_available", time_out)
        hosts[1].ping()
        turn_until(hosts[:1], lambda: bool(hosts[0].reason))
        assert hosts[0].reason == "no heartbeat from b for 30 s"


@pytest.mark.parametrize("hung", [0, 1])
def test_a_launcher_that_hangs_is_said_and_then_out(
    hung: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_LAUNCHER_TIMEOUT", "1")
    with met(2) as hosts:
        join_all(hosts)
        other = hosts[1 - hung]
        said = turn_until([other], lambda: bool(other.reason))[0] + other.tick()
        name = "b" if hung else LOOPBACK
        reason = f"the launcher of host {name} has not answered for 1 s (LOCKSTEP_LAUNCHER_TIMEOUT)"
        assert said == [f"the launcher of host {name} has not answered for 0.5 s", reason]
        assert other.reason == reason and other.is_disconnected == (hung == 0)


def test_a_launcher_that_pings_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_LAUNCHER_TIMEOUT", "1")
    with met(2) as hosts:
        join_all(hosts)
        stop = threading.Event()

        def ping() -> None:
            while not stop.wait(0.05):
                for each in hosts:
                    each.ping()

        pinging = threading.Thread(target=ping)
        pinging.start()
        begun = time.monotonic()
        said = turn_until(hosts, lambda: time.monotonic() - begun > 2.5)
        stop.set()
        pinging.join()
        assert said == [[], []] and not hosts[0].reason and not hosts[1].reason


def test_a_host_that_has_left_while_others_go_on_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1")
    with met(2) as hosts:
        join_all(hosts)
        assert hosts[1].end(None, LIMIT) is None
        hosts[1].close()
        turn_until(hosts[:1], lambda: bool(hosts[0].reason))
        assert hosts[0].reason == "the launcher on b has ended"


def test_the_signal_of_one_launcher_is_known_to_all() -> None:
    with met(2) as hosts:
        hosts[1].interrupt(2)
        turn_until(hosts, lambda: all(each.interruption is not None for each in hosts))
        assert (
            hosts[0].interruption.host == socket.gethostname() and hosts[0].interruption.count == 2
        )


def test_a_failure_travels_as_it_is_and_on_the_common_clock() -> None:
    error = WorkerError(3, "ValueError", "no", "trace", 7)
    error.time, error.others = 1000, "rank 2 failed"
    sent = Failure.from_error(error, "b", clock_offset_ns=100)
    assert (sent.host, sent.time, sent.others) == ("b", 900, "rank 2 failed")
    back = sent.as_error()
    assert (back.rank, back.exit_code, back.host, str(back)) == (3, 7, "b", str(back))
    assert str(back).startswith("rank 3 on b: ValueError: no\n(rank 2 failed)\n\ntrace")
    assert Failure.earliest([]) is None
