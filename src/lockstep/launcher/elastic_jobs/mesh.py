"""Connections between the launchers of an elastic job on several hosts: each one has a connection
to each other.

A new host asks any host that it knows. The connections themselves are in `host_connections`. The
host with the greater number dials; when a connection ends, the other side looks whether the
launcher still listens, so that an end that is certain can be told from a host that does not answer.
All that a launcher has sent before its end is known only if its connection was read to the end:
when a connection is reset, the kernel throws away what it had not sent.
"""

from __future__ import annotations

import math
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from ...errors import LockstepError
from ...job.connection import Connection
from ...system.strangers import LIMIT_S
from ..handshake import ANY_HOST, HostEntry, HostHello, HostRefused, HostWelcome
from ..host_connections import HostConnection, HostConnections
from ..host_rendezvous import HostRefusedError, NotYetError, ask_launcher
from ..pulse import Patience, SilenceWatch

NEW = ANY_HOST
"""The number of a host that wants to join."""

ASKS = -2
"""The number with which a host only asks what the job is."""


class Link(Enum):
    """What a host knows of another one."""

    CONNECTED = "connected"
    # it does not answer, or has ended after it did not: it may have gone on without this host
    SILENT = "silent"
    ENDED = "ended"  # its launcher has ended, and all that it has sent was read
    LOST = "lost"  # its launcher has ended, or takes part no more, and may have sent more


Wire = HostHello | HostWelcome | HostRefused
"""The messages of the mesh itself."""

_PING_S = 0.5
_RECENT_S = (
    2.0  # a launcher that was heard of so recently has ended, if it does not listen any more
)
# where struct tcp_info of Linux (include/uapi/linux/tcp.h) has tcpi_last_ack_recv, in milliseconds
_LAST_ACK = 56
_DIAL_S = 3.0
# a process that ends closes its connections first, and a moment later the socket where it listens
_CLOSING_S = 1.0
_REDIAL_S = 1.0
_ASKED_AFTER = 4  # looks: a host that takes part has dialled by then


def _seconds_unanswered(peer: HostConnection) -> float:
    """Return how long the other side's kernel has acknowledged nothing, though it is sent pings; 0
    if not known.

    TCP's own time limit does not end a connection whose packets do not even leave this host, as
    when the network device is down.
    """
    try:
        info = peer.connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    except (OSError, AttributeError):  # not Linux
        return 0.0
    return int.from_bytes(info[_LAST_ACK : _LAST_ACK + 4], sys.byteorder) / 1000


def _wait_until_refused(address: str, port: int) -> None:
    """Return if a launcher still listens there after a moment.

    Raises:
        ConnectionRefusedError: none does.
        OSError: it is not known.
    """
    deadline = time.monotonic() + _CLOSING_S
    while time.monotonic() < deadline:
        with (
            socket.create_connection((address, port), _DIAL_S) as end,
            suppress(TimeoutError, ConnectionResetError),
        ):
            data = b"."
            while data:  # a launcher that runs says its challenge, and one that ends closes this
                end.settimeout(max(0.001, deadline - time.monotonic()))
                data = end.recv(4096)


class _Dialler:
    """Connects to other launchers in threads, as that may block; what becomes of it comes in the
    launcher's loop.

    Args:
        selector: of the loop; the data of each key is a function to call when it is ready.
        on_result: called with the number of the host, the socket that is connected to it or None,
            whether it refuses connections, and whether it was a probe.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_result: Callable[[int, socket.socket | None, bool, bool], None],
    ) -> None:
        self._selector = selector
        self._on_result = on_result
        self._results: SimpleQueue[tuple[int, socket.socket | None, bool, bool]] = SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        selector.register(self._wake, selectors.EVENT_READ, self._take_results)

    def dial(self, host: HostEntry, probes: bool) -> None:
        """Connect to a host; as a probe only to see whether it listens."""

        def connect() -> None:
            end = None
            refused = False
            try:
                if probes:
                    _wait_until_refused(host.address, host.port)
                else:
                    end = socket.create_connection((host.address, host.port), _DIAL_S)
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
            self._results.put((host.number, end, refused, probes))
            with suppress(OSError):
                self._waker.send(b".")

        threading.Thread(target=connect, name="lockstep dial", daemon=True).start()

    def _take_results(self) -> None:
        """Pass on what the threads have found."""
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        with suppress(Empty):
            while True:
                self._on_result(*self._results.get_nowait())

    def close(self) -> None:
        """Take no more results."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._wake)
        self._wake.close()
        self._waker.close()


