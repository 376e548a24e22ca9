"""What hosts must have in common, compared before anything starts (pure), and how one host describes itself."""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ..errors import ConfigError

__all__ = ["Description", "compare", "describe_here"]

ALIKE = ("lockstep", "torch", "python")


@dataclass(frozen=True)
class Description:
    """What a host says of itself.

    Attributes:
        host: its name.
        lockstep, torch, python: versions; Python's without its last number, which does not matter.
        workers: how many ranks it will run.
        problem: why it cannot run the program, or "".
        connection: what sshd says of the way by which the launcher came (SSH_CONNECTION); "" without ssh.
    """

    host: str
    lockstep: str
    torch: str
    python: str
    workers: int
    problem: str = ""
    connection: str = ""

    @property
    def address(self) -> str:
        """The host's address in the network from which the launcher came; "" where none is known."""
        return next(iter(self.connection.split()[2:3]), "")

    @property
    def caller(self) -> str:
        """The launcher's address, as the host sees it; "" where none is known."""
        return next(iter(self.connection.split()[:1]), "")


def describe_here(workers: int, problem: str = "", connection: str = "") -> Description:
    """This host's description; does not load PyTorch."""
    python = ".".join(platform.python_version_tuple()[:2])
    host = socket.gethostname()
    return Description(host, _version("lockstep-train"), _version("torch"), python, workers, problem, connection)


def compare(hosts: Sequence[Description]) -> None:
    """Raise ConfigError when a host cannot run the program, or their versions differ: it names them."""
    for each in hosts:
        if each.problem:
            raise ConfigError("host", f"one that can run the program ({each.host})", found=each.problem)
    for what in ALIKE:
        versions = Counter(str(getattr(each, what)) for each in hosts)
        if len(versions) > 1:
            got = ", ".join(f"{getattr(each, what)} on {each.host}" for each in hosts)
            hint = "Install the same on all of them."
            raise ConfigError("hosts", f"the same version of {what} everywhere", found=got, hint=hint)


def _version(name: str) -> str:
    try:
        found: str = version(name)
        return found
    except PackageNotFoundError:  # run from a folder of sources
        return "unknown"
