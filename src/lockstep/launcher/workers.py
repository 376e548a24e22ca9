"""The workers of this host: their processes, the connections to them, and what they have told."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from .. import environment
from ..job.connection import AT_ONCE, Connection, watch_unsent
from ..job.messages import Failure, Finished, FromAnyWorker, Hello, Note, Peers
from ..system.strangers import Strangers
from .worker_process.fork_server import note_how_to_know, starting_processes

Entry = Callable[[int], object]
"""What a worker runs, with its number."""


def worker_socket(folder: Path) -> str:
    """Return the path of the socket at which the launcher of the job with this private folder
    listens.
    """
    return str(folder / "workers")


@dataclass
class WorkerProcess:
    """A worker of this host, as its launcher knows it.

    Attributes:
        process: None for one that was not started here.
        connection: None before it has connected, and after its end.
        pid: of its process.
        failure: why it has ended early, as it says itself.
        is_finished: whether it has said that its work is done.
        needs_time: whether it has asked for time to save.
        has_ended: whether its process has ended, or its connection.
        code: its exit code, negative for a signal, once its process has ended.
        is_ended_here: whether it was told to end from here, so that its exit code means nothing.
    """

    process: BaseProcess | None
    connection: Connection[Any, Any] | None = None
    pid: int = 0
    failure: Failure | None = None
    is_finished: bool = False
    needs_time: bool = False
    has_ended: bool = False
    code: int | None = None
    is_ended_here: bool = False

    @property
    def lives(self) -> bool:
        """Whether its process has not ended; of one that was not started here its connection
        tells.
        """
        return self.code is None if self.process is not None else self.connection is not None

    @property
    def is_dead(self) -> bool:
        """Whether it has ended without having finished."""
        return self.has_ended and not self.is_finished

    @property
    def has_reported(self) -> bool:
        """Whether nothing more is to be expected from it: it has finished, failed or ended."""
        return self.has_ended or self.is_finished or self.failure is not None


class Workers:
    """The workers that were started on this host, by number.

    The kernel closes a process's descriptors in ascending order, and the connection to the launcher
    is older than all sockets between workers. So when a worker reports a failure that follows from
    another one's death, the end of that one's connection has come already.

    Args:
        folder: a private directory for the socket.
        selector: of the launcher's loop; the data of each key is a function to call when it is
            ready.
        on_message: called with the number of a worker and each message that not all jobs have.
        incoming: the type of all messages of workers.

    Attributes:
        path: of the socket.
        ended: the numbers of workers whose processes have ended, until somebody takes them out.
        checkpoint: the newest one that a worker has saved; None without one.
    """

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        on_message: Callable[[int, Any], None] = lambda number, message: None,
        incoming: object = FromAnyWorker,
    ) -> None:
        self.path = worker_socket(folder)
        self.ended: list[int] = []
        self.checkpoint: str | None = None
        self._on_message = on_message
        self._incoming = incoming
        self._workers: dict[int, WorkerProcess] = {}
        self._selector = selector
        self._strangers: Strangers[Connection[Any, Any]] = Strangers(self._close)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __getitem__(self, number: int) -> WorkerProcess:
        return self._workers[number]

    @property
    def all(self) -> Mapping[int, WorkerProcess]:
        """All workers since the last `forget`."""
        return self._workers

    @property
    def living(self) -> dict[int, WorkerProcess]:
        """The workers whose processes have not ended."""
        return {number: worker for number, worker in self._workers.items() if worker.lives}

    @property
    def dead(self) -> list[int]:
        """The workers that have ended without having finished."""
        return [number for number, worker in self._workers.items() if worker.is_dead]

    @property
    def failures(self) -> list[Failure]:
        """What workers have reported about their failures, the earliest first."""
        reported = [
            worker.failure for worker in self._workers.values() if worker.failure is not None
        ]
        return sorted(reported, key=lambda failure: failure.time)

    def start(
        self, number: int, entry: Entry, variables: Mapping[str, str], start_method: str
    ) -> None:
        """Start a worker.

        Args:
            number: of the worker.
            entry: what it runs, with its number; picklable by name.
            variables: of its environment.
            start_method: "forkserver" or "spawn".
        """
        context: Any = multiprocessing.get_context(start_method)
        process = context.Process(target=_run_worker, args=(entry, number, dict(variables)))
        with starting_processes():
            process.start()
        self.add(number, process)

    def add(self, number: int, process: BaseProcess | None) -> None:
        """Add a worker that was started; None for a process that somebody else has started."""
        worker = self._workers[number] = WorkerProcess(process)
        if process is None:
            return
        worker.pid = process.pid or 0
        note_how_to_know(process, lambda: worker.is_finished)
        self._selector.register(
            process.sentinel, selectors.EVENT_READ, lambda: self._note_end(number)
        )

    def remove(self, number: int) -> WorkerProcess:
        """Forget a worker whose process has ended, and return what is known of it."""
        self.ended.remove(number)
        return self._workers.pop(number)

    def forget(self) -> None:
        """Forget all workers, whose processes have ended."""
        self._workers.clear()
        self.ended.clear()

    def signal(self, numbers: Iterable[int], signal_number: int) -> None:
        """Send a signal to those of the workers that live."""
        for number in numbers:
            worker = self._workers[number]
            if worker.lives and worker.pid:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal_number)

    def end(self, numbers: Iterable[int], signal_number: int) -> None:
        """Send a signal to those of the workers that live, and to the processes that they have
        started.

        What their exit codes are does not count from here on.
        """
        for number in numbers:
            worker = self._workers[number]
            if not worker.lives or not worker.pid:
                continue
            worker.is_ended_here = True
            # before it connects, a worker makes a process group of its own
            if worker.connection is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal_number)
            self.signal([number], signal_number)

    def join(self, seconds: float) -> None:
        """Wait until all processes have ended, at most so long for each."""
        for worker in self.living.values():
            if worker.process is not None:
                worker.process.join(seconds)

    def send(self, number: int, message: object) -> None:
        """Send a message to a worker; ignored if it is gone or not connected."""
        worker = self._workers.get(number)
        if worker is not None and worker.connection is not None:
            self._send(worker.connection, message)

    def ping(self) -> None:
        """Show all workers that this launcher runs; another thread may call this."""
        for worker in list(self._workers.values()):
            connection = worker.connection
            if connection is not None:
                with suppress(OSError):  # which the loop finds out
                    connection.ping()

    def tick(self) -> None:
        """Close the connections that have not said whose they are."""
        self._strangers.tick()

    def _send(self, connection: Connection[Any, Any], message: object) -> None:
        with suppress(OSError):  # the worker is gone, which its process tells
            connection.send(message)
            watch_unsent(self._selector, connection)

    def _accept(self) -> None:
        self._strangers.accept(self._listener, self._open)

    def _open(self, end: socket.socket) -> Connection[Any, Any]:
        end.setblocking(False)
        connection: Connection[Any, Any] = Connection(end, self._incoming)
        connection.is_strange = True
        self._selector.register(end, selectors.EVENT_READ, lambda: self._receive(connection))
        return connection

    def _receive(self, connection: Connection[Any, Any]) -> None:
        messages: list[Any] = []
        is_open = True
        try:
            for message in connection.receive_available(AT_ONCE):
                if connection in self._strangers and not isinstance(message, Hello):
                    raise OSError("a stranger")
                self._strangers.identified(connection)
                connection.is_strange = False
                messages.append(message)
            connection.flush()  # after what has come: one that is gone takes nothing more
            watch_unsent(self._selector, connection)
        except (EOFError, OSError, msgspec.DecodeError):
            is_open = False
        if not (all(self._handle(connection, message) for message in messages) and is_open):
            self._strangers.identified(connection)
            self._end_connection(connection)

    def _handle(self, connection: Connection[Any, Any], message: Any) -> bool:
        """Handle a message; returns whether it came from a worker."""
        if isinstance(message, Hello):
            worker = self._workers.get(message.worker)
            if worker is None or worker.connection is not None or worker.has_ended:
                return False
            worker.connection = connection
            worker.pid = worker.pid or _pid_of(connection.socket)
            self._tell_peers()
        number = self._number_of(connection)
        if number is None:
            return False
        self._note(number, message)
        return True

    def _number_of(self, connection: Connection[Any, Any]) -> int | None:
        return next(
            (number for number, worker in self._workers.items() if worker.connection is connection),
            None,
        )

    def _tell_peers(self) -> None:
        """Tell all workers the processes of all, once all that were started have connected."""
        living = self.living
        if all(worker.connection is not None for worker in living.values()):
            peers = Peers(tuple(worker.pid for worker in living.values()))
            for number in living:
                self.send(number, peers)

    def _note(self, number: int, message: Any) -> None:
        worker = self._workers[number]
        match message:
            case Failure():
                self._look_for_ends()
                dead = tuple(peer for peer in self.dead if peer != number)
                worker.failure = structs.replace(message, dead_peers=dead)
                self._release()
            case Finished():
                worker.is_finished = True
                self._release()
            case Note("needs time"):
                worker.needs_time = True
            case Note("checkpoint", path):
                self.checkpoint = path
            case _:
                self._on_message(number, message)

    def _look_for_ends(self) -> None:
        """Note the ends of connections that have come and have not been handled yet."""
        for worker in self._workers.values():
            if worker.connection is not None and worker.connection.is_at_end:
                worker.has_ended = True

    def _release(self) -> None:
        """Let the workers end that have failed, if nothing more is to be expected from any."""
        if all(worker.has_reported for worker in self._workers.values()):
            for number in self.living:
                self.send(number, Finished())

    def _note_end(self, number: int) -> None:
        """The process of a worker has ended."""
        worker = self._workers[number]
        process = worker.process
        assert process is not None
        self._selector.unregister(process.sentinel)
        if worker.connection is None and not worker.has_ended:
            self._meet_waiting()
        if worker.connection is not None:
            self._receive_rest(number, worker.connection)
            self._end_connection(worker.connection)
        process.join()
        worker.code = -signal.SIGKILL if process.exitcode is None else process.exitcode
        worker.has_ended = True
        process.close()
        self.ended.append(number)
        self._release()

    def _meet_waiting(self) -> None:
        """Take what has come on new connections: a worker may have connected, finished and ended in
        one turn.
        """
        while True:
            self._accept()
            waiting = list(self._strangers)
            for connection in waiting:
                self._receive(connection)
            if len(self._strangers) == len(waiting):  # none of them has said anything
                return

    def _receive_rest(self, number: int, connection: Connection[Any, Any]) -> None:
        """Receive what a worker has sent before its end, such as the values that it has
        published.
        """
        with suppress(EOFError, OSError, msgspec.DecodeError):
            for message in connection.receive_available():
                self._note(number, message)

    def _end_connection(self, connection: Connection[Any, Any]) -> None:
        """The connection has ended: that of a worker ends with it, or will in a moment."""
        number = self._number_of(connection)
        if number is not None:
            worker = self._workers[number]
            worker.connection = None
            worker.has_ended = True
            if worker.process is None:
                self.ended.append(number)
            self._release()
        self._close(connection)

    def _close(self, connection: Connection[Any, Any]) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    def close(self) -> None:
        """Close the socket and all connections."""
        for worker in self._workers.values():
            if worker.process is not None and worker.code is None:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(worker.process.sentinel)
            if worker.connection is not None:
                self._close(worker.connection)
        self._strangers.close()
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        with suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108


def _run_worker(entry: Entry, number: int, variables: dict[str, str]) -> None:
    """Run `entry` in a process of its own; the environment is set first, as the fork server's is
    older.
    """
    environment.set_variables(variables)
    entry(number)


def _pid_of(end: socket.socket) -> int:
    """Return the process at the other end of a Unix socket."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little", signed=True)