class Mesh:
    """This launcher's connections to those of the other hosts.

    Nothing blocks here: dialling is done in threads, and everything else when the selector says so.

    Args:
        own_entry: this host; the number is -1 until it is known.
        key: the job's secret.
        listener: the socket at which this launcher listens.
        selector: of the launcher's loop; the data of each key is a function to call when it is
            ready.
        kind: the type of all messages between launchers.
        limit_s: seconds within which the kernel of another host must answer.
        former: numbers that this host has had in the job, before it joined again.

    Attributes:
        own_entry: this host.
        hosts: the hosts that there are or have been, by number.
        on_message: called with the number of a host and each message from it.
        on_link: called when what is known of a host has changed.
        on_hello: called for a new host; returns the answer, with which its connection becomes that
            of a new number.
        on_silence: called when a launcher has not answered for that many seconds, though its host
            does: it is stopped, or hangs.
        silence: notices such a launcher; how long it is waited for says when that is called, and
            when its host does not count as connected any more.
    """

    def __init__(
        self,
        own_entry: HostEntry,
        key: str,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        kind: object,
        limit_s: float,
        former: Iterable[int] = (),
    ) -> None:
        self.own_entry = own_entry
        self._former = set(former)
        self.hosts: dict[int, HostEntry] = {}
        self.on_message: Callable[[int, Any], None] = lambda host, message: None
        self.on_link: Callable[[int, Link], None] = lambda host, link: None
        self.on_hello: Callable[[HostHello], HostWelcome | HostRefused] = lambda hello: HostRefused(
            "this host is no job's"
        )
        self.on_silence: Callable[[int, float], None] = lambda host, seconds: None
        self.silence = SilenceWatch(Patience(math.inf, math.inf))
        self._limit_s = limit_s
        self._connections = HostConnections(
            key, selector, kind, limit_s, self._answer, self._handle, self._ended
        )
        self._peers = self._connections.of_host
        self._answering: dict[
            HostConnection, float
        ] = {}  # who were dialled and have not answered yet, and since when
        self._dialling: dict[int, float] = {}  # hosts that are dialled, or will be at this time
        self._dialler = _Dialler(selector, self._dialled)
        self._refused: set[int] = set()
        self._listens: dict[
            int, int
        ] = {}  # how often a host has been found to listen that should dial itself
        self._probing: dict[
            int, Link
        ] = {}  # hosts whose connection has ended: what they are if they do not listen
        self._next_ping = 0.0
        self._pings_since = 0.0
        self._connections.listen(listener)

    def send(self, host: int, message: object) -> None:
        """Send a message to another host; ignored if it is not connected."""
        self._connections.send_to(host, message)

    def silent_s(self, host: int) -> float:
        """Return for how many seconds nothing has come from a host; infinite if it is not
        connected.
        """
        peer = self._peers.get(host)
        return math.inf if peer is None else time.monotonic() - peer.heard

    def have_ended(self, hosts: Iterable[int]) -> bool:
        """Return whether the launchers of hosts that do not answer do not listen any more; finds
        out by and by.
        """
        listening = set(hosts) - self._refused
        for host in listening - self._dialling.keys() - self._peers.keys():
            self._dialler.dial(
                self.hosts[host], probes=False
            )  # it would dial this host itself, if it ran
        return not listening

    @property
    def has_unsent(self) -> bool:
        """Whether something is not sent yet."""
        return self._connections.has_unsent

    def add_hosts(self, hosts: list[HostEntry]) -> None:
        """Get to know hosts, and dial those with smaller numbers."""
        for host in hosts:
            self.hosts[host.number] = host
            if (host.address, host.port) == (self.own_entry.address, self.own_entry.port):
                continue  # this launcher, before it joined again
            if host.number < self.own_entry.number and host.number not in self._peers:
                self._dialling.setdefault(host.number, 0.0)

    def forget(self, host: int) -> None:
        """Do not try to reach a host any more, which has ended."""
        self._dialling.pop(host, None)

    def adopt(self, connection: Connection[Any, Any], host: int) -> None:
        """Use a connection that `ask_to_join` has made."""
        self._connect(self._connections.adopt(connection), host)

    def tick(self) -> None:
        """Ping and dial whom it is time for."""
        now = time.monotonic()
        if now >= self._next_ping:
            if now > self._next_ping + _PING_S:
                self._pings_since = now  # this process was busy
            self._next_ping = now + _PING_S
            for peer in list(self._peers.values()):
                if peer.is_broken:
                    self._drop(peer)  # if its end has not been read by now
                elif (
                    now - self._pings_since > self._limit_s
                    and _seconds_unanswered(peer) > self._limit_s
                ):
                    self._lose(peer)
                else:
                    self._connections.ping(peer)
        self._look_for_silence()
        self._connections.tick()
        for peer in [peer for peer, since in self._answering.items() if now - since > LIMIT_S]:
            self._drop(peer)
        for host in [host for host, due in self._dialling.items() if now >= due]:
            self._dialling[host] = now + _DIAL_S + _REDIAL_S
            self._dialler.dial(self.hosts[host], probes=False)

    def _look_for_silence(self) -> None:
        """Say which launchers have not answered for long, and lose those for which that has lasted
        too long.
        """
        patience = self.silence.patience
        for peer, is_over in self._connections.look_for_silence(self.silence):
            self.on_silence(peer.host, patience.limit_s if is_over else patience.warning_s)
            if is_over:
                self._lose(peer)

    def _lose(self, peer: HostConnection) -> None:
        """End a connection whose other side may go on, or not."""
        peer.heard = -math.inf
        self._drop(peer)

    def ping(self) -> None:
        """Let the other launchers know that this one runs; another thread may call this."""
        self._connections.ping_all()

    def close(self) -> None:
        """Listen no more, and close all connections."""
        self._connections.stop_listening()
        self._dialler.close()
        for peer in [*self._peers.values(), *self._answering]:
            self._connections.close(peer)

    def _dialled(self, host: int, end: socket.socket | None, refused: bool, probes: bool) -> None:
        """Go on with what has become of an attempt to connect, or of a probe."""
        if end is not None and (
            host in self._peers or not (host in self._dialling or self._is_to_be_asked(host))
        ):
            end.close()
        elif end is not None:
            peer = self._connections.add(end)
            peer.host = host
            self._answering[peer] = time.monotonic()
        if end is None and refused:
            self._refused.add(host)
        if probes and host in self._probing:
            link = self._probing.pop(host)
            self.on_link(host, link if refused else Link.SILENT)
            if not refused and host < self.own_entry.number:
                self._dialling[host] = 0.0
        elif end is None and host in self._dialling:
            self._dialling[host] = time.monotonic() + _REDIAL_S

    def _is_to_be_asked(self, host: int) -> bool:
        """Return whether to ask a host who it is that listens, and should dial this one, but has
        not done so.

        It may have joined again under another number, or wait to do so.
        """
        self._listens[host] = self._listens.get(host, 0) + 1
        return self._listens[host] % _ASKED_AFTER == 0

    def _ended(self, peer: HostConnection, error: Exception) -> None:
        """A connection has ended."""
        if isinstance(error, TimeoutError):
            self._lose(peer)  # the other kernel did not answer: nothing is certain
            return
        peer.is_broken = peer.is_broken or not isinstance(error, EOFError)
        self._drop(peer)

    def _handle(self, peer: HostConnection, message: object) -> None:
        """Take a message of a host that was dialled, or is connected."""
        if peer in self._answering:
            self._take_answer(peer, message)
        elif self._connections.counts(peer) and not isinstance(message, Wire):
            self.on_message(peer.host, message)

    def _take_answer(self, peer: HostConnection, message: object) -> None:
        """Take what a host says that was dialled: its first message, and its answer.

        Raises:
            OSError: it is none of the job's.
        """
        handshake = peer.handshake
        match message:
            case HostWelcome() if handshake.has_proved(message):
                del self._answering[peer]
                self._connect(peer, peer.host)
            case HostRefused():
                self._refused.add(peer.host)
                self.forget(peer.host)
                if handshake.has_proved(message):
                    self._probing.pop(peer.host, None)
                    self.on_link(peer.host, Link.LOST)
            case _:
                hello = HostHello(host=self.own_entry, to=peer.host)
                self._connections.send(peer, handshake.answer(message, hello))

    def _answer(self, peer: HostConnection, hello: HostHello) -> None:
        """Answer who has dialled: another host of the job, one that joins, or one that asks.

        Raises:
            OSError: it does not say which.
        """
        if hello.host is None:
            raise OSError("a stranger")
        proof = peer.handshake.proof
        if hello.host.number >= 0 and hello.to != self.own_entry.number:
            if hello.to in self._former or self.own_entry.number >= 0:
                reason = f"host {hello.to} has joined again, or wants to"
                self._connections.send(peer, HostRefused(reason, proof=proof))
            # a host that is let in just now, and does not know its number yet, is dialled again
            self._connections.close(peer)
            return
        if hello.host.number >= 0:
            self._connections.send(peer, HostWelcome(proof))
            self.hosts.setdefault(hello.host.number, hello.host)
            self._connect(peer, hello.host.number)
            return
        answer = self.on_hello(hello)
        if isinstance(answer, HostRefused):
            self._connections.send(peer, answer)
            self._connections.close(peer)
            return
        self._connections.send(peer, msgspec.structs.replace(answer, proof=proof))
        if answer.number >= 0:
            self.hosts.setdefault(
                answer.number, msgspec.structs.replace(hello.host, number=answer.number)
            )
            self._connect(peer, answer.number)
        else:
            self._connections.close(peer)

    def _connect(self, peer: HostConnection, host: int) -> None:
        """Use a connection as that to a host, instead of an earlier one, with which messages may
        have been lost.
        """
        before = self._peers.pop(host, None)
        if before is not None:
            self._connections.close(before)
        if before is not None or host in self._probing:
            self._probing.pop(host, None)
            self.on_link(host, Link.SILENT)
        self._connections.assign(peer, host)
        self._dialling.pop(host, None)
        self._listens.pop(host, None)
        self.on_link(host, Link.CONNECTED)

    def _drop(self, peer: HostConnection) -> None:
        """A connection has ended: find out whether the other launcher has."""
        self._connections.close(peer)
        if self._answering.pop(peer, None) is not None:
            if peer.host in self._dialling:
                self._dialling[peer.host] = time.monotonic() + _REDIAL_S
        elif self._connections.counts(peer):
            del self._peers[peer.host]
            if time.monotonic() - peer.heard < _RECENT_S and peer.host in self.hosts:
                self._probing[peer.host] = Link.LOST if peer.is_broken else Link.ENDED
                self._dialler.dial(self.hosts[peer.host], probes=True)
            else:
                self.on_link(peer.host, Link.SILENT)
                if peer.host < self.own_entry.number and peer.host in self.hosts:
                    self._dialling[peer.host] = 0.0


