"""Lists of hosts are read as other launchers read them, and what is wrong in them is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import Host, parse_hostfile, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b", [Host("a", 4), Host("b", 1)]),
        ("10.0.0.2:2", [Host("10.0.0.2", 2)]),
        (" a , b:2 ", [Host("a"), Host("b", 2)]),
        ("me@node-1.lab:8", [Host("node-1.lab", 8, "me")]),
        ("[fe80::1]:2,[::1]", [Host("fe80::1", 2), Host("::1")]),
        ("me@[fe80::1%eth0]", [Host("fe80::1%eth0", 1, "me")]),
    ],
)
def test_hosts_with_slots(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


def test_the_arguments_of_ssh() -> None:
    assert Host("a", 1, "me").login == "me@a"
    assert Host("a").login == "a"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "got ''"),
        ("a,,b", "got ''"),
        ("a:0", "at least 1, got '0'"),
        ("a:four", "at least 1, got 'four'"),
        ("a:", "at least 1, got ''"),
        ("a:4:4", "got 'a:4:4'"),
        ("a b", "got 'a b'"),
        ("-oProxyCommand=x", "got '-oProxyCommand=x'"),
        ("-l@a", "got '-l@a'"),
        ("@a", "got '@a'"),
        ("a..b:2", "got 'a..b'"),
        ("fe80::1", "Write [fe80::1] for an IPv6 address."),
        ("[a]", "got '[a]'"),
        ("a:2,b,a:2", "each host once, got 'a'"),
        ("a,me@a", "each host once, got 'a'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text, "-H")
    assert str(caught.value).startswith("-H: ")
    assert told in str(caught.value)


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# four hosts\n\nnode1 slots=4\nme@node2:2  # old\n  node3\tmax_slots=8 slots=2\n[::1]:3\n"
    )
    assert read_hostfile(path) == [
        Host("node1", 4),
        Host("node2", 2, "me"),
        Host("node3", 2),
        Host("::1", 3),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nb slots=x\n", "f, line 2: expected a number of slots, at least 1, got 'x'"),
        ("\n#\na\nb\na\n", "f, line 5: expected each host once, got 'a'"),
        ("a cpus=4\n", "f, line 1: expected host slots=4, or host:4, got a cpus=4"),
        ("a:4 slots=4\n", "f, line 1: expected host slots=4, or host:4, got a:4 slots=4"),
        ("[::1]:4 slots=4\n", "f, line 1: expected host slots=4, or host:4"),
        ("a slots=4 slots=2\n", "f, line 1: expected host slots=4, or host:4"),
        ("# none\n", "f: expected at least one host, got no host"),
    ],
)
def test_the_line_that_cannot_be_read_is_named(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "f")
    assert told in str(caught.value)


def test_an_ipv6_address_in_a_hostfile_may_have_slots() -> None:
    assert parse_hostfile("[fe80::1] slots=4") == [Host("fe80::1", 4)]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="hostfile") as caught:
        read_hostfile(path)
    assert str(path) in str(caught.value)
