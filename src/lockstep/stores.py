"""Where a job's sockets listen: stores of torch.distributed, and Gloo's, that no more hosts can reach than must."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

__all__ = ["LOOPBACK", "loopback_variables", "serve_store"]

LOOPBACK = "127.0.0.1"

_TIMEOUT = timedelta(seconds=300)  # TCPStore's own
_BACKLOG = 2048  # as TCPStore's own socket; all ranks of a job connect at the same time


def serve_store(
    address: str = LOOPBACK,
    port: int = 0,
    timeout: timedelta = _TIMEOUT,
    several_hosts: bool = False,
    multi_tenant: bool = False,
) -> TCPStore:
    """A store that this process serves at `address` alone; TCPStore by itself listens on all interfaces.

    Whoever can connect to a store can read and change all that is in it.

    Args:
        address: a name or address by which the other processes reach this host.
        port: 0 lets the system choose one.
        timeout: limit of a wait in the store.
        several_hosts: whether processes of other hosts connect. A name that stands for a loopback address here may
            stand for another one there, and an address that no interface here has may lead here all the same (a
            forwarded port, a service's address): then, and only then, the store listens on all interfaces.
        multi_tenant: whether other stores of this process may use the same port, as torch's ``env://`` does.

    Raises:
        OSError: the port is taken (EADDRINUSE), or is not for this user.
    """
    listener = _listen(address, port, several_hosts)
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, number = socket.getnameinfo(listener.getsockname(), flags)
    host = LOOPBACK if ipaddress.ip_address(host.partition("%")[0]).is_unspecified else host
    # whoever closes the store, or fails to make it, closes the descriptor: it is the store's from here on
    return TCPStore(host, int(number), None, True, timeout, False, multi_tenant, master_listen_fd=listener.detach())


def loopback_variables() -> dict[str, str]:
    """What tells Gloo that all ranks are on this host; by itself it listens at the address of the host's name."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _listen(address: str, port: int, several_hosts: bool) -> socket.socket:
    for family, place in _look_up(address, port):
        if several_hosts and place[0] != address and ipaddress.ip_address(place[0]).is_loopback:
            continue  # a name, which may stand for another address elsewhere
        try:
            return socket.create_server(place, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    if not several_hosts:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _look_up(address: str, port: int) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # only others know the name; the second: it is no name at all
        return []
    return [(family, place) for family, _, _, _, place in found]