NOBODY_LEADS = "no launcher of the job leads at the moment; try again"
"""The reason for which a host is refused that may be let in a moment later."""


WAITS_TO_JOIN = "this host takes no part in the job, and waits for a launcher that leads it"
"""The reason with which a host refuses that is in no job itself: it cannot let anybody in, now or
later.
"""


class NobodyLeadsError(NotYetError):
    """A host cannot be let in at the moment."""


class WaitsToJoinError(NotYetError):
    """A host cannot be let in by this one, which takes no part in the job either."""


def ask_to_join(
    address: str,
    port: int,
    key: str,
    hello: HostHello,
    kind: object,
    answer_s: float,
    dial_s: float,
) -> tuple[Connection[Any, Any], HostWelcome]:
    """Ask the job at an address to let this host join, as `ask_launcher` does; where another
    launcher leads, ask that one.

    Raises:
        OSError: no launcher answers there.
        NobodyLeadsError: the job does not know at the moment.
        WaitsToJoinError: the launcher there takes no part in the job either.
        LockstepError: it refuses, does not answer, or another program answers.
    """
    for _ in range(8):  # launchers that lead to another one
        try:
            return ask_launcher(address, port, key, hello, kind, answer_s, dial_s)
        except HostRefusedError as error:
            answer = error.answer
            if answer.ask is None:
                kinds = {NOBODY_LEADS: NobodyLeadsError, WAITS_TO_JOIN: WaitsToJoinError}
                raise kinds.get(answer.reason, LockstepError)(answer.reason) from None
        address = answer.ask.address
        port = answer.ask.port
    raise NobodyLeadsError(NOBODY_LEADS)
