"""Ends waits inside Gloo, which has no call for that: its `abort` does nothing, and a signal does
not interrupt it.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,misc,assignment"

from __future__ import annotations

import atexit
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from .system.heartbeat import keep_alive, retransmit_often

__all__ = ["SocketTracker", "abort_gloo", "interruptible_gloo", "keep_until_ended"]


_LIMIT = timedelta(milliseconds=1)
_END_S = 0.02  # in which aborted operations have ended, if they ever do
_LOOK_S = 0.5  # between two looks whether operations have ended that did not do so at once
_TAG = 1 << 30  # of no message that a program would send

# Held while a thread is in torch's code, and for good when the program ends: Python ends a thread
# that comes back from C++ by then, which ends the whole process (SIGABRT).
_in_torch = threading.Lock()
_ENDING_S = 5.0  # that such a thread may need; a process that was forked meanwhile waits in vain
atexit.register(_in_torch.acquire, timeout=_ENDING_S)


def abort_gloo(group: Any) -> None:
    """End all operations of a group's Gloo backend with an error, and those of other ranks that
    need this rank.

    The group is of no use afterwards. Its destructor waits for the operations, see
    `keep_until_ended`.

    Gloo closes all connections of a group when a receive has taken longer than its limit, so that
    one is begun here for a message that nobody sends (gloo/transport/tcp/unbound_buffer.cc,
    ``waitRecv``).

    Args:
        group: a process group of c10d; nothing is done to its other backends.
    """
    for backend in _gloo_backends(group):
        # each has connections of its own
        for tag in range(_TAG, _TAG + len(backend.options._devices)):
            for peer in range(backend.size()):
                if peer != backend.rank() and _times_out(backend, peer, tag):
                    break


def keep_until_ended(groups: Iterable[Any], works: Iterable[Any]) -> None:
    """Keep groups that have been aborted until their works have ended, so that no thread waits in
    their destructors.

    Gloo does not end a send of which the kernel has taken a part when the connection is lost
    (``signalException`` in gloo/transport/tcp/pair.cc): that ends when its time limit is over.

    Args:
        groups: process groups of c10d.
        works: of these groups, which may not have ended.
    """
    deadline = time.monotonic() + _END_S
    unfinished = list(works)
    while unfinished and time.monotonic() < deadline:
        time.sleep(_END_S / 20)
        unfinished = [work for work in unfinished if not _has_ended(work)]
    if unfinished:
        kept = [backend for group in groups for backend in _gloo_backends(group)]
        threading.Thread(
            target=_wait_for, args=(unfinished, kept), name="lockstep group's end", daemon=True
        ).start()


def _wait_for(works: list[Any], kept: list[Any]) -> None:
    """Let works and backends go when all works have ended; looks now and then, and does not wait in
    torch's code, see `_in_torch`.
    """
    while works:
        time.sleep(_LOOK_S)
        with _in_torch:
            if all(_has_ended(work) for work in works):
                works.clear()
                kept.clear()


def _has_ended(work: Any) -> bool:
    """Return whether a work of an aborted group has ended; a message's knows that only once it has
    been waited for.
    """
    if isinstance(work, c10d.Work) and not work.is_completed():
        with suppress(RuntimeError):
            work.wait(_LIMIT)
    completed: bool = work.is_completed()
    return completed


def _gloo_backends(group: Any) -> list[Any]:
    backends = []
    with suppress(RuntimeError):  # it has been destroyed
        for device in group._device_types:
            backend = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
            # also where torch was built without it
            if type(backend).__name__ == "ProcessGroupGloo":
                backends.append(backend)
    return backends


def _times_out(backend: Any, peer: int, tag: int) -> bool:
    """Receive from `peer` until the limit; False if that connection was closed before, and the
    others may not be.
    """
    try:
        work = backend.recv([torch.empty(1)], peer, tag)
    except RuntimeError:
        return False
    with suppress(RuntimeError):
        work.wait(_LIMIT)
    return True


class SocketTracker:
    """The sockets that were opened while process groups were made."""

    def __init__(self) -> None:
        # descriptor: inode, as the descriptor may have been reused since
        self._found: dict[int, int] = {}

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track new sockets during the body."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._found |= {
                fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode
            }

    def keep_alive(self, limit_s: float) -> None:
        """Let the kernel close them when the other side has not responded for `limit_s` seconds."""
        for descriptor in self._found:
            # Of a duplicate, which shares the options: a socket object closes its descriptor.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    keep_alive(copy, limit_s)

    def retransmit_often(self) -> None:
        """Let them not wait for long after a network that was cut is whole again."""
        for descriptor in self._found:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                if (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and copy.type == socket.SOCK_STREAM
                ):
                    retransmit_often(copy)

    def shutdown(self) -> None:
        """Shut all of them down."""
        now = _open_sockets()
        for descriptor, inode in self._found.items():
            if now.get(descriptor) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                    # without its listener Gloo aborts
                    if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        copy.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[int, int]:
    sockets = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - the names are all that is needed
    except OSError:  # not Linux
        return {}
    for number in numbers:
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                sockets[number] = status.st_ino
    return sockets


_CHECK_S = 0.005


@contextmanager
def interruptible_gloo(check: Callable[[], None]) -> Iterator[None]:
    """Let Gloo connect the ranks in a thread during the body, which goes on without it when `check`
    raises.

    Gloo's constructor waits for all of them in C++, and nothing but its time limit ends that.

    Args:
        check: called again and again; raises when the group is not wanted any more.
    """
    original: Any = c10d.ProcessGroupGloo

    def connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        groups: list[Any] = []

        def construct() -> None:
            try:
                groups.append(original(store, rank, size, timeout=timeout))
            except BaseException as error:
                groups.append(error)

        thread = threading.Thread(target=construct, name="lockstep gloo", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_CHECK_S)
            check()
        if isinstance(groups[0], BaseException):
            raise groups[0]
        return groups.pop()

    class Kind(type):
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> Any:
            return connect(store, rank, size, timeout)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

    c10d.ProcessGroupGloo = Kind("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original
