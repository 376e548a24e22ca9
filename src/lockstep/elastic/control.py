"""Requests to the launcher of a running elastic job: how many workers it shall have."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from .. import messages
from ..errors import LockstepError
from ..messages import Integer

__all__ = ["ControlSocket", "request_workers"]

_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 16


class _Request(msgspec.Struct, frozen=True):
    """The number of workers that the job shall have."""

    workers: Integer


class _Reply(msgspec.Struct, frozen=True):
    """What the launcher does, or why it does not."""

    text: str
    accepted: bool


class ControlSocket:
    """The launcher's end: a Unix socket in a private folder of this user.

    Args:
        path: of the socket.
        resize: called with a number of workers; returns what is done, or raises LockstepError with why it is not.
    """

    def __init__(self, path: str, resize: Callable[[int], str]) -> None:
        self._resize = resize
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(8)
        self.listener.setblocking(False)

    def answer(self) -> None:
        """Answer a request; called when the listener can be read."""
        with suppress(OSError):
            end, _ = self.listener.accept()
            with end:
                end.settimeout(1.0)
                self._answer(end)

    def _answer(self, end: socket.socket) -> None:
        try:
            reply = _Reply(self._resize(messages.decode(_receive(end), _Request).workers), True)
        except ValueError as error:
            reply = _Reply(f"the request is damaged: {error}", False)
        except LockstepError as error:
            reply = _Reply(str(error), False)
        end.sendall(messages.encode(reply).encode() + b"\n")

    def close(self) -> None:
        """Close the socket."""
        self.listener.close()


def request_workers(path: str, workers: int) -> str:
    """Ask the launcher whose control socket is at `path` for a number of workers; returns what it does.

    Raises:
        LockstepError: it does not, or it does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(_TIMEOUT_S)
            end.connect(path)
            end.sendall(messages.encode(_Request(workers)).encode() + b"\n")
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
