"""The connections between the launchers of several hosts: who is let in, and what is known when one
ends.
"""

from __future__ import annotations

import fcntl
import math
import select
import selectors
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from lockstep.errors import LockstepError
from lockstep.job.connection import Connection
from lockstep.launcher.elastic_jobs import mesh as mesh_module
from lockstep.launcher.elastic_jobs.mesh import NEW, Link, Mesh, Wire, ask_to_join
from lockstep.launcher.handshake import Handshake, HostEntry, HostHello, HostRefused, HostWelcome
from lockstep.launcher.pulse import Patience, SilenceWatch
from lockstep.messages import Tagged
from lockstep.watchdog import diagnosis


class Reject(Tagged, frozen=True):
    """A message of the job."""

    number: int
    data: bytes = b""


KIND = Wire | Reject
DEADLINE = 20.0


@dataclass
class Host:
    """A mesh, its loop, and what it has been told."""

    mesh: Mesh
    selector: selectors.BaseSelector
    listener: socket.socket
    entry: HostEntry
    links: list[tuple[int, Link]] = field(default_factory=list)
    messages: list[tuple[int, Any]] = field(default_factory=list)

    def turn(self) -> None:
        """Handle what there is to handle."""
        for key, _ in self.selector.select(0.005):
            if key.fd in self.selector.get_map():
                key.data()
        self.mesh.tick()

    def end(self) -> None:
        """End as a process that is killed does."""
        self.mesh.close()
        self.listener.close()


def own_entry(number: int, listener: socket.socket) -> HostEntry:
    return HostEntry(number, f"host{number}", "127.0.0.1", int(listener.getsockname()[1]), 2)


@contextmanager
def a_host(number: int, key: str = "secret", former: Sequence[int] = ()) -> Iterator[Host]:
    listener = socket.create_server(("127.0.0.1", 0))
    with selectors.DefaultSelector() as selector, listener:
        entry = own_entry(number, listener)
        found = Host(
            Mesh(entry, key, listener.dup(), selector, KIND, 3.0, former), selector, listener, entry
        )
        found.mesh.on_link = lambda host, link: found.links.append((host, link))
        found.mesh.on_message = lambda host, message: found.messages.append((host, message))
        try:
            yield found
        finally:
            found.mesh.close()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    """Hosts 0 and 1, connected."""
    monkeypatch.setattr(mesh_module, "_REDIAL_S", 0.05)
    with a_host(0) as first, a_host(1) as second:
        first.mesh.add_hosts([second.entry])
        second.mesh.add_hosts([first.entry])
        turn_until(
            lambda: (1, Link.CONNECTED) in first.links and (0, Link.CONNECTED) in second.links,
            first,
            second,
        )
        yield first, second


def turn_until(is_done: Callable[[], object], *hosts: Host) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_done():
        assert time.monotonic() < deadline, [(host.links, host.messages) for host in hosts]
        for host in hosts:
            host.turn()


def turn_for(seconds: float, *hosts: Host) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for host in hosts:
            host.turn()


def test_messages_reach_the_host_that_they_are_sent_to(two: tuple[Host, Host]) -> None:
    first, second = two
    first.mesh.send(1, Reject(3))
    second.mesh.send(0, Reject(4))
    second.mesh.send(7, Reject(5))  # there is none
    turn_until(lambda: first.messages and second.messages, *two)
    assert (first.messages, second.messages) == ([(1, Reject(4))], [(0, Reject(3))])


def test_a_launcher_that_has_ended_is_told_from_a_connection_that_has_broken(
    two: tuple[Host, Host],
) -> None:
    first, second = two
    peer = second.mesh._peers[0]
    peer.connection.socket.shutdown(socket.SHUT_RDWR)
    turn_until(lambda: (1, Link.SILENT) in first.links, *two)
    turn_until(
        lambda: first.links[-1] == (1, Link.CONNECTED), *two
    )  # the host with the greater number dials again
    second.end()
    turn_until(lambda: first.links[-1] == (1, Link.ENDED), first)


