"""Whether hosts can run a program together: the description of this one, and what must be the same
on all.

Nothing here loads PyTorch.
"""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from ...errors import ConfigError
from ...job.messages import HostDescription

__all__ = ["check_compatible", "describe_host"]

_MUST_MATCH = ("lockstep", "torch", "python")


def describe_host(workers: int, problem: str = "", connection: str = "") -> HostDescription:
    """Return the description of this host; does not load PyTorch."""
    python = ".".join(platform.python_version_tuple()[:2])
    host = socket.gethostname()
    return HostDescription(
        host, _version("lockstep-train"), _version("torch"), python, workers, problem, connection
    )


def check_compatible(hosts: Sequence[HostDescription]) -> None:
    """Raise ConfigError if a host cannot run the program or versions differ; the message names the
    hosts.
    """
    for host in hosts:
        if host.problem:
            raise ConfigError(
                "host", f"one that can run the program ({host.host})", found=host.problem
            )
    for name in _MUST_MATCH:
        versions = Counter(str(getattr(host, name)) for host in hosts)
        if len(versions) > 1:
            got = ", ".join(f"{getattr(host, name)} on {host.host}" for host in hosts)
            hint = "Install the same version on all hosts."
            raise ConfigError(
                "hosts", f"the same version of {name} on all hosts", found=got, hint=hint
            )


def _version(name: str) -> str:
    try:
        installed: str = version(name)
        return installed
    except PackageNotFoundError:  # run from a folder of sources
        return "unknown"
