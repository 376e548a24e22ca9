"""How the launchers of several hosts find each other: one listens, and the others ask there until
they are let in.

What they show each other then is in `handshake`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigError, LockstepError
from ..job.connection import Connection
from ..stores import listen
from .handshake import Handshake, HostHello, HostRefused, HostWelcome

__all__ = [
    "HostRefusedError",
    "NotYetError",
    "ask_launcher",
    "ask_until_let_in",
    "check_address",
    "listen_for_hosts",
]

T = TypeVar("T")

_DIAL_S = 5.0  # of one attempt: a host that is not up yet does not even refuse
_RETRY_S = 0.1
_MOST_OF_ANSWER = 1 << 24  # bytes, before it is known that this is a launcher of the job


class HostRefusedError(LockstepError):
    """A launcher does not let this host in.

    Args:
        answer: what it has said.
    """

    def __init__(self, answer: HostRefused) -> None:
        super().__init__(answer.reason)
        self.answer = answer


class NotYetError(LockstepError):
    """A launcher cannot let this host in yet, and may be asked again."""


def listen_for_hosts(address: str, port: int) -> socket.socket:
    """Return the socket at which a launcher listens for those of other hosts; port 0: the system
    chooses one.

    Args:
        address: by which the others reach this host.
        port: that is free.

    Raises:
        ConfigError: the port is in use, or the address is unknown.
    """
    check_address(address)
    try:
        return listen(address, port, several_hosts=True)
    except OSError as error:
        raise ConfigError(
            "master_port", "a port that is free on the first host", port, f"{error.strerror}."
        ) from None


def check_address(address: str) -> None:
    """Check that this host can resolve a name, or has got an address.

    Raises:
        ConfigError: it cannot.
    """
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        expected = "a name that this host can resolve, or an address"
        raise ConfigError("master_addr", expected, address, f"{reason}.") from None


def ask_until_let_in(ask: Callable[[float], T], address: str, port: int, seconds: float) -> T:
    """Return what `ask` returns: it asks a launcher that may be started later, again and again.

    Args:
        ask: asks the launcher there once; called with the seconds in which it must accept the
            connection. Raises OSError as long as it does not, or `NotYetError`.
        address, port: of the launcher.
        seconds: how long to try.

    Raises:
        ConfigError: the address is unknown, or nobody lets this host in in time.
        as `ask`.
    """
    deadline = time.monotonic() + seconds
    while True:
        check_address(address)
        try:
            return ask(max(0.1, min(_DIAL_S, deadline - time.monotonic())))
        except (OSError, NotYetError) as error:
            if time.monotonic() > deadline:
                hint = (
                    f"The last attempt failed with: {error}. Is the launcher of that host running, "
                    "and the port open?"
                )
                expected = f"a host that answers within {seconds:g} s"
                raise ConfigError(
                    "master_addr", expected, found=f"{address}:{port}", hint=hint
                ) from None
        time.sleep(_RETRY_S)


def ask_launcher(
    address: str,
    port: int,
    key: str,
    hello: HostHello,
    kind: object,
    answer_s: float,
    dial_s: float,
) -> tuple[Connection[Any, Any], HostWelcome]:
    """Say to the launcher that listens somewhere who this host is, and wait until it is let in.

    Args:
        address, port: of a launcher of the job, or of what listens in its place.
        key: the job's secret.
        hello: of this host, without a proof, which is added here.
        kind: the type of all messages between launchers.
        answer_s: how long to wait for each message, in seconds.
        dial_s: how long to wait for the connection, in seconds.

    Returns:
        The connection, and the answer of the launcher, which has proved that it knows the key.

    Raises:
        OSError: nobody accepts the connection.
        HostRefusedError: the launcher does not let this host in.
        LockstepError: it does not answer, has another key, or another program listens there.
    """
    where = f"{address}:{port}"
    end = socket.create_connection((address, port), dial_s)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection: Connection[Any, Any] = Connection(end, kind)
    most = connection.most
    connection.most = _MOST_OF_ANSWER
    handshake = Handshake(key)
    try:
        first = connection.receive(time.monotonic() + answer_s)
        connection.send(handshake.answer(first, hello))
        answer = connection.receive(time.monotonic() + answer_s)
        is_proved = handshake.has_proved(answer)
    except TimeoutError:
        connection.close()
        raise LockstepError(f"no answer from {where} within {answer_s:g} s") from None
    except (OSError, msgspec.DecodeError):
        answer = None
        is_proved = False
    if isinstance(answer, HostWelcome) and is_proved:
        connection.most = most
        return connection, answer
    connection.close()
    if isinstance(answer, HostRefused):
        raise HostRefusedError(answer)
    if isinstance(answer, HostWelcome):
        raise LockstepError(f"{where} has another key")
    raise LockstepError(f"{where} is no launcher of the job, has another key, or has just ended")
