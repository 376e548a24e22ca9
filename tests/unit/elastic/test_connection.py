"""Messages of the membership over a socket, and requests to the launcher."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from lockstep.elastic.connection import Connection, from_worker
from lockstep.elastic.control import Answer, ControlSocket, request
from lockstep.elastic.membership import Arrived, Down, Get, Hello, Set, Up, View
from lockstep.elastic.roster import Roster
from lockstep.errors import LockstepError


@pytest.fixture
def ends() -> Iterator[tuple[Connection[Down, Up], Connection[Up, Down]]]:
    near, far = socket.socketpair()
    with near, far:
        yield Connection(near, Down), from_worker(far)


def test_messages_arrive_as_they_were_sent(ends: tuple[Connection[Down, Up], Connection[Up, Down]]) -> None:
    worker, coordinator = ends
    sent = [Hello(3), Arrived(2, (0, 7, 1), True), Set(2, "key", b"\0value"), Get(5, 2, ("a", "b"))]
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
        sender, receiver = Connection[Down, Up](near, Down), from_worker(far)
        data = bytearray()
        sender.socket = _Collects(data)  # type: ignore[assignment]
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


def test_the_end_of_a_connection_is_told(ends: tuple[Connection[Down, Up], Connection[Up, Down]]) -> None:
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
def test_what_is_no_message_is_an_error(data: bytes, ends: tuple[Connection[Down, Up], Connection[Up, Down]]) -> None:
    worker, coordinator = ends
    worker.socket.send(data)
    with pytest.raises(msgspec.DecodeError):
        list(coordinator.receive_available())


# --- lockstep resize ----------------------------------------------------------------------------------------


def resize(what: str, number: int, host: str, answer: Answer) -> None:
    answer(f"{what} to {number}{host}", number < 4)


def test_a_request_gets_its_answer(tmp_path: Path) -> None:
    with controlled(tmp_path) as (path, selector):
        assert _ask(selector, path, 3) == "resize to 3"
        with pytest.raises(LockstepError, match="resize to 4"):
            _ask(selector, path, 4)


@contextmanager
def controlled(folder: Path) -> Iterator[tuple[str, selectors.BaseSelector]]:
    """The path of a control socket, and the selector of its loop."""
    path = str(folder / "control")
    with selectors.DefaultSelector() as selector:
        control = ControlSocket(path, resize, selector)
        try:
            yield path, selector
        finally:
            control.close()


def turn(selector: selectors.BaseSelector, seconds: float) -> None:
    """One turn of a launcher's loop."""
    for key, _ in selector.select(seconds):
        key.data()


def _ask(selector: selectors.BaseSelector, path: str, workers: int) -> str:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(request, path, "resize", workers)
        while not asked.done():
            turn(selector, 0.01)
        return asked.result()


@pytest.mark.parametrize("data", [b"\n", b'{"what": 3}\n', b'{"what": "", "number": 1e99}\n', b"[" * 60000])
def test_a_damaged_request_is_refused(data: bytes, tmp_path: Path) -> None:
    with controlled(tmp_path) as (path, selector), socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        end.setblocking(False)
        while (answer := received(end)) is None:
            turn(selector, 20.0)
        assert b'"accepted": false' in answer


def received(end: socket.socket) -> bytes | None:
    """What has come; None for nothing."""
    try:
        return end.recv(4096)
    except BlockingIOError:
        return None


def test_a_launcher_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="does not answer"):
        request(str(tmp_path / "none"), "resize", 2)


def test_who_sends_no_request_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    path = str(tmp_path / "control")
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        control = ControlSocket(path, resize, selector)
        stack.callback(control.close)
        monkeypatch.setattr(control._strangers, "_clock", lambda: now)
        ends = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for end in ends:
            end.setblocking(False)
            end.connect(path)
        turn(selector, 20.0)
        for _ in range(10):
            now += 1
            ends[0].send(b"{")
            turn(selector, 20.0)
            control.tick()
        assert [received(end) for end in ends] == [None] * 3
        now += 0.1
        control.tick()
        assert [received(end) for end in ends] == [b""] * 3


def test_who_is_gone_before_the_answer_is_no_error(tmp_path: Path) -> None:
    path, answers = str(tmp_path / "control"), list[Answer]()
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        control = ControlSocket(path, lambda what, number, host, answer: answers.append(answer), selector)
        stack.callback(control.close)
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(path)
            end.sendall(b'{"what": "resize"}\n')
            while not answers:
                turn(selector, 20.0)
        while control._asked:
            turn(selector, 20.0)
        answers[0]("done", True)


# --- the socket of the workers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\0\0\0\2\xc1\xc1", b"\0\0\xea\x60" + b"\x91" * 60000, b"\0" * 100],
    ids=["too long", "no message", "nested", "zeros"],
)
def test_who_is_no_worker_is_closed(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        roster = Roster(tmp_path, selector, lambda number, message: pytest.fail(f"{number} {message}"))
        stack.callback(roster.close)
        monkeypatch.setattr(roster._strangers, "_clock", lambda: now)
        garbage, idle = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        for end in (garbage, idle):
            end.connect(roster.path)
            end.setblocking(False)
        with suppress(BlockingIOError, OSError):
            garbage.sendall(data)
        while not is_closed(garbage):
            turn(selector, 20.0)
        Connection[Down, Up](idle, Down).send(Set(0, "key", b""))  # not what a worker sends first
        while not is_closed(idle):
            turn(selector, 20.0)
        late = stack.enter_context(socket.socket(socket.AF_UNIX))
        late.connect(roster.path)
        late.setblocking(False)
        turn(selector, 20.0)
        now = 10.1
        roster.tick()
        assert is_closed(late)


def is_closed(end: socket.socket) -> bool:
    try:
        return received(end) == b""
    except ConnectionResetError:
        return True
