"""Requests to a launcher of a running elastic job: how many workers it shall have, and which host shall leave."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from .. import messages
from ..errors import LockstepError
from ..messages import Integer

__all__ = ["Answer", "ControlSocket", "request"]

Answer = Callable[[str, bool], None]
"""Called with what the job does, or why it does not, and whether it does."""

_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 16


class _Request(msgspec.Struct, frozen=True):
    """`what` is "resize" to a number, "remove" of a host, or "address" for how another host can join."""

    what: str
    number: Integer = 0
    host: str = ""


class _Reply(msgspec.Struct, frozen=True):
    """What the launcher does, or why it does not."""

    text: str
    accepted: bool


class ControlSocket:
    """The launcher's end: a Unix socket in a private folder of this user.

    Args:
        path: of the socket.
        ask: called with the request, and what to call with the answer, which may come later.
    """

    def __init__(self, path: str, ask: Callable[[str, int, str, Answer], None]) -> None:
        self._ask = ask
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(8)
        self.listener.setblocking(False)

    def answer(self) -> None:
        """Answer a request; called when the listener can be read."""
        with suppress(OSError):
            end, _ = self.listener.accept()
            end.settimeout(1.0)
            self._answer(end)

    def _answer(self, end: socket.socket) -> None:
        def answer(text: str, accepted: bool) -> None:
            with suppress(OSError), end:  # who asked may be gone
                end.sendall(messages.encode(_Reply(text, accepted)).encode() + b"\n")

        try:
            request = messages.decode(_receive(end), _Request)
        except ValueError as error:
            answer(f"the request is damaged: {error}", False)
        else:
            self._ask(request.what, request.number, request.host, answer)

    def close(self) -> None:
        """Close the socket."""
        self.listener.close()


def request(path: str, what: str, number: int = 0, host: str = "") -> str:
    """Ask the launcher whose control socket is at `path`; returns what the job does.

    Raises:
        LockstepError: it does not, or it does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(_TIMEOUT_S)
            end.connect(path)
            end.sendall(messages.encode(_Request(what, number, host)).encode() + b"\n")
            reply = messages.decode(_receive(end), _Reply)
    except (OSError, ValueError) as error:
        raise LockstepError(f"the job's launcher does not answer: {error}") from None
    if not reply.accepted:
        raise LockstepError(reply.text)
    return reply.text


def _receive(end: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _MOST_BYTES:
        piece = end.recv(4096)
        if not piece:
            break
        data += piece
    return data
