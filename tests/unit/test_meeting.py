"""How launchers of several machines meet, agree and notice that one has gone: nodes as threads around one store."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import TCPStore

from lockstep.errors import ConfigError, LockstepError, WorkerError
from lockstep.launchers import pulse
from lockstep.launchers.choices import Choices
from lockstep.launchers.failure import Failure
from lockstep.launchers.meet import call_the_roll, meet, serve
from lockstep.launchers.meeting import LOOPBACK, Meeting, one_machine
from lockstep.launchers.roll_call import Description, compare, describe_here

LIMIT = 20.0


@contextmanager
def nodes(count: int) -> Iterator[list[Meeting]]:
    """The meetings of `count` nodes."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    stores = [store, *(TCPStore(LOOPBACK, store.port, is_master=False) for _ in range(count - 1))]
    yield [Meeting(each, LOOPBACK, node, count) for node, each in enumerate(stores)]


def all_at_once(meetings: list[Meeting], call: Callable[[Meeting], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(meetings)) as pool:
        return [future.result(LIMIT) for future in [pool.submit(call, each) for each in meetings]]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failure(rank: int, at: int, host: str = "a") -> Failure:
    return Failure(rank, "ValueError", f"of {rank}", f"trace of {rank}", 3, host, "", at)


# --- rounds ---------------------------------------------------------------------------------------------------


def test_all_nodes_are_in_the_same_round_and_its_workers_find_nothing_old() -> None:
    with nodes(3) as meetings, ExitStack() as stack:
        first = all_at_once(meetings, Meeting.next_rendezvous)
        assert [(info.rank, info.world_size) for info in first] == [(0, 3), (1, 3), (2, 3)]
        for each in meetings:
            stack.enter_context(each.kept())
        before = first[0].bootstrap_store_info.master_port
        TCPStore(LOOPBACK, before, is_master=False).set("address of rank 0", "old")
        with ThreadPoolExecutor(3) as pool:
            opened = pool.submit(meetings[2].next_rendezvous)
            wait_until(lambda: all(each.num_nodes_waiting() for each in meetings[:2]))
            second = [*pool.map(Meeting.next_rendezvous, meetings[:2]), opened.result(LIMIT)]
        assert [each.round for each in meetings] == [1, 1, 1]
        ports = {info.bootstrap_store_info.master_port for info in second}
        assert len(ports) == 1
        assert not TCPStore(LOOPBACK, ports.pop(), is_master=False).check(["address of rank 0"])


def test_nodes_that_fail_at_the_same_time_open_one_round() -> None:
    with nodes(3) as meetings:
        for expected in range(3):
            all_at_once(meetings, Meeting.next_rendezvous)
            assert [each.round for each in meetings] == [expected] * 3


def test_nobody_starts_afresh_when_others_have_finished_or_the_wait_is_given_up() -> None:
    with nodes(2) as (first, second):
        all_at_once([first, second], Meeting.next_rendezvous)
        second.stopping.set()
        second.finish()
        with pytest.raises(LockstepError, match="have finished already"):
            first.next_rendezvous()
    with nodes(2) as (first, _):
        first.stopping.set()
        with pytest.raises(LockstepError, match="not waited for"):
            first.next_rendezvous()


def test_one_machine_meets_nobody() -> None:
    alone = one_machine()
    assert alone.next_rendezvous().world_size == 1
    with alone.kept():
        alone.finish()
        assert (alone.keep_in_touch(), alone.num_nodes_waiting()) == ("", 0)


# --- ends -----------------------------------------------------------------------------------------------------


def test_a_failure_on_one_node_ends_the_others_and_all_name_the_earliest() -> None:
    with nodes(3) as meetings, ExitStack() as stack:
        for each in meetings:
            stack.enter_context(each.kept())
        own = [None, failure(1, 20, "b"), failure(2, 10, "c")]
        waiting = threading.Thread(target=meetings[0].finish)
        waiting.start()
        with ThreadPoolExecutor(3) as pool:
            later = pool.submit(meetings[1].first_failure, own[1], LIMIT)
            waiting.join(LIMIT)
            assert not waiting.is_alive()
            wait_until(lambda: bool(meetings[0].keep_in_touch()))
            assert "failed" in meetings[0].keep_in_touch()
            ended = [later, *(pool.submit(meetings[node].first_failure, own[node], LIMIT) for node in (2, 0))]
            found = [each.result(LIMIT) for each in ended]
        assert found == [replace(failure(2, 10, "c"), others="rank 1 on b failed after that with ValueError")] * 3


def life_of(meeting: Meeting, node: int) -> str:
    """What is known of another node; `keep_in_touch` looks for news."""
    meeting.keep_in_touch()
    lives: Any = meeting._pulse and meeting._pulse._lives
    heartbeat = lives._spoke if isinstance(lives, pulse._FirstNode) else lives._hub
    return "unknown" if heartbeat is None else str(heartbeat.life(node))


def test_a_node_that_has_left_while_others_go_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1")
    with nodes(2) as (first, second), first.kept():
        with second.kept():
            wait_until(lambda: life_of(first, 1) == life_of(second, 0) == "lives")
        wait_until(lambda: life_of(first, 1) == "left")
        wait_until(lambda: bool(first.keep_in_touch()))
        assert first.keep_in_touch() == f"nothing was heard of {socket.gethostname()} for 1 s"


@pytest.mark.parametrize("gone", [0, 1])
def test_a_launcher_that_is_killed_is_noticed_at_once_and_one_that_is_busy_is_none(gone: int) -> None:
    with nodes(2) as meetings, meetings[0].kept(), meetings[1].kept():
        left = meetings[1 - gone]
        wait_until(lambda: life_of(left, gone) == life_of(meetings[gone], 1 - gone) == "lives")
        lives: Any = meetings[gone]._pulse and meetings[gone]._pulse._lives
        (lives._spoke if gone else lives._hub).abandon()  # as its kernel does
        wait_until(lambda: bool(left.keep_in_touch()))
        names = [f"the first host ({LOOPBACK}) does not answer any more", f"on {socket.gethostname()} is gone"]
        assert names[gone] in left.keep_in_touch()


def test_nodes_that_can_only_reach_the_store_are_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1")
    monkeypatch.setattr(pulse.Hub, "open_towards", lambda self, address: "127.0.0.1 1")  # nobody listens there
    with nodes(2) as (first, second), first.kept(), second.kept():
        all_at_once([first, second], Meeting.next_rendezvous)
        wait_until(lambda: life_of(second, 0) == "unknown" and first.store.check(["beyond reach/1"]))
        begin = time.monotonic()
        while time.monotonic() - begin < 2:
            assert (first.keep_in_touch(), second.keep_in_touch()) == ("", "")
            time.sleep(0.05)


class Deaf:
    """A store that would not answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> None:
        self.asked.append(name)


def test_a_first_node_that_does_not_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "1e-9")
    with nodes(2) as (first, second), second.kept():
        wait_until(lambda: first.store.check(["address/1"]))
        assert second.keep_in_touch() == f"the first host ({LOOPBACK}) does not answer any more"
        second.store = deaf = Deaf()
        assert second.first_failure(failure(1, 1), LIMIT) == failure(1, 1)
    assert deaf.asked == []


def test_a_node_that_is_lost_before_its_first_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "0.5")
    with nodes(2) as (first, second), first.kept():
        all_at_once([first, second], Meeting.next_rendezvous)
        wait_until(lambda: bool(first.keep_in_touch()))
        assert first.keep_in_touch().startswith("nothing was heard of node 1")


def test_a_failure_travels_as_it_is_and_on_the_common_clock() -> None:
    error = WorkerError(3, "ValueError", "no", "trace", 7)
    error.time, error.others = 1000, "rank 2 failed"
    sent = Failure.of(error, "b", ahead=100)
    assert (sent.host, sent.time, sent.others) == ("b", 900, "rank 2 failed")
    back = sent.as_error()
    assert (back.rank, back.exit_code, back.host, str(back)) == (3, 7, "b", str(back))
    assert str(back).startswith("rank 3 on b: ValueError: no\n(rank 2 failed)\n\ntrace")
    assert Failure.first([]) is None


# --- the roll call ----------------------------------------------------------------------------------------------


def choices(**given: Any) -> Choices:
    return Choices(("train.py",), **{"nnodes": 2, "master_addr": LOOPBACK, "start_timeout": 5.0, **given})


def described(host: str, **given: Any) -> Description:
    return Description(**{"host": host, "lockstep": "1", "torch": "2", "python": "3.11", "workers": 2, **given})


def call(meetings: list[Meeting], here: list[Description], **given: Any) -> list[str]:
    def ask(each: Meeting) -> str:
        try:
            call_the_roll(each, here[each.node], choices(**given))
        except LockstepError as error:
            return str(error)
        return ""

    return all_at_once(meetings, ask)


@pytest.mark.parametrize(
    ("other", "given", "said"),
    [
        ({}, {}, ""),
        ({"torch": "2.1"}, {}, "torch everywhere, got 2 on a, 2.1 on b"),
        ({"lockstep": "0"}, {}, "lockstep everywhere, got 1 on a, 0 on b"),
        ({"python": "3.10"}, {}, "python everywhere"),
        ({"problem": "no script"}, {}, r"\(b\), got no script"),
        ({}, {"debug_rank": 4}, "debug_rank: expected a rank from 0 to 3"),
    ],
)
def test_all_nodes_hear_the_same_verdict(other: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with nodes(2) as meetings:
        verdicts = call(meetings, [described("a"), described("b", **other)], **given)
        assert len(set(verdicts)) == 1
        assert re.search(said, verdicts[0]) if said else not verdicts[0]
        assert abs(meetings[1].ahead) < 5e9


def test_a_node_that_does_not_come_is_named_and_so_is_a_number_given_twice() -> None:
    with nodes(2) as meetings:
        assert call(meetings[:1], [described("a")], start_timeout=0.1)[0].endswith("not come within 0.1 s: 1")
        assert "no other machine has" in call(meetings[:1], [described("c")], start_timeout=0.1)[0]


def test_the_launcher_of_the_first_node_may_come_later_but_not_too_late() -> None:
    with socket.create_server((LOOPBACK, 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"free on the first machine, got {port}"):
            serve(LOOPBACK, port, choices())
    with pytest.raises(ConfigError, match=r"answers within 0\.1 s"):
        meet(choices(node_rank=1, start_timeout=0.1), LOOPBACK, port)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(meet, choices(node_rank=1), LOOPBACK, port)
        first = meet(choices(), LOOPBACK, port)
        later.result(LIMIT).store.set("there", "1")
        assert first.wait_for(["there"], LIMIT)
    with pytest.raises(ConfigError, match="name that can be looked up"):
        meet(choices(node_rank=1), "no.such.name.invalid", port)


def test_a_host_describes_itself() -> None:
    here = describe_here(3, "why", "10.0.0.1 50000 10.0.0.2 22")
    assert (here.host, here.workers, here.problem) == (socket.gethostname(), 3, "why")
    assert (here.caller, here.address) == ("10.0.0.1", "10.0.0.2")
    assert (describe_here(1).caller, describe_here(1).address) == ("", "")
    assert here.lockstep != "unknown" != here.torch
    compare([replace(here, problem=""), replace(here, problem="", host="b")])
