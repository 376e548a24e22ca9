"""Networks as users describe them: what is understood, what is refused, and with which line."""

from __future__ import annotations

import math

import pytest

from lockstep.errors import ConfigError
from lockstep.network import (
    AUTO_DILATION,
    PRESETS,
    Cut,
    Link,
    VirtualNetwork,
    parse_link,
    parse_network,
)


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("25Gbit,50us", 3.125e9, 50e-6),
        ("50us, 25 Gbit", 3.125e9, 50e-6),
        ("100Mbit/s", 12.5e6, 0.0),
        ("1.5GB/s,2ms", 1.5e9, 2e-3),
        ("1GiB,300ns", 2.0**30, 3e-7),
        ("10Gbps,1µs", 1.25e9, 1e-6),
    ],
)
def test_links_are_understood(text: str, bandwidth: float, latency: float) -> None:
    link = parse_link(text)
    assert link.bandwidth == pytest.approx(bandwidth) and link.latency == pytest.approx(latency)


def test_presets_are_links_by_name_with_a_source() -> None:
    assert all(
        parse_link(name.upper()) == preset.link and preset.source
        for name, preset in PRESETS.items()
    )
    assert PRESETS["10gbe"].link.bandwidth == pytest.approx(1.25e9 * 0.9415, rel=1e-3)


def test_a_link_takes_latency_and_bytes_over_bandwidth() -> None:
    assert Link(1e9, 50e-6).seconds(1e6) == pytest.approx(1.05e-3)
    assert Link(1e9, 50e-6).slower(2).seconds(1e6) == pytest.approx(2.1e-3)


WRONG_LINKS = [
    "",
    "fast",
    "50us",
    "0Gbit,5us",
    "25Gbit,10Gbit",
    "5us,5us",
    "25Gbit,50us,1",
    "-1Gbit",
    "1e999Gbit",
]


@pytest.mark.parametrize("text", WRONG_LINKS)
def test_other_links_are_refused_with_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--network: expected .*, got ") as caught:
        parse_link(text, "--network")
    assert "\n" not in str(caught.value)


def test_a_whole_network_survives_its_own_text() -> None:
    text = (
        "4 hosts, 25Gbit, 50us, jitter 10us, slow host 3 4x, cut 0-2 after 30s, dilation 2, seed 7"
    )
    network = parse_network(text)
    assert network.link.latency == pytest.approx(50e-6) and network.link.bandwidth == 3.125e9
    assert network == VirtualNetwork(
        4, network.link, network.jitter, ((3, 4.0),), (Cut((0, 2), 30.0),), 2.0, 7
    )
    again = parse_network(str(network))
    assert again.link.bandwidth == pytest.approx(
        3.125e9, rel=1e-11
    ) and again.link.latency == pytest.approx(50e-6)
    assert again.jitter == pytest.approx(network.jitter) and (again.hosts, again.seed) == (4, 7)
    assert (again.cuts, again.slow, again.dilation) == (
        network.cuts,
        network.slow,
        network.dilation,
    )
    assert parse_network("2 hosts, 10gbe, dilation auto").dilation == AUTO_DILATION


@pytest.mark.parametrize(
    "text",
    [
        "25Gbit, 50us",
        "4 hosts",
        "0 hosts, 1Gbit",
        "121 hosts, 1Gbit",
        "4 hosts, 0Gbit, 50us",
        "4 hosts, 4 hosts, 1Gbit",
        "4 hosts, 1Gbit, jitter 5",
        "4 hosts, 1Gbit, slow host 4 2x",
        "4 hosts, 1Gbit, slow host 1 0.5x",
        "4 hosts, 1Gbit, cut 1-1",
        "4 hosts, 1Gbit, cut 1-9",
        "4 hosts, 1Gbit, dilation 0.5",
        "4 hosts, 1Gbit, turbo",
    ],
)
def test_other_networks_are_refused_with_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^network: expected .*, got ") as caught:
        parse_network(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("workers", "hosts", "expected"), [(8, 4, [0, 0, 1, 1, 2, 2, 3, 3]), (5, 3, [0, 0, 1, 1, 2])]
)
def test_ranks_are_dealt_out_in_blocks(workers: int, hosts: int, expected: list[int]) -> None:
    network = VirtualNetwork(hosts, Link(1e9, 0.0))
    assert [network.host_of(rank, workers) for rank in range(workers)] == expected
    places = [network.place_of(rank, workers) for rank in range(workers)]
    assert places[1] == (1, 2) and places[-1][1] == expected.count(expected[-1])


def test_dilation_slows_the_cards_and_auto_is_twice_the_workers_per_core() -> None:
    network = parse_network("2 hosts, 8Mbit, 1ms, slow host 1 3x, dilation auto").resolved(
        workers=8, cores=2
    )
    assert network.dilation == 8.0
    assert network.card(0) == Link(0.125e6, 8e-3)
    slow = network.card(1)
    assert slow.bandwidth == pytest.approx(1e6 / 24) and slow.latency == pytest.approx(24e-3)
    assert parse_network("2 hosts, 8Mbit, dilation auto").resolved(1, 64).dilation == 1.0


def test_a_link_of_no_bandwidth_cannot_be_made() -> None:
    for bandwidth in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="bandwidth"):
            Link(bandwidth, 0.0)
