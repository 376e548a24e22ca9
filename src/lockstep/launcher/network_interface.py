"""The network interface over which the workers of a job on several hosts talk to each other.

The launchers themselves use the addresses at which they reach each other, see `host_rendezvous`.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from .. import environment
from ..errors import ConfigError
from ..system.heartbeat import address_in_a_network, address_towards

__all__ = ["check_interface", "choose_interface", "interface_with_address", "own_address"]

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"


def choose_interface(name: str | None, address: str | None) -> None:
    """Let the Gloo and NCCL of the workers that are started later use one interface of this host,
    unless the user has set their own variables. By default Gloo uses the address of the host name.

    Args:
        name: of the interface, or of several, separated by commas; None for the one on the way to
            `address`.
        address: of the first host, or of another one in the network of the job; None to leave the
            choice to Gloo and NCCL where there is no name.
    """
    if name is None and address is not None:
        with suppress(OSError):  # only other hosts know that name, or there is no route to it
            name = interface_with_address(own_address(address))
    if name is not None:
        environment.set_defaults({_GLOO: name, _NCCL: name})


def own_address(address: str) -> str:
    """Return this host's address in the network of `address`, as other hosts reach it.

    The name of a host may lead to a loopback address on that host itself (Debian's `/etc/hosts` has
    such a line), at which no other host reaches it: there it is one in any other network, if this
    host is in one.

    Raises:
        OSError: `address` is unknown, or there is no route to it.
    """
    own = address_towards(address)
    is_name = address not in (own, "localhost") and not address.startswith("127.")
    if is_name and ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        with suppress(OSError):
            return address_in_a_network()
    return own


def check_interface(name: str | None) -> None:
    """Check that this host has the interface, or all of several, that the user has chosen.

    Gloo would say so only in the workers, when those of all hosts form a group. Nothing is checked
    where Gloo's own variable is set, which counts for this host.

    Args:
        name: as for `choose_interface`.

    Raises:
        ConfigError: it has not.
    """
    if name is None or _GLOO in environment.variables():
        return
    known = [interface for _, interface in socket.if_nameindex()]
    missing = [each for each in name.split(",") if each not in known]
    if missing:
        raise ConfigError(
            "network_interface",
            f"one of this host ({', '.join(known)})",
            ", ".join(missing),
            f"{_GLOO} and {_NCCL} set another one on this host alone.",
        )


def interface_with_address(address: str) -> str | None:
    """Return the name of the network interface with `address`; None if it cannot be determined
    (IPv4, Linux).
    """
    try:
        import fcntl
        import struct
    except ImportError:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                # SIOCGIFADDR
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
