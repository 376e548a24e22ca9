"""How a launcher asks one that may be started later until it is let in."""

from __future__ import annotations

import socket

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.launcher.elastic_jobs.mesh import NobodyLeadsError, WaitsToJoinError
from lockstep.launcher.host_rendezvous import ask_until_let_in, listen_for_hosts

NOBODY = ("127.0.0.1", 1)


def test_who_does_not_listen_yet_or_knows_nobody_who_leads_is_asked_again() -> None:
    answers: list[Exception | str] = [
        ConnectionRefusedError(),
        TimeoutError(),
        NobodyLeadsError("nobody"),
        WaitsToJoinError("waits"),
        "welcome",
    ]
    limits = []

    def ask(dial_s: float) -> str:
        limits.append(dial_s)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert ask_until_let_in(ask, *NOBODY, 60.0) == "welcome"
    assert len(limits) == 5 and set(limits) == {5.0}  # of one attempt


def test_who_never_answers_is_waited_for_until_the_limit() -> None:
    limits = []

    def ask(dial_s: float) -> None:
        limits.append(dial_s)
        raise ConnectionRefusedError("refused")

    with pytest.raises(ConfigError) as caught:
        ask_until_let_in(ask, *NOBODY, 0.3)
    assert str(caught.value) == (
        "master_addr: expected a host that answers within 0.3 s, got 127.0.0.1:1. The last "
        "attempt failed with: refused. Is the launcher of that host running, and the port open?"
    )
    assert limits and all(0.1 <= limit <= 0.3 for limit in limits)


def test_who_refuses_is_not_asked_again() -> None:
    asked = []

    def ask(_: float) -> None:
        asked.append(1)
        raise LockstepError("another version")

    with pytest.raises(LockstepError, match="another version"):
        ask_until_let_in(ask, *NOBODY, 60.0)
    assert len(asked) == 1


@pytest.mark.parametrize("address", ["no.such.name.invalid", "x" * 70])
def test_a_name_that_nobody_can_resolve_is_an_error_at_once(address: str) -> None:
    expected = "master_addr: expected a name that this host can resolve, or an address, got"
    with pytest.raises(ConfigError, match=expected):
        listen_for_hosts(address, 0)
    with pytest.raises(ConfigError, match=expected):
        ask_until_let_in(lambda _: None, address, 1, 60.0)


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        expected = f"master_port: expected a port that is free on the first host, got {port}"
        with pytest.raises(ConfigError, match=expected):
            listen_for_hosts("127.0.0.1", port)