def end_with_unread(first: Host, second: Host) -> None:
    """End the second host as the kernel ends a process that is killed before it has read what has
    come.
    """
    end = second.mesh._peers[0].connection.socket
    first.mesh.send(1, Reject(3))
    assert select.select([end], [], [], DEADLINE)[0]
    second.end()  # with unread input, its kernel resets the connection


def test_a_launcher_whose_connection_is_reset_may_have_sent_more(two: tuple[Host, Host]) -> None:
    """Its kernel has thrown away what it had not sent; what has come is read, though."""
    first, second = two
    second.mesh.send(0, Reject(4))
    end_with_unread(first, second)
    turn_until(lambda: first.links[-1] == (1, Link.LOST), first)
    assert first.messages == [(1, Reject(4))]


def test_a_reset_that_sending_finds_first_is_not_the_end_of_all_that_was_sent(
    two: tuple[Host, Host],
) -> None:
    """The kernel tells of it once; who reads afterwards finds the end of a connection, as in good
    order.
    """
    first, second = two
    second.mesh.send(0, Reject(4))
    end_with_unread(first, second)
    peer = first.mesh._peers[1]
    wait_until_broken(lambda: first.mesh.send(1, Reject(5)), peer)
    turn_until(lambda: first.links[-1] == (1, Link.LOST), first)
    assert first.messages == [(1, Reject(4))]


def test_a_reset_that_a_ping_finds_first_is_not_either(two: tuple[Host, Host]) -> None:
    """Pings are sent by another thread while this one writes what nobody reads."""
    first, second = two
    end_with_unread(first, second)
    wait_until_broken(first.mesh.ping, first.mesh._peers[1])
    turn_until(lambda: first.links[-1] == (1, Link.LOST), first)


def wait_until_broken(send: Callable[[], None], peer: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not peer.is_broken:
        assert time.monotonic() < deadline
        send()


def test_a_connection_to_a_host_whose_address_is_not_known_yet_may_end() -> None:
    """That of a host that waits with others until the job begins, to the one that has let it in."""
    with a_host(1) as host, socket.create_server(("127.0.0.1", 0)) as listener:
        for heard in (-100.0, time.monotonic()):
            host.mesh.adopt(
                Connection(socket.create_connection(listener.getsockname()[:2]), KIND), 0
            )
            host.mesh._peers[0].heard = heard
            host.mesh._drop(host.mesh._peers[0])
            turn_for(0.05, host)
            assert host.links[-2:] == [(0, Link.CONNECTED), (0, Link.SILENT)]


def test_how_long_a_host_has_been_silent(two: tuple[Host, Host]) -> None:
    first, _ = two
    first.mesh._peers[1].heard -= 100
    assert 100 <= first.mesh.silent_s(1) < 100 + DEADLINE
    turn_until(lambda: first.mesh.silent_s(1) < 50, *two)  # a ping has come
    assert first.mesh.silent_s(7) == math.inf


def test_a_launcher_whose_connections_end_before_its_socket_has_ended(
    two: tuple[Host, Host],
) -> None:
    first, second = two
    second.mesh.close()
    links = len(first.links)
    turn_for(0.1, first)
    assert len(first.links) == links
    second.listener.close()
    turn_until(lambda: first.links[links:] == [(1, Link.ENDED)], first)


def test_a_host_that_has_not_been_heard_of_is_silent_even_if_nobody_listens(
    two: tuple[Host, Host],
) -> None:
    first, second = two
    turn_until(lambda: not first.mesh.has_unsent, first)
    second.end()
    first.mesh._peers[1].heard = -100.0
    first.mesh._drop(first.mesh._peers[1])
    assert first.links[-1] == (1, Link.SILENT)


def test_after_a_reset_it_is_open_what_the_other_side_had_sent(two: tuple[Host, Host]) -> None:
    """A process that is killed with input that it has not read resets its connections, and what it
    has sent is lost.
    """
    first, second = two
    end, sent = second.mesh._peers[0].connection.socket, 0
    first.mesh.send(1, Reject(1))
    turn_until(lambda: not first.mesh.has_unsent and select.select([end], [], [], 0)[0], first)
    while not unacknowledged(end):  # more than the other side's kernel takes
        second.mesh.send(0, Reject(sent, bytes(1 << 18)))
        sent += 1
    assert not second.mesh.has_unsent
    second.end()
    turn_until(lambda: first.links[-1][1] is not Link.CONNECTED, first)
    assert len(first.messages) < sent
    assert first.links[-1] == (1, Link.LOST)


def unacknowledged(end: socket.socket) -> int:
    """The bytes that this kernel has sent, or is to send, and the other one has not taken."""
    return int.from_bytes(fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\2\xc1\xc1",
        struct.pack("!I", 4) + b"\x92\xa3xyz",
        b"\0\0\0\1\xc0",
    ],
    ids=["too long", "no message", "half a message", "nil"],
)
def test_damaged_messages_end_the_connection_and_nothing_else(
    data: bytes, two: tuple[Host, Host]
) -> None:
    first, second = two
    second.mesh._peers[0].connection.socket.send(data)
    turn_until(lambda: (1, Link.SILENT) in first.links, *two)
    turn_until(lambda: first.links[-1] == (1, Link.CONNECTED), *two)
    assert not first.messages
    with stranger(first) as end:
        end.sendall(data)
        turn_until(lambda: is_closed(end), first)
    assert first.links[-1] == (1, Link.CONNECTED)


