"""Whether others live: what the kernel says of connections on which nothing is sent."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from lockstep.heartbeat import Heartbeat, Hub, Spoke, address_towards

LIMIT = 20.0


def wait_until(holds: Callable[[], bool], *looked_at: Heartbeat) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, [vars(each) for each in looked_at]
        for each in looked_at:
            each.look()
        time.sleep(0.005)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(30.0)
    yield made
    made.close()


def spoke_of(hub: Hub, member: int = 1) -> Spoke:
    made = Spoke(hub.open_towards("127.0.0.1"), hub.token, member, 30.0)
    wait_until(lambda: made.life(0) == hub.life(member) == "lives", hub, made)
    return made


def test_each_learns_how_the_other_leaves(hub: Hub) -> None:
    well, badly, last = (spoke_of(hub, member) for member in (1, 2, 3))
    well.close()
    badly.abandon()  # as the kernel does for a process that is killed
    wait_until(lambda: hub.life(1) != "lives" and hub.life(2) != "lives", hub)
    assert [hub.life(member) for member in range(1, 5)] == ["left", "ended", "lives", "unknown"]
    hub.close()
    wait_until(lambda: last.life(0) == "left", last)
    last.close()
    last.look()  # nothing more to see


def test_a_process_that_is_stopped_lives_and_one_that_is_killed_does_not(hub: Hub) -> None:
    where = hub.open_towards("127.0.0.1")
    child = os.fork()
    if child == 0:
        mine = Spoke(where, hub.token, 7, 1.0)
        while True:
            mine.look()
            time.sleep(0.01)
    try:
        wait_until(lambda: hub.life(7) == "lives", hub)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        begin = time.monotonic()
        while time.monotonic() - begin < 3:
            hub.look()
            assert hub.life(7) == "lives"
            time.sleep(0.05)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wait_until(lambda: hub.life(7) == "ended", hub)


def test_one_that_is_killed_before_it_was_noticed_has_ended(hub: Hub) -> None:
    """As a rank may be at once after its group has been made."""
    Spoke(hub.open_towards("127.0.0.1"), hub.token, 5, 30.0).abandon()
    wait_until(lambda: hub.life(5) == "ended", hub)
    Spoke(hub.open_towards("127.0.0.1"), hub.token, 6, 30.0).close()
    wait_until(lambda: hub.life(6) == "left", hub)


def test_a_forked_child_does_not_keep_its_parent_alive(hub: Hub) -> None:
    spoke = spoke_of(hub)
    child = os.fork()
    if child == 0:
        spoke.abandon()
        hub.abandon()
        time.sleep(1000)
    try:
        time.sleep(0.2)
        hub.look()
        assert hub.life(1) == "lives"
        spoke.abandon()
        wait_until(lambda: hub.life(1) == "ended", hub)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_strangers_are_sent_away(hub: Hub) -> None:
    host, port = hub.open_towards("127.0.0.1").split()
    assert host == "127.0.0.1"  # no wider than those listen whom it is for
    for said in (b"x" * 200, b"x 1\n", hub.token[:32].encode() + b" -1\n", hub.token.encode() + b" 1\n"):
        with socket.create_connection((host, int(port)), timeout=LIMIT) as stranger:
            stranger.sendall(said)
            stranger.setblocking(False)

            def is_sent_away(stranger: socket.socket = stranger) -> bool:
                try:
                    return stranger.recv(100) == b""
                except BlockingIOError:
                    return False
                except ConnectionResetError:
                    return True

            wait_until(is_sent_away, hub)
    crowd = [socket.create_connection((host, int(port)), timeout=LIMIT) for _ in range(100)]
    own = spoke_of(hub)  # they do not keep others out
    own.close()
    for each in crowd:
        each.close()


def test_without_a_way_to_the_hub_nothing_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        impostor = Spoke(f"127.0.0.1 {port}", "0" * 64, 1, 30.0)
        connection, _ = door.accept()
        connection.sendall(b"hello")
        connection.close()
        wait_until(lambda: impostor.has_failed, impostor)
    refused = Spoke(f"127.0.0.1 {port}", "0" * 64, 1, 30.0)
    wait_until(lambda: refused.has_failed, refused)
    assert impostor.life(0) == refused.life(0) == "unknown"
    for each in (impostor, refused):
        each.close()


def test_the_address_in_the_network_of_another() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError):
        address_towards("no.such.name.invalid")
