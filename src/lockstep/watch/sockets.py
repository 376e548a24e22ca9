"""Ends waits inside Gloo: its sockets are shut, at which every call that waits on them returns with an error."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..heartbeat import keep_alive

__all__ = ["Sockets"]


class Sockets:
    """Sockets that were opened while groups were made.

    Gloo has no call to end a wait: `abort` does nothing, a signal does not reach it.
    """

    def __init__(self) -> None:
        self._found: dict[int, int] = {}  # descriptor: inode, as the number may have gone to something else since

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the making of a group."""
        before = _sockets()
        try:
            yield
        finally:
            self._found |= {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}

    def keep_alive(self, limit_s: float) -> None:
        """Let the kernel end them when the other side has not answered for `limit_s` seconds."""
        for descriptor in self._found:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    keep_alive(copy, limit_s)

    def shut(self) -> None:
        """Let all of them end."""
        now = _sockets()
        for descriptor, inode in self._found.items():
            if now.get(descriptor) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                    if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # Gloo ends with its listener
                        copy.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    found = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - the names are all that is needed
    except OSError:  # no Linux
        return {}
    for number in numbers:
        with suppress(OSError):  # the one of the listing
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                found[number] = status.st_ino
    return found
