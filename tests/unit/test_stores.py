"""Who can reach a store: what a job serves listens no wider than the job needs."""

from __future__ import annotations

import errno
import socket
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from lockstep import stores
from lockstep.launcher.host_rendezvous import listen_for_hosts
from lockstep.launcher.links import FixedHosts, OneHost
from lockstep.stores import LOOPBACK, serve_store
from support.openings import listens_at

SHORT = timedelta(seconds=20)
NOWHERE = "203.0.113.77"  # reserved for examples: no interface has it
EVERYWHERE = {"0.0.0.0", "::"}


def own_address() -> str:
    """An address of this host that is no loopback address."""
    for each in psutil.net_if_addrs().values():
        for found in each:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return found.address
    pytest.skip("there is only a loopback interface")


def is_served(store: TCPStore) -> bool:
    store.set("key", "value")
    return TCPStore(store.host, store.port, timeout=SHORT).get("key") == b"value"


def stands_for(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, port: int, **settings: int) -> list[object]:
        return [
            found
            for each in (addresses if host == name else [host])
            for found in real(each, port, **settings)
        ]

    monkeypatch.setattr(stores.socket, "getaddrinfo", look_up)


def test_a_store_listens_on_the_loopback_interface_alone() -> None:
    store = serve_store(timeout=SHORT)
    assert listens_at(store.port) == {LOOPBACK}
    assert is_served(store)


def test_a_store_for_several_hosts_listens_at_the_address_that_they_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = own_address()
    store = serve_store(address, several_hosts=True)
    assert listens_at(store.port) == {address}
    assert is_served(store)
    # Debian's /etc/hosts has the host's own name at a loopback address, and other hosts know it by
    # another
    stands_for(monkeypatch, "node1", "127.0.1.1", address)
    assert listens_at(serve_store("node1", several_hosts=True).port) == {address}


@pytest.mark.parametrize(
    "addresses", [("127.0.1.1",), (NOWHERE,), ()], ids=["loopback", "elsewhere", "unknown"]
)
def test_where_nobody_knows_how_others_reach_this_host_the_store_listens_everywhere(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    stands_for(monkeypatch, "node1", *addresses)
    store = serve_store("node1", several_hosts=True)
    assert listens_at(store.port) <= EVERYWHERE
    assert is_served(store)
    alone = serve_store("node1")
    assert listens_at(alone.port) == {addresses[0] if addresses == ("127.0.1.1",) else LOOPBACK}
    assert is_served(alone)


def test_a_loopback_address_means_this_host_for_all() -> None:
    """Two launchers on one host that rendezvous at 127.0.0.1."""
    assert listens_at(serve_store(LOOPBACK, several_hosts=True).port) == {LOOPBACK}


def test_a_port_that_is_taken_is_an_error_and_nothing_is_left_open() -> None:
    first = serve_store()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError) as caught:
        serve_store(port=first.port)
    assert caught.value.errno == errno.EADDRINUSE
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_launchers_and_their_stores_listen_where_the_job_is() -> None:
    with closing(OneHost()) as alone:
        for _ in range(2):  # started afresh: a store of its own
            alone.join(1)
            assert alone.place is not None and listens_at(alone.place.port) == {LOOPBACK}
    address = own_address()
    for where in (LOOPBACK, address):
        with closing(listen_for_hosts(where, 0)) as listener:
            assert listens_at(listener.getsockname()[1]) == {where}
    with closing(FixedHosts(address, 0, 0, 2)) as spanning:
        assert listens_at(spanning._serve()) == {address}


def test_no_other_code_opens_a_store() -> None:
    """TCPStore as a server listens on all interfaces, unless it is given a socket."""
    package = Path(stores.__file__).parent
    users = [
        path
        for path in package.rglob("*.py")
        if "TCPStore(" in path.read_text() and path.name != "stores.py"
    ]
    serving = {
        (path.relative_to(package).as_posix(), line.strip())
        for path in users
        for line in path.read_text().splitlines()
        if "TCPStore(" in line
        and ("True" in line or "is_first" in line)
        and "is_master=False" not in line
    }
    assert {path for path, _ in serving} <= {"bootstrap.py"}
    assert (
        len(serving) <= 1
    )  # as torch does for env://, where the port is taken by a store of this process's own
