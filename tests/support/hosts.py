"""Several hosts on one: ranks that take each other for far away, and network namespaces in which
they are.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from lockstep.transports.runtime import host_identity

__all__ = ["Network", "inside", "network", "or_skip", "pretending"]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


@contextmanager
def pretending(placement: str) -> Iterator[None]:
    """Make this rank believe that it is on a host of the name ``placement[rank]``."""
    mine = placement[int(os.environ["RANK"])]
    real, host_identity.host_key = host_identity.host_key, lambda: f"host {mine}"
    try:
        yield
    finally:
        host_identity.host_key = real


@dataclass(frozen=True)
class Network:
    """Namespaces that are connected with each other and with the one of the tests.

    Attributes:
        names: of the namespaces, as ``ip netns`` knows them.
        address: where the others reach what listens in the tests' own namespace.
    """

    names: tuple[str, ...]
    address: str


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Make `count` namespaces, each with a device eth0, and remove them whatever happens.

    Raises:
        OSError, subprocess.CalledProcessError: it is not permitted here, or there is no ``ip``.
    """
    number = os.getpid() % 65536
    names = tuple(f"lockstep{number}-{i}" for i in range(count))
    bridge, address = f"ls{number}", f"10.{64 + number % 64}.{number // 256}"
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {address}.1/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for i, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {bridge}v{i} type veth peer name eth0 netns {name}")
            _ip(f"link set {bridge}v{i} master {bridge} up")
            _ip(f"-n {name} addr add {address}.{i + 2}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        yield Network(names, f"{address}.1")
    finally:
        devices = (
            f"link del {bridge}v{i}" for i in range(count)
        )  # those of a namespace go later, by and by
        for command in (*devices, *(f"netns del {name}" for name in names), f"link del {bridge}"):
            with suppress(OSError, subprocess.CalledProcessError):
                _ip(command)


@contextmanager
def or_skip(hosts: AbstractContextManager[T]) -> Iterator[T]:
    """What `hosts` gives, while it is there; the test is skipped where it cannot be made."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"hosts cannot be made here: {error}")
        yield found


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Be in the network namespace `name`; connections that are open stay where they were made."""
    with Path("/proc/self/ns/net").open() as usual:
        with Path("/run/netns", name).open() as there:
            _enter(there.fileno())
        try:
            yield
        finally:
            _enter(usual.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)
