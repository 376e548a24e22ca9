"""Requests to a launcher of a running elastic job: how many workers it shall have, and which host
shall leave.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from .. import messages
from ..errors import LockstepError
from ..job.messages import Reply, Request
from ..system.strangers import Strangers

Answer = Callable[[str, bool], None]
"""Called with what the job does, or why it does not, and whether it does."""

_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 16


@dataclass(eq=False)
class _Asker:
    """A connection on which a request comes. Attributes: received, of the request so far;
    has_asked, all of it.
    """

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    has_asked: bool = False


class ControlSocket:
    """The launcher's end: a Unix socket in a private folder of this user. Nothing here waits for
    who asks.

    Args:
        path: of the socket.
        ask: called with the request, and what to call with the answer, which may come later.
        selector: of the launcher's loop; the data of each key is a function to call when it is
            ready.
    """

    def __init__(
        self,
        path: str,
        ask: Callable[[str, int, str, Answer], None],
        selector: selectors.BaseSelector,
    ) -> None:
        self._ask = ask
        self._selector = selector
        self._strangers: Strangers[_Asker] = Strangers(self._close)  # who have not asked yet
        self._asked: set[_Asker] = set()  # who wait for an answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self) -> None:
        """Close the connections on which no request has come in time."""
        self._strangers.tick()

    def _accept(self) -> None:
        self._strangers.accept(self._listener, self._open)

    def _open(self, end: socket.socket) -> _Asker:
        asker = _Asker(end)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._receive(asker))
        return asker

    def _receive(self, asker: _Asker) -> None:
        try:
            data = asker.socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if asker.has_asked:  # it has not understood that one request is all, or waits no more
            self._asked.discard(asker)
            self._close(asker)
            return
        asker.received += data
        if not data or asker.received.endswith(b"\n") or len(asker.received) >= _MOST_BYTES:
            self._take(asker)

    def _take(self, asker: _Asker) -> None:
        """Pass on the request of `asker`, and its answer when that is known."""
        asker.has_asked = True
        self._strangers.identified(asker)
        self._asked.add(asker)

        def answer(text: str, accepted: bool) -> None:
            with suppress(OSError):  # who asked may be gone
                asker.socket.send(messages.encode(Reply(0, text, accepted)).encode() + b"\n")
            self._asked.discard(asker)
            self._close(asker)

        try:
            request = messages.decode(bytes(asker.received), Request)
        except ValueError as error:
            answer(f"the request is damaged: {error}", False)
        else:
            self._ask(request.what, request.count, request.host, answer)

    def _close(self, asker: _Asker) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(asker.socket)
        asker.socket.close()

    def close(self) -> None:
        """Close the socket and all connections."""
        self._strangers.close()
        for asker in self._asked:
            self._close(asker)
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()


def request(path: str, what: str, count: int = 0, host: str = "") -> str:
    """Ask the launcher whose control socket is at `path`; returns what the job does.

    Raises:
        LockstepError: it does not, or it does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(_TIMEOUT_S)
            end.connect(path)
            end.sendall(messages.encode(Request(0, what, count, host)).encode() + b"\n")
            reply = messages.decode(_receive(end, time.monotonic() + _TIMEOUT_S), Reply)
    except (OSError, ValueError) as error:
        raise LockstepError(f"the job's launcher does not answer: {error}") from None
    if not reply.accepted:
        raise LockstepError(reply.text)
    return reply.text


def _receive(end: socket.socket, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _MOST_BYTES:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        piece = end.recv(4096)
        if not piece:
            break
        data += piece
    return data
