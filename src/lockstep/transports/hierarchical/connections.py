"""Gloo between hosts: groups whose connections can be closed, and messages between pairs connected
on demand.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import StallError, TransportError
from ...gloo import SocketTracker, abort_gloo
from ..runtime import virtual_host
from ..runtime.backoff import CHECK_S, Steps
from ..runtime.c10d import PrefixStore, Store, backend_as_group
from ..shm.context import ShmContext

# Gloo's destructor waits for the other side, which may be gone: a thread is left to it after this.
_CLOSE_TIMEOUT_S = 0.2
_CLOSED = "shm: this group has been destroyed, or cannot be used since an earlier error"


class GlooConnection:
    """Ranks connected by Gloo; closing it ends the waits of other ranks in it.

    Gloo closes its sockets when the last reference to the group is gone, and in no other way. So
    this object alone refers to it, and to its pending operations.

    Args:
        store: of the rendezvous.
        rank: this rank.
        size: their number.
        timeout: limit of one operation.
        lazy: connect two ranks only when a collective needs it. Both must be in that collective
            then: sending a message to a rank that is not there yet would block.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, lazy: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.is_lazy = lazy
        self._references: list[Any] = []
        self._beside: Any = None  # a work beside that of the operation in progress
        self._on_completion: Callable[[], object] | None = None  # called when it has completed
        sockets = SocketTracker()
        with sockets.tracking():
            gloo = dist.ProcessGroupGloo(
                store, rank, size, _lazy_options(timeout) if lazy else timeout
            )
        sockets.retransmit_often()
        self._group: dist.ProcessGroup | None = virtual_host.current().group_between_hosts(
            backend_as_group(gloo, store, "cpu"), store, timeout
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; the caller must not keep a reference.

        Raises:
            TransportError: the connection has been closed.
        """
        if self._group is None:
            raise TransportError(_CLOSED)
        return self._group

    def start_beside(self, work: dist.Work, on_completion: Callable[[], object]) -> None:
        """Let `work`, of this group, go on beside the next one, until `wait_beside`.

        Args:
            work: of an operation.
            on_completion: called as soon as it has completed, also during a wait for the other one,
                which ends if it raises.
        """
        self._beside = work
        self._on_completion = on_completion

    def wait_beside(self) -> Steps:
        """Wait until that work has completed.

        Raises:
            TransportError: it has failed; other ranks may be gone.
        """
        while self._beside is not None and not self._beside.is_completed():
            yield _remote_ranks
        if self._group is None:  # another thread has closed the connection
            raise TransportError(_CLOSED)
        self._end_beside()

    def _end_beside(self) -> None:
        if self._beside is None or self._on_completion is None:
            return
        self._references.append(self._beside)
        on_completion = self._on_completion
        self._beside = None
        self._on_completion = None
        self._wait_for_last()
        on_completion()

    def wait_steps(self, work: dist.Work) -> Steps:
        """Wait until `work`, of this group, has completed.

        Raises:
            TransportError: it has failed; other ranks may be gone.
        """
        self._references.append(work)
        del work
        while self._references and not self._references[-1].is_completed():
            if self._beside is not None and self._beside.is_completed():
                self._end_beside()
            yield _remote_ranks
        if not self._references:  # another thread has closed the connection
            raise TransportError(_CLOSED)
        self._wait_for_last()

    def _wait_for_last(self) -> None:
        """Wait for the last reference, a work, and forget it."""
        try:
            self._references.pop().wait()
        except RuntimeError as error:
            raise TransportError(f"shm: between hosts (Gloo): {error}") from error

    def close(self) -> None:
        """Close the connections. Operations that are pending on other ranks end with an error
        there.

        One that is pending here is ended as well, if Gloo can; a thread waits for it.
        """
        if self._beside is not None:
            self._references.append(self._beside)
            self._beside = None
            self._on_completion = None
        if self._references and not self.is_lazy:  # which would connect ranks, and wait for them
            abort_gloo(self._group)
        self._references.append(self._group)
        self._group = None
        references = self._references
        self._references = []
        thread = threading.Thread(target=references.clear, name="lockstep-gloo", daemon=True)
        thread.start()
        thread.join(_CLOSE_TIMEOUT_S)


def _remote_ranks() -> Iterable[int]:
    """Return the ranks on other hosts; Gloo itself notices when they are gone."""
    return ()


def _lazy_options(timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 2
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    return options


_MAX_SLEEP_S = 0.02  # between two polls for the other rank


class _Message(dist.Work):
    """A message to be sent or received: c10d's `Work`, made before the pair is connected.

    Args:
        what: the operation's name, for errors.
        pair: the two ranks.
        peer: the other rank of the pair.
        begin: starts it over Gloo.
        check: raises when the group has failed.
    """

    def __init__(
        self,
        operation: str,
        pair: _Pair,
        peer: int,
        begin: Callable[[dist.ProcessGroup], dist.Work],
        check: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._what = operation
        self._pair = pair
        self._peer = peer
        self._begin = begin
        self._check = check
        self._work: dist.Work | None = None
        self._started = threading.Event()

    def begin(self, connection: GlooConnection) -> None:
        """Start it over Gloo."""
        self._work = self._begin(connection.group)
        self._started.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it has been sent or received.

        Raises:
            TransportError: it cannot be.
        """
        deadline = time.monotonic() + (timeout or self._pair.timeout).total_seconds()
        while not self._started.wait(CHECK_S):
            self._check(self._what)
            if self._pair.error is not None:
                raise TransportError(f"shm: {self._what}: {self._pair.error}") from self._pair.error
            if time.monotonic() > deadline:
                raise StallError(
                    f"shm: {self._what} timed out: it has no message for this rank", (self._peer,)
                )
        assert self._work is not None
        answer: bool = self._work.wait(timeout) if timeout else self._work.wait()
        return answer

    def is_completed(self) -> bool:
        """Return whether the operation has completed; Gloo knows that once it has been waited
        for.
        """
        return self._work is not None and self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self._work is not None and self._work.is_success()

    def source_rank(self) -> int:
        """Return the rank that a received message is from."""
        return self._peer

    _source_rank = source_rank


class _Pair:
    """Two ranks, connected by Gloo once both have a message for the other.

    Connecting happens in the background: a rank may send to one that first has to receive from a
    third. Messages that are added meanwhile are started in their order when the two are connected.

    Args:
        store: of the pair's rendezvous.
        own: 0 for the lower of the two ranks, 1 for the other.
        timeout: limit of one operation.
    """

    def __init__(self, store: Store, own_index: int, timeout: timedelta) -> None:
        self.other = 1 - own_index
        self.timeout = timeout
        self.error: Exception | None = None
        self.connection: GlooConnection | None = None
        self._pending: deque[_Message] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        arguments = (store, own_index, timeout)
        threading.Thread(
            target=self._connect, args=arguments, name="lockstep-pair", daemon=True
        ).start()

    def add(self, message: _Message) -> None:
        """Start `message`, now or when the two are connected."""
        with self._lock:
            if self.connection is None:
                self._pending.append(message)
            else:
                message.begin(self.connection)

    def _connect(self, store: Store, own_index: int, timeout: timedelta) -> None:
        try:
            # a connection of its own: while one thread waits, no other can use it
            own_store = store.clone()
            own_store.set(f"here/{own_index}", "")
            sleep_s = 1e-3
            while not own_store.check([f"here/{self.other}"]):
                if self._closed.wait(sleep_s):
                    return
                sleep_s = min(_MAX_SLEEP_S, 1.5 * sleep_s)
            connection = GlooConnection(own_store, own_index, 2, timeout)
            with self._lock:
                for message in self._pending:
                    message.begin(connection)
                self._pending.clear()
                self.connection = connection
            if self._closed.is_set():
                connection.close()
        except (RuntimeError, TransportError) as error:
            self.error = error

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        if self.connection is not None:
            self.connection.close()


class LazyPairs:
    """The pairs of this rank, connected by their first message.

    Args:
        context: of the ranks of this host; ends waits when one of them is lost.
        store: of the group's rendezvous.
        rank: this one.
        timeout: limit of one operation.
    """

    def __init__(self, context: ShmContext, store: Store, rank: int, timeout: timedelta) -> None:
        # which closes this object: no cycle, so that memory is freed at once
        self._context = weakref.ref(context)
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._pairs: dict[int, _Pair] = {}
        self._lock = threading.Lock()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start to send to `peer`."""
        return self._message("send", "to", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start to receive from `peer`."""
        return self._message("recv", "from", tensors, peer, tag)

    def _message(
        self, name: str, preposition: str, tensors: list[torch.Tensor], peer: int, tag: int
    ) -> dist.Work:
        operation = f"{name} {preposition} rank {peer}"
        pair = self._pair(peer)
        self._check(operation)

        def begin(group: dist.ProcessGroup) -> dist.Work:
            work: dist.Work = getattr(group, name)(tensors, pair.other, tag)
            return work

        message = _Message(operation, pair, peer, begin, self._check)
        pair.add(message)
        return message

    def _check(self, operation: str) -> None:
        context = self._context()
        if context is None:
            raise TransportError(f"shm: {operation}: this group has been destroyed")
        context.check(operation)

    def _pair(self, peer: int) -> _Pair:
        with self._lock:
            if peer not in self._pairs:
                low, high = sorted((self._rank, peer))
                store = PrefixStore(f"pair/{low}-{high}", self._store)
                self._pairs[peer] = _Pair(store, int(self._rank == high), self._timeout)
            return self._pairs[peer]

    def close(self) -> None:
        """Close the connections."""
        for pair in self._pairs.values():
            pair.close()