@contextmanager
def stranger(host: Host) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", host.entry.port)) as end:
        end.setblocking(False)
        yield end


def is_closed(end: socket.socket) -> bool:
    with suppress(BlockingIOError):
        try:
            return end.recv(4096) == b""
        except ConnectionResetError:
            return True
    return False


def test_who_does_not_know_the_key_is_not_heard() -> None:
    with a_host(0) as first, a_host(1, key="another") as second:
        second.mesh.add_hosts([first.entry])
        first.mesh.add_hosts([second.entry])
        deadline = time.monotonic() + 0.3
        turn_until(lambda: time.monotonic() > deadline, first, second)
        assert not first.links and not second.links


def test_who_listens_must_know_the_key_as_well() -> None:
    with a_host(1) as host, socket.create_server(("127.0.0.1", 0)) as listener:
        host.mesh.add_hosts([own_entry(0, listener)])
        listener.settimeout(DEADLINE)
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept()[0]))
        thread.start()
        turn_until(lambda: accepted, host)
        thread.join()
        with accepted[0] as end:
            end.setblocking(False)
            Connection[Any, Any](end, KIND).send(HostWelcome("wrong"))
            turn_until(lambda: _ends(end), host)
        assert not host.links


def _ends(end: socket.socket) -> bool:
    with suppress(BlockingIOError):
        while data := end.recv(4096):
            assert data
        return True
    return False


