"""Hosts that can be reached by ssh: network namespaces with a host name and a real sshd each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from .hosts import network

__all__ = ["NAMES", "Hosts", "make_hosts"]

NAMES = ("alpha", "beta", "gamma", "delta")
"""Names that only the user's ssh configuration knows: the hosts themselves cannot look them up."""

_SERVER = "/usr/sbin/sshd"
_START_S = 10.0

_SERVER_CONFIG = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
UseDNS no
MaxStartups 100
"""

_CLIENT_CONFIG = """
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Hosts:
    """Hosts, and a user's own way to them.

    Attributes:
        namespaces: of the network, by the host's name.
        addresses: by the host's name.
        gateway: this host's address, as they reach it.
        path: the value of PATH with which ``ssh`` knows them, their keys, and the user's key.
        key: the user's key file.
        servers: the process of each one's sshd, which a test leaves alone.
        killed: those that `kill` was called for.
    """

    namespaces: dict[str, str]
    addresses: dict[str, str]
    gateway: str
    path: str
    key: Path
    servers: dict[str, int]
    killed: list[str]

    def processes(self, name: str) -> list[int]:
        """Those on the host `name`."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespaces[name]], capture_output=True, text=True
        )
        return [int(word) for word in found.stdout.split()]

    def programs(self, name: str) -> list[psutil.Process]:
        """What runs on the host `name` beside sshd."""
        found = []
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                program = psutil.Process(process)
                if (
                    not program.name().startswith("sshd")
                    and program.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(program)
        return found

    def kill(self, name: str) -> None:
        """Kill all processes on the host `name` and its connections; it can be reached again."""
        self.killed.append(name)
        _end_all(self, name, {self.servers[name]})

    def link(self, name: str, state: str) -> None:
        """Set the host's network device "up" or "down"."""
        subprocess.run(
            ["ip", "-n", self.namespaces[name], "link", "set", "eth0", state], check=True
        )

    def cut(self, one: str, other: str, change: str = "add") -> None:
        """Let two hosts not reach each other, or with "del" do so again; the others reach both."""
        for host, far in ((one, other), (other, one)):
            command = [
                "ip",
                "-n",
                self.namespaces[host],
                "route",
                change,
                "blackhole",
                self.addresses[far],
            ]
            subprocess.run(command, check=True)

    def inside(self, name: str) -> list[str]:
        """The words before a command that shall run on the host `name`."""
        named = f'hostname {name} && exec "$@"'
        return [
            "nsenter",
            f"--net=/run/netns/{self.namespaces[name]}",
            "unshare",
            "--uts",
            "sh",
            "-c",
            named,
            "sh",
        ]


@contextmanager
def make_hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Make `count` hosts, with their keys in `folder`, and remove them whatever happens.

    Raises:
        OSError, subprocess.CalledProcessError: it is not permitted here, or a program is missing.
    """
    key = _write_keys(folder)
    with network(count) as made:
        names, prefix = NAMES[:count], made.address.rpartition(".")[0]
        addresses = {name: f"{prefix}.{number}" for number, name in enumerate(names, 2)}
        path = _write_client(folder, key, addresses)
        namespaces = dict(zip(names, made.names, strict=True))
        found = Hosts(namespaces, addresses, made.address, path, key, {}, [])
        try:
            for name in names:  # each goes into the background, and is no child of the tests
                subprocess.run(
                    [*found.inside(name), _SERVER, "-f", str(folder / "sshd_config")], check=True
                )
            for address in addresses.values():
                _wait_for(address)
            found.servers.update({name: found.processes(name)[0] for name in names})
            yield found
        finally:
            for name in names:
                _end_all(found, name, set())


def _write_keys(folder: Path) -> Path:
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, capture_output=True)
    (folder / "sshd_config").write_text(_SERVER_CONFIG.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    return folder / "user"


def _write_client(folder: Path, key: Path, addresses: dict[str, str]) -> str:
    host_key = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text(
        "".join(f"{address} {host_key}" for address in addresses.values())
    )
    known = "".join(
        f"Host {name}\n  HostName {address}\n  IdentityFile {key}\n"
        for name, address in addresses.items()
    )
    (folder / "ssh_config").write_text(
        known + "Host *" + _CLIENT_CONFIG.format(folder=folder).replace("\n", "\n  ")
    )
    program = (
        folder / "bin" / "ssh"
    )  # ssh itself looks for its configuration in the home of passwd alone
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder / "ssh_config"} "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _end_all(found: Hosts, name: str, spared: set[int]) -> None:
    while running := set(found.processes(name)) - spared:
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
