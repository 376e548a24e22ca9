"""One host of an elastic job: what it keeps while nobody leads, how it joins again, and how it
ends.
"""

from __future__ import annotations

import math
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from lockstep.elastic.membership import WorkerState
from lockstep.errors import ConfigError, LockstepError
from lockstep.job.messages import Request
from lockstep.launcher.elastic_jobs import elastic_node
from lockstep.launcher.elastic_jobs.elastic_host import ElasticHost
from lockstep.launcher.elastic_jobs.elastic_node import Listener
from lockstep.launcher.elastic_jobs.elastic_workers import ElasticSetup
from lockstep.launcher.elastic_jobs.host_messages import Ended, FromWorker, HostMessages, Kept
from lockstep.launcher.elastic_jobs.mesh import (
    NOBODY_LEADS,
    WAITS_TO_JOIN,
    NobodyLeadsError,
    WaitsToJoinError,
)
from lockstep.launcher.elastic_jobs.other_hosts import Inbox
from lockstep.launcher.elastic_jobs.waiting import OutsideError
from lockstep.launcher.handshake import HostEntry
from lockstep.launcher.host_rendezvous import listen_for_hosts
from lockstep.launcher.remote_hosts.host_description import describe_host


def ended(number: int) -> Ended:
    return Ended(number, 0, True, None)


def test_what_a_report_says_is_not_handled_again() -> None:
    inbox = Inbox()
    before: list[HostMessages] = [
        Kept(3, 1),
        FromWorker(3, WorkerState()),
        ended(3),
        Request(1, "resize", 2),
    ]
    after: list[HostMessages] = [FromWorker(4, WorkerState()), ended(4)]
    for message in before:
        inbox.add(1, message)
    inbox.mark(1)
    for message in after:
        inbox.add(1, message)
    inbox.add(2, ended(7))  # of a host without a report
    assert inbox.drop_reported() == [(1, ended(3))]
    kept = [before[0], before[3], *after]
    assert list(inbox.take()) == [*((1, message) for message in kept), (2, ended(7))]
    assert list(inbox.take()) == []


def test_a_report_is_good_for_one_time() -> None:
    inbox = Inbox()
    inbox.mark(1)
    assert list(inbox.take()) == []
    inbox.add(1, ended(3))
    assert inbox.drop_reported() == []
    assert list(inbox.take()) == [(1, ended(3))]


@dataclass
class FakeHost:
    """A host whose part ends as the test says."""

    error: Exception | None = None
    other_hosts: tuple[HostEntry, ...] = (HostEntry(4, "beta", "10.0.0.2", 4711, 1),)

    def run(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "is_final"),
    [(None, True), (LockstepError("ended"), True), (OutsideError("went on"), False)],
)
def test_a_host_listens_no_more_when_its_part_is_over(
    error: Exception | None, is_final: bool
) -> None:
    # others that still find it listening when its connections end take it for a host that is cut
    # off, and wait for it
    listener, setup = listening(), cast(ElasticSetup, SimpleNamespace(multiplexer=Mock()))
    with listener.socket:
        try:
            again = listener.take_part(cast(ElasticHost, FakeHost(error)), setup)
        except LockstepError as raised:
            assert raised is error
        else:
            assert again == ([] if is_final else [("10.0.0.2", 4711)])
        refuses = pytest.raises(ConnectionRefusedError) if is_final else nullcontext()
        with refuses:
            socket.create_connection(("127.0.0.1", listener.port), 10).close()


def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hosts that wait to join again be quick."""
    monkeypatch.setattr(elastic_node, "ALONE_S", 0.3)
    monkeypatch.setattr(elastic_node, "_RETRY_S", 0.02)


def listening(name: str = "") -> Listener:
    """A host that listens for others."""
    return Listener(listen_for_hosts("127.0.0.1", 0), "127.0.0.1", name)


def ask_again(listener: Listener, *others: tuple[str, int], pause_s: float = math.inf) -> object:
    """Ask launchers that listen at the other addresses to let a host in again."""
    return elastic_node._ask_again(list(others), listener, describe_host(1), pause_s)


def ask_in_vain(listener: Listener, *others: Listener) -> str:
    """The error with which a host that has taken part gives up to join again."""
    with pytest.raises(LockstepError) as caught:
        ask_again(listener, *((other.address, other.port) for other in others))
    return str(caught.value)


def test_hosts_that_all_wait_to_join_again_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks the others, of which none can let it in, and one is gone."""
    waiting(monkeypatch)
    listeners = [listening(name) for name in "abc"]
    gone = listening()
    gone.socket.close()
    with ThreadPoolExecutor(3) as pool:
        ends = [
            pool.submit(
                ask_in_vain, own, *(other for other in (*listeners, gone) if other is not own)
            )
            for own in listeners
        ]
        texts = [end.result(60.0) for end in ends]
    for name, text in zip("abc", texts, strict=True):
        assert f"the other hosts have ended while {name} was cut off" in text


def test_a_host_that_waits_joins_as_soon_as_somebody_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting(monkeypatch)
    monkeypatch.setattr(elastic_node, "ALONE_S", 60.0)
    answers = [
        NobodyLeadsError(NOBODY_LEADS),
        WaitsToJoinError(WAITS_TO_JOIN),
        ConnectionRefusedError(),
        "welcome",
    ]

    def ask(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(elastic_node, "ask_to_join", ask)
    listener = listening()
    with listener.socket:
        assert ask_again(listener, ("127.0.0.1", 1)) == "welcome"
    assert not answers


def test_a_host_that_waits_for_hosts_that_do_not_answer_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting(monkeypatch)

    def ask(*_: object) -> object:
        raise TimeoutError("timed out")

    monkeypatch.setattr(elastic_node, "ask_to_join", ask)
    listener = listening("a")
    with (
        listener.socket,
        pytest.raises(LockstepError, match=r"no host of the job has let a in again for 0\.2 s"),
    ):
        ask_again(listener, ("127.0.0.1", 1), pause_s=0.2)


def test_a_host_does_not_join_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have taken part before under another number."""
    waiting(monkeypatch)
    listener, setup = listening(), cast(ElasticSetup, SimpleNamespace(multiplexer=Mock()))
    own, other = listener.entry(3, 1), HostEntry(4, "beta", "10.0.0.2", 4711, 1)
    with listener.socket:
        host = cast(ElasticHost, FakeHost(OutsideError("went on"), (own, other)))
        assert listener.take_part(host, setup) == [("10.0.0.2", 4711)]


def test_a_name_of_the_first_host_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a name that this host can resolve"):
        elastic_node._checked_own_address("no.such.name.invalid")