def test_a_host_that_does_not_know_its_number_yet_is_dialled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts that begin a job at once would otherwise never be connected, and both wait when the
    leader is lost.
    """
    monkeypatch.setattr(mesh_module, "_REDIAL_S", 0.05)
    with a_host(NEW) as first, a_host(2) as second:
        entry = msgspec.structs.replace(first.entry, number=1)
        second.mesh.add_hosts([entry])
        turn_until(lambda: second.mesh._answering, second)
        turn_until(lambda: not second.mesh._answering, first, second)
        assert not second.links
        first.mesh.own_entry = entry
        turn_until(
            lambda: (1, Link.CONNECTED) in second.links and (2, Link.CONNECTED) in first.links,
            first,
            second,
        )


def test_a_host_that_joins_again_is_not_dialled_as_the_one_that_it_was() -> None:
    with a_host(NEW, former=[1]) as first, a_host(2) as second:
        second.mesh.add_hosts([msgspec.structs.replace(first.entry, number=1)])
        turn_until(lambda: not second.mesh._dialling, first, second)
        assert not first.links and second.links == [(1, Link.LOST)]


def test_a_stranger_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_host(0) as host, stranger(host) as end:
        turn_until(lambda: len(host.mesh._connections.strangers), host)
        monkeypatch.setattr(host.mesh._connections.strangers, "_limit_s", 0.05)
        turn_until(lambda: is_closed(end), host)


def test_a_stranger_that_sends_one_byte_after_another_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    with a_host(0) as host, stranger(host) as end:
        monkeypatch.setattr(host.mesh._connections.strangers, "_clock", lambda: now)
        turn_until(lambda: len(host.mesh._connections.strangers), host)
        data = struct.pack("!I", 60000) + bytes(10)
        for byte in data[:10]:
            now += 1
            end.send(bytes([byte]))
            host.turn()
        assert len(host.mesh._connections.strangers) == 1
        now += 0.1
        turn_until(lambda: is_closed(end), host)


def packed(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(data)) + data


@pytest.mark.parametrize(
    "data",
    [
        packed(HostHello("mine", "\u00e9", host=HostEntry(-1, "", "", 0, 0))),
        packed(HostHello(host=HostEntry(3, "", "", 0, 0), to=0)),
        packed(
            Handshake("secret").answer(
                HostHello("the number of another connection"),
                HostHello(host=HostEntry(3, "", "", 0, 0), to=0),
            )
        ),
        packed(HostWelcome("\u00e9")),
        packed(HostRefused("")),
        packed(Reject(1 << 40)),
        struct.pack("!I", 0) * 1000,
        struct.pack("!I", 60000) + b"\x91" * 60000,
        struct.pack("!I", 60001) + b"\x82\xa4type\xa9HostHello\xa3xyz".ljust(60001, b"\x81"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 70000,
    ],
    ids=[
        "not ASCII",
        "no key",
        "replayed",
        "welcome",
        "refused",
        "of a host",
        "pings",
        "nested",
        "nested field",
        "http",
        "zeros",
    ],
)
def test_whatever_strangers_send_they_are_dropped(data: bytes, two: tuple[Host, Host]) -> None:
    first, second = two
    with stranger(first) as end:
        with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
            end.sendall(data)
        turn_until(lambda: is_closed(end), first)
    second.mesh.send(0, Reject(4))
    turn_until(lambda: first.messages == [(1, Reject(4))], *two)


def test_a_flood_of_strangers_does_not_keep_a_host_out() -> None:
    with a_host(0) as host, ExitStack() as stack:
        host.mesh.on_hello = lambda request: HostWelcome(number=3)
        ends = [stack.enter_context(stranger(host)) for _ in range(100)]
        assert ask_at(host).number == 3
        assert len(ends) == 100 and len(host.mesh._connections.strangers) <= 64


def test_who_dribbles_an_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def dribble() -> None:
            end, _ = listener.accept()
            with end, suppress(OSError):
                while not over.wait(0.01):
                    end.send(b"\0")

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            port = listener.getsockname()[1]
            with pytest.raises(LockstepError, match=rf"no answer from .*:{port} within 0\.2 s"):
                hello = HostHello(host=HostEntry(-1, "", "", 1, 2))
                ask_to_join("127.0.0.1", port, "secret", hello, KIND, 0.2, DEADLINE)
        finally:
            over.set()
            thread.join()


def test_a_launcher_that_does_not_answer_is_said_and_then_silent(
    two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel answers: it is stopped, or hangs."""
    first, _ = two
    said: list[tuple[int, float]] = []
    monkeypatch.setattr(diagnosis, "_LONGEST_TICK_S", math.inf)
    first.mesh.on_silence = lambda host, seconds: said.append((host, seconds))
    first.mesh.silence = SilenceWatch(Patience(30.0, 120.0))
    peer = first.mesh._peers[1]

    def tick_after(seconds: float) -> None:
        first.mesh._next_ping = 0.0
        first.mesh.silence._clock._last -= seconds
        first.mesh.tick()

    tick_after(0)
    tick_after(29)
    assert not said
    for _ in range(3):
        tick_after(2)
    assert said == [(1, 30.0)] and first.links[-1] == (1, Link.CONNECTED)
    peer.heard += 1
    tick_after(0)
    tick_after(31)
    assert said == 2 * [(1, 30.0)]
    tick_after(90)
    assert said[2:] == [(1, 120.0)] and first.links[-1] == (1, Link.SILENT)


