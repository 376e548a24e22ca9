"""Which ranks run on the same machine, and can share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ..c10d import Store

__all__ = ["host_key", "ranks_by_host"]


def host_key() -> str:
    """A text that is equal for two processes if they can open each other's memory.

    Made of the kernel's boot, and the namespaces of process numbers and of the network: containers on one machine
    that do not see each other's processes count as machines of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]  # noqa: PTH115 - not a path
    except OSError:  # no Linux
        return socket.gethostname()
    return " ".join([boot, *spaces, str(os.getuid())])


def ranks_by_host(store: Store, rank: int, size: int) -> list[list[int]]:
    """The ranks of each machine, machines in order of their lowest rank; every rank must call it."""
    store.set(f"host/{rank}", host_key())
    keys = [store.get(f"host/{i}") for i in range(size)]
    hosts: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        hosts.setdefault(key, []).append(i)
    return list(hosts.values())
