"""The c10d stores of a job: servers that listen as narrowly as possible, and exchanges among all
ranks through them.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import TCPStore

from . import messages
from .errors import MembershipChangedError, StallError, TransportError

__all__ = [
    "LOOPBACK",
    "Combine",
    "Ranges",
    "Store",
    "combine_nothing",
    "exchange",
    "exchange_available",
    "from_ranges",
    "get_available",
    "listen",
    "loopback_variables",
    "read_message",
    "serve_store",
    "to_ranges",
]


# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"


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
    """Create a store that this process serves only at `address`; by default TCPStore listens on all
    interfaces.

    Any process that can connect to a store can read and change everything in it.

    Args:
        address: a name or address by which the other processes reach this host.
        port: 0 for one that the system chooses.
        timeout: of waits in the store.
        several_hosts: whether processes of other hosts connect. A name that resolves to a loopback
            address here may resolve to another one there, and an address that no interface here has
            may still lead here (a forwarded port, a service's address): in these two cases the
            store listens on all interfaces.
        multi_tenant: whether further stores of this process may use the same port, and share its
            content.

    Raises:
        OSError: the port is in use (EADDRINUSE), or this user may not bind it.
    """
    listener = listen(address, port, several_hosts)
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, number = socket.getnameinfo(listener.getsockname(), flags)
    host = LOOPBACK if ipaddress.ip_address(host.partition("%")[0]).is_unspecified else host
    # the store owns the descriptor from here on, and closes it also if its constructor fails
    return TCPStore(
        host,
        int(number),
        None,
        True,
        timeout,
        False,
        multi_tenant,
        master_listen_fd=listener.detach(),
    )


def loopback_variables() -> dict[str, str]:
    """Return the variables that make Gloo use the loopback interface; by default it listens at the
    host's address.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def listen(address: str, port: int, several_hosts: bool) -> socket.socket:
    """Listen at an address of this host only, as far as that is possible; for the arguments see
    `serve_store`.

    Raises:
        OSError: the port is in use (EADDRINUSE), or this user may not bind it.
    """
    for family, sockaddr in _resolve(address, port):
        if (
            several_hosts
            and sockaddr[0] != address
            and ipaddress.ip_address(sockaddr[0]).is_loopback
        ):
            continue  # a name, which may resolve to another address elsewhere
        try:
            return socket.create_server(sockaddr, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    if not several_hosts:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def _resolve(address: str, port: int) -> list[tuple[int, Any]]:
    try:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    # only other hosts know the name; UnicodeError: the name is invalid
    except (OSError, UnicodeError):
        return []
    return [(family, sockaddr) for family, _, _, _, sockaddr in addresses]


T = TypeVar("T")

Ranges = list[tuple[int, int]]
"""Ranks as half-open ranges, in messages."""

Combine = Callable[[Mapping[int, str]], str]
"""Combines the texts of all ranks into one text that all ranks receive; it should be short."""


class Store(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str) -> None:
        """Set `key` to `value`."""

    def get(self, key: str) -> bytes:
        """Wait until `key` exists, and return its value."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number `key`, and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all `keys` exist."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all `keys` exist."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all `keys` exist, and return their values."""


def exchange(
    store: Store, topic: str, rank: int, text: str, names: Sequence[int], combine: Combine
) -> str:
    """Return `combine` of the texts of all ranks, the same on each; every rank must call this once
    per topic.

    The last rank to arrive reads all texts; the others wait for the result. So with n ranks each
    exchanges about five messages with the store, whose host sends n texts and n times the result;
    if each rank read all texts, it would send n² texts.

    Args:
        store: shared by all ranks; its timeout limits the wait.
        topic: the name of the exchange in the store.
        rank: this rank, 0 ≤ rank < len(names).
        text: this rank's text.
        names: the ranks' numbers in errors.
        combine: must return the same on every rank.

    Raises:
        StallError: some ranks did not call it in time; names them.
    """
    keys = _keys(topic, len(names))
    try:
        return _exchange(store, topic, rank, text, keys, combine, lambda key: store.get(key))
    except MembershipChangedError:
        raise  # nobody is late: there is another group at once
    except RuntimeError as error:
        missing = _missing(store, keys)
        if not missing:  # the last rank ended before it stored the result
            return _read_combined(store, keys, combine)
        late = tuple(names[index] for index in missing)
        ranks = f"rank{'s'[: len(late) != 1]} {', '.join(map(str, late))}"
        raise StallError(
            f"creating the group ({topic}): {ranks} did not arrive: {error}", late
        ) from error


def exchange_available(
    store: Store, topic: str, rank: int, text: str, size: int, combine: Combine, timeout: timedelta
) -> str:
    """Do the same as `exchange`, but without the ranks that have not arrived after `timeout`."""
    keys = _keys(topic, size)

    def wait(key: str) -> bytes:
        store.wait([key], timeout)
        return store.get(key)

    try:
        return _exchange(store, topic, rank, text, keys, combine, wait)
    except MembershipChangedError:
        raise
    except RuntimeError:
        missing = set(_missing(store, keys))
        return _read_combined(
            store, {rank: key for rank, key in keys.items() if rank not in missing}, combine
        )


def get_available(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of the existing `keys`: about two requests if all exist, a few more for
    each missing one.
    """
    missing = set(_missing(store, dict(enumerate(keys))))
    available = [key for number, key in enumerate(keys) if number not in missing]
    return dict(zip(available, store.multi_get(available), strict=True)) if available else {}


def read_message(text: str | bytes, kind: type[T], subject: str) -> T:
    """Return the message of the type `kind` that another process has written to a store with
    `messages.encode`.

    Args:
        text: the message.
        kind: its type.
        subject: what it is, for the error.

    Raises:
        TransportError: it is damaged; says what it is, what was expected and where.
    """
    try:
        return messages.decode(text, kind)
    except ValueError as error:
        raise TransportError(
            f"{subject}: the message in the job's store is damaged: {error}"
        ) from None


def to_ranges(ranks: Iterable[int]) -> Ranges:
    """Convert ascending `ranks` to half-open ranges; a host's ranks mostly form one."""
    ranges: Ranges = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = (ranges[-1][0], rank + 1)
        else:
            ranges.append((rank, rank + 1))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int]], size: int) -> list[int]:
    """Return the ranks in the ranges of `to_ranges`.

    Args:
        ranges: from a message.
        size: the number of ranks that there are.

    Raises:
        TransportError: a range is empty, or names ranks that there are not.
    """
    ranks: list[int] = []
    for start, stop in ranges:
        if not 0 <= start < stop <= size:
            expected = f"expected ranges of ranks from 0 to {size - 1}"
            raise TransportError(
                f"{expected}, got [{start}, {stop}]: the message in the job's store is damaged"
            )
        ranks += range(start, stop)
    return ranks


