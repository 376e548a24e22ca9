"""The network interface of the workers of a job on several hosts."""

from __future__ import annotations

import os
import socket

import pytest

from lockstep.errors import ConfigError
from lockstep.launcher import network_interface
from lockstep.launcher.elastic_jobs import elastic_node
from lockstep.launcher.network_interface import (
    check_interface,
    choose_interface,
    interface_with_address,
)
from lockstep.system.heartbeat import address_in_a_network

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test set the variables, which are removed after it."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        del os.environ[name]


def chosen() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_the_interface_with_an_address() -> None:
    assert interface_with_address("127.0.0.1") == "lo"
    assert interface_with_address("192.0.2.1") is None  # reserved for examples


def test_the_users_interface_comes_before_that_towards_the_other_hosts() -> None:
    choose_interface("ib0", "127.0.0.1")
    assert chosen() == ["ib0", "ib0"]


def test_without_one_it_is_that_towards_the_other_hosts() -> None:
    choose_interface(None, "127.0.0.1")
    assert chosen() == ["lo", "lo"]


@pytest.fixture
def node1(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of this host that leads to a loopback address here, as Debian's /etc/hosts has it."""
    known = socket.getaddrinfo

    def resolve(host: str, *words: object, **named: object) -> object:
        return known("127.0.1.1" if host == "node1" else host, *words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return "node1"


@pytest.fixture
def in_a_network() -> str:
    """The address of this host in a network with others."""
    try:
        return address_in_a_network()
    except OSError:
        pytest.skip("there is only a loopback interface")


def test_a_name_of_this_host_at_a_loopback_address_is_that_of_a_host_in_a_network(
    node1: str, in_a_network: str
) -> None:
    found = interface_with_address(in_a_network)
    choose_interface(None, node1)
    assert found != "lo" and chosen() == [found, found]


def test_a_host_that_joins_a_job_on_this_host_listens_where_others_reach_it(
    node1: str, in_a_network: str
) -> None:
    assert elastic_node._checked_own_address(node1) == in_a_network


def test_without_a_network_it_is_the_loopback_address(
    node1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise OSError("no network")

    monkeypatch.setattr(network_interface, "address_in_a_network", fail)
    assert elastic_node._checked_own_address(node1).startswith("127.")
    choose_interface(None, node1)
    assert chosen() == ["lo", "lo"]


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_launchers_on_one_host_use_the_loopback_interface(address: str) -> None:
    choose_interface(None, address)
    assert chosen() == ["lo", "lo"]


@pytest.mark.parametrize("address", [None, "no.such.name.invalid"])
def test_where_neither_is_known_gloo_and_nccl_choose(address: str | None) -> None:
    choose_interface(None, address)
    assert chosen() == [None, None]


def test_the_users_own_variables_stay() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    choose_interface("ib0", "127.0.0.1")
    assert chosen() == ["eth7", "ib0"]
    check_interface("ib0")  # which counts on other hosts


def test_an_interface_that_this_host_has_not_is_named_with_those_that_it_has() -> None:
    known = ", ".join(name for _, name in socket.if_nameindex())
    with pytest.raises(ConfigError) as caught:
        check_interface("lo,nothing0,nothing1")
    assert str(caught.value) == (
        f"network_interface: expected one of this host ({known}), got 'nothing0, nothing1'. "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME set another one on this host alone."
    )
    check_interface("lo")
    check_interface(None)
