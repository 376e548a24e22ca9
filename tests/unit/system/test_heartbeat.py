"""Liveness of processes on other hosts: what the kernel reports about idle connections."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from lockstep.system.heartbeat import (
    Heartbeat,
    HeartbeatClient,
    HeartbeatServer,
    _Connection,
    address_towards,
    keep_alive,
)

LIMIT = 20.0


def wait_until(holds: Callable[[], bool], *polled: Heartbeat) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, [vars(each) for each in polled]
        for each in polled:
            each.poll()
        time.sleep(0.005)


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    made = HeartbeatServer(30.0)
    yield made
    made.close()


def connect(server: HeartbeatServer, peer: int = 1) -> HeartbeatClient:
    made = HeartbeatClient(server.listen_for("127.0.0.1"), server.token, peer, 30.0)
    wait_until(lambda: made.state(0) == server.state(peer) == "alive", server, made)
    return made


def test_each_learns_how_the_other_leaves(server: HeartbeatServer) -> None:
    well, badly, last = (connect(server, peer) for peer in (1, 2, 3))
    well.close()
    badly.close_in_child()  # as the kernel does for a process that is killed
    wait_until(lambda: server.state(1) != "alive" and server.state(2) != "alive", server)
    assert [server.state(peer) for peer in range(1, 5)] == ["left", "ended", "alive", "unknown"]
    server.close()
    wait_until(lambda: last.state(0) == "left", last)
    last.close()
    last.poll()  # nothing more to see


def test_a_process_that_is_stopped_lives_and_one_that_is_killed_does_not(
    server: HeartbeatServer,
) -> None:
    where = server.listen_for("127.0.0.1")
    child = os.fork()
    if child == 0:
        mine = HeartbeatClient(where, server.token, 7, 1.0)
        while True:
            mine.poll()
            time.sleep(0.01)
    try:
        wait_until(lambda: server.state(7) == "alive", server)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        begin = time.monotonic()
        while time.monotonic() - begin < 3:
            server.poll()
            assert server.state(7) == "alive"
            time.sleep(0.05)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wait_until(lambda: server.state(7) == "ended", server)


def test_one_that_is_killed_before_it_was_noticed_has_ended(server: HeartbeatServer) -> None:
    """As a rank may be at once after its group has been made."""
    HeartbeatClient(server.listen_for("127.0.0.1"), server.token, 5, 30.0).close_in_child()
    wait_until(lambda: server.state(5) == "ended", server)
    HeartbeatClient(server.listen_for("127.0.0.1"), server.token, 6, 30.0).close()
    wait_until(lambda: server.state(6) == "left", server)


def test_a_forked_child_does_not_keep_its_parent_alive(server: HeartbeatServer) -> None:
    client = connect(server)
    child = os.fork()
    if child == 0:
        client.close_in_child()
        server.close_in_child()
        time.sleep(1000)
    try:
        time.sleep(0.2)
        server.poll()
        assert server.state(1) == "alive"
        client.close_in_child()
        wait_until(lambda: server.state(1) == "ended", server)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_unidentified_connections_are_closed(server: HeartbeatServer) -> None:
    host, port = server.listen_for("127.0.0.1").split()
    assert host == "127.0.0.1"  # no wider than those listen whom it is for
    for said in (
        b"x" * 200,
        b"x 1\n",
        server.token[:32].encode() + b" -1\n",
        server.token.encode() + b" 1\n",
    ):
        with socket.create_connection((host, int(port)), timeout=LIMIT) as client_socket:
            client_socket.sendall(said)
            client_socket.setblocking(False)

            def is_closed(client_socket: socket.socket = client_socket) -> bool:
                try:
                    return client_socket.recv(100) == b""
                except BlockingIOError:
                    return False
                except ConnectionResetError:
                    return True

            wait_until(is_closed, server)
    crowd = [socket.create_connection((host, int(port)), timeout=LIMIT) for _ in range(100)]
    own = connect(server)  # they do not keep others out
    own.close()
    for each in crowd:
        each.close()


def test_connections_that_one_poll_closes_are_not_handled_in_the_same(
    server: HeartbeatServer,
) -> None:
    """Those that are too many are closed while the same poll is about to read what they have
    sent.
    """
    host, port = server.listen_for("127.0.0.1").split()
    own = connect(server)
    with ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection((host, int(port)), LIMIT))
            for _ in range(64)
        ]
        wait_until(lambda: len(server._strangers) == 64, server)
        for each in crowd:
            each.sendall(b"x")
        more = [
            stack.enter_context(socket.create_connection((host, int(port)), LIMIT))
            for _ in range(70)
        ]
        for _ in range(10):
            server.poll()
        assert len(server._strangers) == 64 and len(more) == 70
        assert server.state(1) == "alive"
    own.close()


def test_a_connection_that_sends_one_byte_after_another_is_closed(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = server.listen_for("127.0.0.1").split()
    now = 0.0
    monkeypatch.setattr(server._strangers, "_clock", lambda: now)
    with socket.create_connection((host, int(port)), LIMIT) as end:
        wait_until(lambda: len(server._strangers) == 1, server)
        while now < 10:
            now += 1
            end.sendall(b"x")
            server.poll()
            assert len(server._strangers) == 1
        now += 0.1
        server.poll()
        assert len(server._strangers) == 0 and end.recv(1) == b""


def test_data_without_end_are_read_by_and_by() -> None:
    class Endless:
        reads = 0

        def recv(self, size: int) -> bytes:
            self.reads += 1
            return b"x" * size

    end = Endless()
    connection = _Connection(end)  # type: ignore[arg-type]
    assert connection.read() and end.reads == 1 and len(connection.received) <= 256


def test_who_connects_at_the_same_time_as_many_others_is_known(server: HeartbeatServer) -> None:
    where = server.listen_for("127.0.0.1")
    clients = [HeartbeatClient(where, server.token, peer, 30.0) for peer in range(1, 151)]
    wait_until(
        lambda: all(server.state(peer) == "alive" for peer in range(1, 151)), server, *clients
    )
    for each in clients:
        each.close()


def test_without_a_route_to_the_server_the_state_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        impostor = HeartbeatClient(f"127.0.0.1 {port}", "0" * 64, 1, 30.0)
        connection, _ = listener.accept()
        connection.sendall(b"hello")
        connection.close()
        wait_until(lambda: impostor.has_failed, impostor)
    refused = HeartbeatClient(f"127.0.0.1 {port}", "0" * 64, 1, 30.0)
    wait_until(lambda: refused.has_failed, refused)
    assert impostor.state(0) == refused.state(0) == "unknown"
    for each in (impostor, refused):
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_what_is_not_acknowledged_is_sent_again_once_a_second() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as end,
    ):
        keep_alive(end, 30.0)
        assert end.getsockopt(socket.IPPROTO_TCP, 16) == 1  # TCP_THIN_LINEAR_TIMEOUTS
        try:
            longest_ms = end.getsockopt(socket.IPPROTO_TCP, 44)  # TCP_RTO_MAX_MS
        except OSError:
            pytest.skip("the kernel has no such option")
        assert longest_ms == 1000


def test_the_address_in_the_network_of_another() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError):
        address_towards("no.such.name.invalid")
