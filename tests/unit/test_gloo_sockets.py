"""The sockets of Gloo groups: what is not acknowledged is sent again soon, also after a network was
cut for long.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lockstep.transports.hierarchical.connections import GlooConnection

LIMIT = timedelta(seconds=60)


def connected() -> Iterator[socket.socket]:
    """Copies of this process's connected TCP sockets."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the names are all that is needed
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if (
                        copy.family in (socket.AF_INET, socket.AF_INET6)
                        and copy.type == socket.SOCK_STREAM
                    ):
                        copy.getpeername()
                        yield copy


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_the_connections_of_a_group_between_hosts_send_again_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, made = HashStore(), []
    before = {copy.getsockname() for copy in connected()}
    threads = [
        threading.Thread(
            target=lambda rank=rank: made.append(GlooConnection(store, rank, 2, LIMIT))
        )
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        options = [
            copy.getsockopt(socket.IPPROTO_TCP, 16)
            for copy in connected()
            if copy.getsockname() not in before
        ]
    finally:
        for connection in made:
            connection.close()
    assert len(options) >= 2 and set(options) == {1}