def combine_nothing(_: Mapping[int, str]) -> str:
    """Return "": the `Combine` of an exchange that is only a barrier."""
    return ""


def _keys(topic: str, size: int) -> dict[int, str]:
    return {rank: f"{topic}/{rank}" for rank in range(size)}


def _exchange(
    store: Store,
    topic: str,
    rank: int,
    text: str,
    keys: Mapping[int, str],
    combine: Combine,
    wait: Callable[[str], bytes],
) -> str:
    store.set(keys[rank], text)
    if store.add(f"{topic}/here", 1) < len(keys):
        return wait(f"{topic}/combined").decode()
    combined = _read_combined(store, keys, combine)
    store.set(f"{topic}/combined", combined)
    return combined


def _read_combined(store: Store, keys: Mapping[int, str], combine: Combine) -> str:
    values = store.multi_get(list(keys.values()))
    return combine({rank: value.decode() for rank, value in zip(keys, values, strict=True)})


def _missing(store: Store, keys: Mapping[int, str]) -> list[int]:
    """Find the numbers whose keys do not exist, by bisection: `check` only tells whether all of
    several keys exist.
    """
    numbers = list(keys)
    if not numbers or store.check([keys[number] for number in numbers]):
        return []
    if len(numbers) == 1:
        return numbers
    half = len(numbers) // 2
    return [
        number
        for part in (numbers[:half], numbers[half:])
        for number in _missing(store, {number: keys[number] for number in part})
    ]
