"""A worker's connection to the launcher of its host."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from .connection import Connection, connect_to_launcher
from .messages import Failure, Finished, Hello, Note, Peers, ToAnyWorker

_TURN_S = 0.5  # between two calls of `on_turn`, at most

Take = Callable[[Any], None]


class JobClient:
    """This worker's end of the connection. A thread receives.

    Args:
        path: of the launcher's socket.
        number: of this worker on its host, or in an elastic job in the job.
        incoming: the type of all messages that may come.
        on_turn: called in the thread at least every half second, as long as the connection is open.
        on_lost: called in the thread when it has ended.

    Attributes:
        number: of this worker.
        pings: how often the launcher has shown that it runs.
        peers: the processes of the workers of this host.

    Raises:
        OSError: no launcher listens there.
    """

    def __init__(
        self,
        path: str,
        number: int,
        incoming: object = ToAnyWorker,
        on_turn: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self.peers: frozenset[int] = frozenset({os.getpid()})
        self._on_turn = on_turn
        self._on_lost = on_lost
        self._released = threading.Event()
        self._lock = threading.RLock()
        self._unread: deque[Any] = deque()  # messages for which nobody has asked yet
        self._take: Take | None = None
        self._tell_lost: Callable[[], None] = lambda: None
        self._is_lost = False
        self._connection: Connection[Any, Any] = connect_to_launcher(path, incoming)
        self.send(Hello(number))
        _clients[:] = [self]
        threading.Thread(target=self._run, name="lockstep job", daemon=True).start()

    @property
    def pings(self) -> int:
        """How often the launcher has shown that it runs."""
        return self._connection.pings

    def send(self, message: object) -> None:
        """Send a message to the launcher; ignored if that is gone, which ends this process."""
        with suppress(OSError):
            self._connection.send(message)

    def fail(self, failure: Failure) -> None:
        """Tell the launcher why this worker ends early."""
        self.send(failure)

    def subscribe(self, take: Take, lost: Callable[[], None]) -> None:
        """Let `take` be called with the messages to this worker that are not those of every job.

        Args:
            take: called in the thread; here with those that have come before.
            lost: called when the connection has ended.
        """
        with self._lock:
            while self._unread:
                take(self._unread.popleft())
            self._take = take
            self._tell_lost = lost
            if self._is_lost:
                lost()

    def wait_for_release(self, seconds: float) -> None:
        """Wait until the others have failed or ended as well, at most so long."""
        self._released.wait(seconds)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        with suppress(EOFError, OSError, msgspec.DecodeError):
            while True:
                if poller.poll(_TURN_S * 1000):
                    for message in self._connection.receive_available():
                        self._handle(message)
                self._on_turn()
        self._connection.close()
        with self._lock:
            self._is_lost = True
            self._tell_lost()
        self._on_lost()

    def _handle(self, message: Any) -> None:
        match message:
            case Peers(pids):
                self.peers = frozenset(pids)
            case Finished():
                self._released.set()
            case _:
                with self._lock:
                    if self._take is None:
                        self._unread.append(message)
                    else:
                        self._take(message)


_clients: list[JobClient] = []  # at most one, that of this process


def current() -> JobClient | None:
    """Return the connection of this process to its launcher; None without one."""
    return _clients[0] if _clients else None


def ask_for_time() -> None:
    """Ask the launcher, if there is one, for time to save after a stop signal, which this worker
    handles.
    """
    _note(Note("needs time"))


def note_checkpoint(path: str) -> None:
    """Tell the launcher, if there is one, which checkpoint is the newest, so that it can say how to
    resume.
    """
    _note(Note("checkpoint", path))


def _note(note: Note) -> None:
    client = current()
    if client is not None:
        client.send(note)


def _leave_to_parent() -> None:
    """Give up the connection in a process that a worker has forked: its end is to be that of the
    worker.
    """
    while _clients:
        _clients.pop()._connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)
