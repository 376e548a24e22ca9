"""Requests to a launcher."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.elastic.control import Answer, ControlSocket, request
from lockstep.errors import LockstepError


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


@pytest.mark.parametrize(
    "data", [b"\n", b'["Request", 0, 3]\n', b'["Request", 0, "", 1e99]\n', b"[" * 60000]
)
def test_a_damaged_request_is_refused(data: bytes, tmp_path: Path) -> None:
    with controlled(tmp_path) as (path, selector), socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        end.setblocking(False)
        while (answer := received(end)) is None:
            turn(selector, 20.0)
        assert answer.endswith(b", false]\n")


def received(end: socket.socket) -> bytes | None:
    """What has come; None for nothing."""
    try:
        return end.recv(4096)
    except BlockingIOError:
        return None


def test_a_launcher_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="does not answer"):
        request(str(tmp_path / "none"), "resize", 2)


def test_who_sends_no_request_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        control = ControlSocket(
            path, lambda what, number, host, answer: answers.append(answer), selector
        )
        stack.callback(control.close)
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(path)
            end.sendall(b'["Request", 0, "resize"]\n')
            while not answers:
                turn(selector, 20.0)
        while control._asked:
            turn(selector, 20.0)
        answers[0]("done", True)
