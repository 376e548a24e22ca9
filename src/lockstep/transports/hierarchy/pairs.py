"""Messages between two ranks of a group that is too large to connect every rank with each other."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import StallError, TransportError
from ..c10d import PrefixStore, Store
from ..shm.core import Core
from ..shm.waiting import CHECK_S
from .connection import Connection

__all__ = ["Pairs"]

_LONGEST_NAP_S = 0.02  # between two looks whether the other rank has come


class _Message(dist.Work):
    """One to be sent or received: c10d's `Work`, from before there is Gloo's.

    Args:
        what: it is, for errors.
        pair: whose message it is.
        peer: the other rank of the pair.
        begin: begins it.
        check: raises when the group has failed.
    """

    def __init__(
        self,
        what: str,
        pair: _Pair,
        peer: int,
        begin: Callable[[dist.ProcessGroup], dist.Work],
        check: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._what, self._pair, self._peer, self._begin, self._check = what, pair, peer, begin, check
        self._work: dist.Work | None = None
        self._begun = threading.Event()

    def begin(self, connection: Connection) -> None:
        """Hand it to Gloo."""
        self._work = self._begin(connection.group)
        self._begun.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it has been sent or received.

        Raises:
            TransportError: it never will.
        """
        deadline = time.monotonic() + (timeout or self._pair.timeout).total_seconds()
        while not self._begun.wait(CHECK_S):
            self._check(self._what)
            if self._pair.error is not None:
                raise TransportError(f"shm: {self._what}: {self._pair.error}") from self._pair.error
            if time.monotonic() > deadline:
                raise StallError(f"shm: {self._what} timed out: it has no message for this rank", (self._peer,))
        assert self._work is not None
        answer: bool = self._work.wait(timeout) if timeout else self._work.wait()
        return answer

    def is_completed(self) -> bool:
        """Whether it has ended; Gloo knows when it has been waited for."""
        return self._work is not None and self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work is not None and self._work.is_success()

    def source_rank(self) -> int:
        """Whom a received message is from."""
        return self._peer

    _source_rank = source_rank


class _Pair:
    """Two ranks, connected by Gloo once both have a message for the other.

    Neither waits for that in its call: a rank may send to one that is to receive from a third one before. The messages
    that come meanwhile are begun in their order when the two are connected.

    Args:
        store: where these two meet.
        own: 0 for the lower of the two ranks, 1 for the other.
        timeout: limit of one operation.
    """

    def __init__(self, store: Store, own: int, timeout: timedelta) -> None:
        self.other, self.timeout = 1 - own, timeout
        self.error: Exception | None = None
        self.connection: Connection | None = None
        self._pending: deque[_Message] = deque()
        self._lock, self._closed = threading.Lock(), threading.Event()
        where = (store, own, timeout)
        threading.Thread(target=self._connect, args=where, name="lockstep-pair", daemon=True).start()

    def add(self, message: _Message) -> None:
        """Begin `message`, or do so when the two are connected."""
        with self._lock:
            if self.connection is None:
                self._pending.append(message)
            else:
                message.begin(self.connection)

    def _connect(self, store: Store, own: int, timeout: timedelta) -> None:
        try:
            mine = store.clone()  # a connection of its own: while one waits, nobody else can use it
            mine.set(f"here/{own}", "")
            nap = 1e-3
            while not mine.check([f"here/{self.other}"]):
                if self._closed.wait(nap):
                    return
                nap = min(_LONGEST_NAP_S, 1.5 * nap)
            made = Connection(mine, own, 2, timeout)
            with self._lock:
                for message in self._pending:
                    message.begin(made)
                self._pending.clear()
                self.connection = made
            if self._closed.is_set():
                made.close()
        except (RuntimeError, TransportError) as error:
            self.error = error

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        if self.connection is not None:
            self.connection.close()


class Pairs:
    """The pairs of this rank that have had a message.

    Args:
        core: the ranks of this machine; ends waits when one of them is lost.
        store: where all ranks meet.
        rank: this one.
        timeout: limit of one operation.
    """

    def __init__(self, core: Core, store: Store, rank: int, timeout: timedelta) -> None:
        self._core = weakref.ref(core)  # which has this object closed at its end: no cycle, that memory may go at once
        self._store, self._rank, self._timeout = store, rank, timeout
        self._made: dict[int, _Pair] = {}
        self._lock = threading.Lock()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to send to `peer`."""
        return self._message("send", "to", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to receive from `peer`."""
        return self._message("recv", "from", tensors, peer, tag)

    def _message(self, name: str, word: str, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        what, pair = f"{name} {word} rank {peer}", self._pair(peer)
        self._check(what)

        def begin(group: dist.ProcessGroup) -> dist.Work:
            work: dist.Work = getattr(group, name)(tensors, pair.other, tag)
            return work

        message = _Message(what, pair, peer, begin, self._check)
        pair.add(message)
        return message

    def _check(self, what: str) -> None:
        core = self._core()
        if core is None:
            raise TransportError(f"shm: {what}: this group has been destroyed")
        core.check(what)

    def _pair(self, peer: int) -> _Pair:
        with self._lock:
            if peer not in self._made:
                low, high = sorted((self._rank, peer))
                store = PrefixStore(f"pair/{low}-{high}", self._store)
                self._made[peer] = _Pair(store, int(self._rank == high), self._timeout)
            return self._made[peer]

    def close(self) -> None:
        """Hang up."""
        for pair in self._made.values():
            pair.close()
