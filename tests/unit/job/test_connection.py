"""Messages over a socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from lockstep.elastic.keys import StoreRequest
from lockstep.elastic.membership import Down, Up, View, WorkerState
from lockstep.job.connection import START, Connection, Pipes
from lockstep.job.messages import Hello


def launcher_end(end: socket.socket) -> Connection[Up, Down]:
    end.setblocking(False)
    return Connection(end, Up)


@pytest.fixture
def ends() -> Iterator[tuple[Connection[Down, Up], Connection[Up, Down]]]:
    near, far = socket.socketpair()
    with near, far:
        yield Connection(near, Down), launcher_end(far)


def test_messages_arrive_as_they_were_sent(
    ends: tuple[Connection[Down, Up], Connection[Up, Down]],
) -> None:
    worker, coordinator = ends
    sent = [
        Hello(3),
        WorkerState("arrived", 2, (0, 7, 1), leaving=True),
        StoreRequest(2, "set", ("key",), (b"\0value",)),
        StoreRequest(2, "get", ("a", "b"), request=5),
    ]
    for message in sent:
        worker.send(message)
    assert list(coordinator.receive_available()) == sent
    view = View(2, (0, 3), (0, 0), ((0, 7, 1), ()), 0, (0, 7, 1), b"state")
    coordinator.send(view)
    assert worker.receive() == view


def test_what_does_not_fit_into_the_socket_is_sent_later(
    ends: tuple[Connection[Down, Up], Connection[Up, Down]],
) -> None:
    worker, coordinator = ends
    view = View(1, (0,), (0,), ((),), 0, (), bytes(4 << 20))
    coordinator.send(view)  # nobody reads: a blocking socket would wait here for ever
    assert coordinator.has_unsent
    received: list[Down | None] = []
    reader = threading.Thread(target=lambda: received.append(worker.receive()))
    reader.start()
    while not coordinator.flush():
        pass
    reader.join()
    assert received == [view]


def test_a_message_in_pieces_is_one_message() -> None:
    near, far = socket.socketpair()
    with near, far:
        sender, receiver = Connection[Down, Up](near, Down), launcher_end(far)
        data = bytearray()
        sender._end = _Collects(data)  # type: ignore[assignment]
        sender.send(Hello(1))
        for number, byte in enumerate(data):
            near.send(bytes([byte]))
            expected = [Hello(1)] if number == len(data) - 1 else []
            assert list(receiver.receive_available()) == expected


class _Collects:
    def __init__(self, data: bytearray) -> None:
        self._data = data

    def send(self, piece: bytes) -> int:
        self._data += piece
        return len(piece)


def test_the_end_of_a_connection_is_told(
    ends: tuple[Connection[Down, Up], Connection[Up, Down]],
) -> None:
    worker, coordinator = ends
    worker.send(Hello(1))
    worker.socket.shutdown(socket.SHUT_WR)
    received = coordinator.receive_available()
    assert next(received) == Hello(1)
    with pytest.raises(EOFError):
        next(received)
    coordinator.close()
    assert worker.receive() is None


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\2\xc1\xc1", b"\0\0\0\3\x92\xa1x"])
def test_what_is_no_message_is_an_error(
    data: bytes, ends: tuple[Connection[Down, Up], Connection[Up, Down]]
) -> None:
    worker, coordinator = ends
    worker.socket.send(data)
    with pytest.raises(msgspec.DecodeError):
        list(coordinator.receive_available())


def test_pings_are_counted_and_are_no_messages(
    ends: tuple[Connection[Down, Up], Connection[Up, Down]],
) -> None:
    worker, coordinator = ends
    worker.ping()
    worker.send(Hello(1))
    worker.ping()
    worker.ping()
    assert list(coordinator.receive_available()) == [Hello(1)]
    assert coordinator.pings == 3


def test_the_end_is_known_before_it_is_received_unless_something_is_left(
    ends: tuple[Connection[Down, Up], Connection[Up, Down]],
) -> None:
    worker, coordinator = ends
    assert not coordinator.is_at_end
    worker.send(Hello(1))
    worker.close()
    assert not coordinator.is_at_end
    assert next(coordinator.receive_available()) == Hello(1)
    assert coordinator.is_at_end


def test_of_who_has_not_shown_who_it_is_no_ping_is_taken(
    ends: tuple[Connection[Down, Up], Connection[Up, Down]],
) -> None:
    worker, coordinator = ends
    coordinator.is_strange = True
    worker.ping()
    with pytest.raises(msgspec.DecodeError, match="who the other side is, got a ping"):
        list(coordinator.receive_available())
    assert coordinator.pings == 0


# --- over the pipes of ssh ------------------------------------------------------------------------


def test_messages_travel_over_pipes() -> None:
    there, back = os.pipe(), os.pipe()
    near = Connection[Down, Up](Pipes(back[0], there[1]), Down)
    far = Connection[Up, Down](Pipes(there[0], back[1]), Up)
    near.send(Hello(3))
    near.ping()
    near.send(Hello(4))
    assert [far.receive(), far.receive(), far.pings] == [Hello(3), Hello(4), 1]
    near.close()
    assert far.receive() is None
    with pytest.raises(OSError):
        far.send(WorkerState("arrived", leaving=True))
    far.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize("before", [b"", b"Welcome\nto \x1elockstep: messages", b"\x1e" * 200])
def test_what_a_login_shell_writes_is_no_message(before: bytes, size: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        sender, receiver = Connection[Down, Up](near, Down), Connection[Up, Down](far, Up)
        data = before + START
        for start in range(0, len(data), size):
            near.sendall(data[start : start + size])
        sender.send(Hello(3))
        assert b"".join(receiver.skip_to_start()) == before
        assert receiver.receive() == Hello(3)


def test_a_connection_that_ends_before_its_start_has_only_what_a_shell_wrote() -> None:
    near, far = socket.socketpair()
    with far:
        near.sendall(b"no such host\n" + START[:-1])
        near.close()
        receiver: Connection[Up, Down] = Connection(far, Up)
        assert b"".join(receiver.skip_to_start()) == b"no such host\n" + START[:-1]
        assert receiver.receive() is None
