"""Connections that have not identified themselves: how many there may be, and for how long."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from lockstep.system.strangers import LIMIT_S, MOST, Strangers


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as made:
        made.setblocking(False)
        yield made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Held:
    """Strangers at a listener, on a clock that stands still."""

    def __init__(self, stack: ExitStack, listener: socket.socket) -> None:
        self.now, self.closed, self.made = 0.0, list[str](), list[socket.socket]()
        self.listener = listener
        self.strangers: Strangers[socket.socket] = Strangers(self.close, clock=lambda: self.now)
        stack.callback(self.strangers.close)

    def close(self, end: socket.socket) -> None:
        self.closed.append(end.getpeername()[0])
        end.close()

    def open(self, end: socket.socket) -> socket.socket:
        self.made.append(end)
        return end

    def accept(self) -> None:
        """Accept all that wait."""
        while True:
            before = len(self.made)
            self.strangers.accept(self.listener, self.open)
            if len(self.made) == before:
                return


@pytest.fixture
def held(stack: ExitStack, listener: socket.socket) -> Held:
    return Held(stack, listener)


def connect(
    stack: ExitStack, listener: socket.socket, count: int, source: str = "127.0.0.1"
) -> list[socket.socket]:
    address = listener.getsockname()
    return [
        stack.enter_context(socket.create_connection(address, 10, (source, 0)))
        for _ in range(count)
    ]


def test_a_stranger_is_closed_ten_seconds_after_its_acceptance(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    connect(stack, listener, 1)
    held.accept()
    held.now = LIMIT_S / 2
    connect(stack, listener, 1)
    held.accept()
    held.now = LIMIT_S
    held.strangers.tick()
    assert not held.closed
    held.now = LIMIT_S + 0.1
    held.strangers.tick()
    assert len(held.closed) == 1 and len(held.strangers) == 1
    assert LIMIT_S == 10.0


def test_who_has_identified_itself_stays(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    connect(stack, listener, 1)
    held.accept()
    held.strangers.identified(held.made[0])
    held.now = 1000.0
    held.strangers.tick()
    assert not held.closed and held.made[0] not in held.strangers
    held.made[0].close()


def test_a_flood_drops_its_own_connections_and_no_others(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    connect(stack, listener, 2, "127.0.0.2")
    held.accept()
    connect(stack, listener, 3 * MOST)
    held.accept()
    assert len(held.strangers) == MOST
    assert set(held.closed) == {"127.0.0.1"}
    assert all(end in held.strangers for end in held.made[:2])


def test_one_turn_does_not_drop_what_it_has_just_accepted(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    """Many peers may connect at once, and have sent who they are: that is read before the next are
    accepted.
    """
    connect(stack, listener, 2 * MOST)
    held.strangers.accept(listener, held.open)
    assert 0 < len(held.made) <= MOST and not held.closed


def test_a_connection_that_ends_while_it_is_accepted_is_closed(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    connect(stack, listener, 1)

    def fail(end: socket.socket) -> socket.socket:
        held.made.append(end)
        raise OSError("gone")

    held.strangers.accept(listener, fail)
    assert held.made[0].fileno() == -1 and not len(held.strangers)


class Exhausted:
    """A listener of a process that has no descriptor until it `has_room`."""

    def __init__(self, listener: socket.socket, has_room: Callable[[], bool]) -> None:
        self.listener, self.has_room = listener, has_room

    def accept(self) -> tuple[socket.socket, object]:
        if not self.has_room():
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()


def test_without_descriptors_the_oldest_stranger_goes(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    connect(stack, listener, 2)
    held.accept()
    connect(stack, listener, 1)
    full = Exhausted(listener, lambda: held.made[0].fileno() == -1)
    for _ in range(2):
        held.strangers.accept(full, held.open)  # type: ignore[arg-type]
    assert len(held.closed) == 1 and held.made[0].fileno() == -1
    assert len(held.made) == 3


def test_without_descriptors_and_strangers_the_newcomer_is_refused(
    stack: ExitStack, listener: socket.socket, held: Held
) -> None:
    """Else the selector would tell of it again and again."""
    (end,) = connect(stack, listener, 1)
    full = Exhausted(listener, lambda: held.strangers._spare == -1)
    held.strangers.accept(full, held.open)  # type: ignore[arg-type]
    assert end.recv(1) == b"" and not held.made
    assert held.strangers._spare >= 0