def test_a_launcher_that_has_joined_again_does_not_dial_itself(two: tuple[Host, Host]) -> None:
    first, _ = two
    again = HostEntry(-1, first.entry.name, first.entry.address, first.entry.port, 2)
    first.mesh.own_entry = HostEntry(2, again.name, again.address, again.port, 2)
    first.mesh.add_hosts([HostEntry(0, again.name, again.address, again.port, 2)])
    assert not first.mesh._dialling


def test_a_launcher_that_has_joined_again_is_not_taken_for_the_host_that_it_was() -> None:
    with a_host(0) as first, a_host(1) as second:
        first.mesh.own_entry = msgspec.structs.replace(first.entry, number=2)
        second.mesh.add_hosts([first.entry])
        turn_until(lambda: second.mesh.have_ended([0]), first, second)
        assert not first.links and second.links == [(0, Link.LOST)] and not second.mesh._dialling


def test_a_host_with_a_greater_number_that_has_joined_again_is_asked_who_it_is() -> None:
    """It does not dial this one any more, and listens."""
    with a_host(0) as first, a_host(1, former=[1]) as second:
        second.mesh.own_entry = msgspec.structs.replace(second.entry, number=-1)
        first.mesh.add_hosts([second.entry])
        for looks in range(1, mesh_module._ASKED_AFTER + 1):
            assert not first.mesh.have_ended([1])
            turn_until(lambda looks=looks: first.mesh._listens.get(1, 0) >= looks, first, second)
        turn_until(lambda: 1 in first.mesh._refused, first, second)
        assert first.mesh.have_ended([1])
        assert first.links == [(1, Link.LOST)] and not second.links


# --- A new host
# --------------------------------------------------------------------------------------------------


def ask_at(host: Host, *others: Host, key: str = "secret") -> Any:
    """The answer to a new host, or the error."""
    answers: list[Any] = []

    def run() -> None:
        try:
            hello = HostHello(node=7, host=HostEntry(-1, "new", "127.0.0.1", 1, 2))
            connection, welcome = ask_to_join(
                "127.0.0.1", host.entry.port, key, hello, KIND, DEADLINE, DEADLINE
            )
            connection.close()
            answers.append(welcome)
        except (OSError, LockstepError) as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    turn_until(lambda: answers, host, *others)
    thread.join()
    return answers[0]


def test_a_new_host_is_let_in_with_a_number() -> None:
    with a_host(0) as host:
        seen: list[HostHello] = []

        def answer(request: HostHello) -> HostWelcome:
            seen.append(request)
            return HostWelcome(number=3, leader=0, hosts=(host.entry,), spec="what to run")

        host.mesh.on_hello = answer
        welcome = ask_at(host)
        assert (welcome.number, welcome.leader, welcome.hosts, welcome.spec) == (
            3,
            0,
            (host.entry,),
            "what to run",
        )
        assert seen[0].node == 7
        turn_until(
            lambda: len(host.links) == 2, host
        )  # it has ended, and nobody listens at its address
        assert host.links == [(3, Link.CONNECTED), (3, Link.ENDED)]


def test_a_new_host_is_refused_or_sent_to_the_host_that_leads() -> None:
    with a_host(0) as leader, a_host(1) as other:
        leader.mesh.on_hello = lambda request: HostRefused("another version")
        other.mesh.on_hello = lambda request: HostRefused("ask host 0", leader.entry)
        assert "another version" in str(ask_at(other, leader))
        leader.mesh.on_hello = lambda request: HostWelcome(number=2)
        assert ask_at(other, leader).number == 2
        leader.mesh.on_hello = lambda request: HostRefused("ask host 1", other.entry)
        assert "no launcher of the job leads" in str(ask_at(other, leader))
        assert not other.links


def test_a_new_host_with_another_key_is_told_so() -> None:
    with a_host(0) as host:
        host.mesh.on_hello = lambda request: pytest.fail("a stranger has been let in")
        assert "is no launcher of the job, has another key" in str(ask_at(host, key="another"))
        assert not host.links
