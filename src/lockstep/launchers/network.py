"""Which of this machine's addresses and network interfaces lead to another machine."""

from __future__ import annotations

import socket
from contextlib import suppress

from ..heartbeat import address_towards

__all__ = ["address_towards", "interface_of", "is_this_machine"]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, or None where that cannot be found out (IPv4, Linux)."""
    try:
        import fcntl
        import struct
    except ImportError:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def is_this_machine(host: str) -> bool:
    """Whether `host` names the machine that this program runs on."""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    with suppress(OSError):
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
        return any(_is_own(str(address)) for address in addresses)
    return False


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))  # only an address of this machine can be bound
        return True
    return False
