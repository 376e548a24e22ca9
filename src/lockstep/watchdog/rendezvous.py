"""The rendezvous of the watchdog: ranks find each other's flight recorders when their first group
is made.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore

from .. import environment, messages
from ..errors import LockstepError, TransportError
from ..flight_recorder import FlightRecorder, RecorderReader, jobs, layout
from ..stores import Ranges, exchange_available, from_ranges, read_message, to_ranges
from ..system.heartbeat import Heartbeat, HeartbeatClient, HeartbeatServer, address_towards
from ..system.job_folders import JobFolderLock
from .call_sites import current_folder

Hosts = tuple[tuple[int, ...], ...]

# the other ranks make the same group now; one without a watchdog does not answer
_TIMEOUT = timedelta(seconds=60)


class NoSpaceError(LockstepError):
    """Some ranks have no space for a flight recorder, so that no rank is watched.

    Args:
        ranks: those ranks.
        folder: of the job.

    Attributes:
        ranks: those ranks.
    """

    def __init__(self, ranks: list[int], folder: Path) -> None:
        super().__init__(
            f"no space in {folder.parent.parent} for the flight recorders of ranks {ranks}"
        )
        self.ranks = ranks


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows of the others after the rendezvous.

    Attributes:
        folder: with the flight recorders of this host's ranks.
        owns_folder: whether the ranks have made the folder, and remove it; otherwise the launcher
            does.
        recorder: this rank's flight recorder.
        peers: readers of the flight recorders of the other ranks of this host, by rank.
        store: through which hosts exchange their states.
        hosts: the ranks of each host.
        heartbeat: of the ranks on other hosts; None if there are none.
        lock: keeps the folder from being removed as that of a dead job.
    """

    folder: Path
    owns_folder: bool
    lock: JobFolderLock
    recorder: FlightRecorder
    peers: dict[int, RecorderReader]
    store: Any
    hosts: tuple[tuple[int, ...], ...]
    heartbeat: Heartbeat | None = None


class HostInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A host: as each of its ranks publishes it for itself, and joined for all of them.

    Attributes:
        ranks: the rank; joined, all of the host.
        token: a random text of the first of them, for the name of a folder.
        base: in which the first of them makes that folder; "" for one with a random name.
        addresses: of the ranks.
        key: the same for two ranks if they can open each other's files; left out when it has been
            used to join them.
    """

    ranks: Ranges
    token: str
    base: str = ""
    addresses: list[str] = []
    key: str = ""


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which ranks have a flight recorder: published by each rank for itself, and joined for all.

    Attributes:
        recording: ranks that have one.
        without: ranks that have no space for one.
        hub_token: of the hub of heartbeats, which the first rank has in a job of several hosts.
        hub: the address of the hub for each address of another host.
    """

    recording: Ranges = []
    without: Ranges = []
    hub_token: str = ""
    hub: dict[str, str] = {}


def rendezvous(
    store: Any, rank: int, world_size: int, host_key: str, limit_s: float = 30.0
) -> Rendezvous:
    """Create this rank's flight recorder and find those of the others; every rank must call it.

    Args:
        store: of the job.
        rank: this rank.
        world_size: number of ranks.
        host_key: a text that is the same for two ranks if they can open each other's files.
        limit_s: seconds in which the hosts of other ranks must respond to heartbeats.

    Raises:
        NoSpaceError: some rank has no space for its flight recorder.
        OSError, LockstepError, RuntimeError: the rendezvous failed.
    """
    number = store.add(f"lockstep-watch/turn/{rank}", 1)
    turn = f"lockstep-watch/{number}"
    records = environment.records_dir()
    base = jobs.default_base() if records is None else ""
    address = _own_address(store)
    # two launchers on one host have a folder each, and read nothing in that of the other
    if records is not None:
        host_key = f"{host_key} {records}"
    mine = messages.encode(
        HostInfo([(rank, rank + 1)], secrets.token_hex(6), base, [address], host_key)
    )
    joined = exchange_available(
        store, f"{turn}/hosts", rank, mine, world_size, _join_hosts, _TIMEOUT
    )
    host_infos = read_message(joined, list[HostInfo], "the ranks of each host")
    hosts = tuple(tuple(from_ranges(info.ranks, world_size)) for info in host_infos)
    here = next((number for number, ranks in enumerate(hosts) if rank in ranks), None)
    if here is None:
        raise TransportError(
            f"the ranks of each host: expected rank {rank} among them, got {hosts}"
        )
    local = hosts[here]
    folder, owns_folder = _make_folder(host_infos[here].token, host_infos[here].base, local, rank)
    lock = JobFolderLock(folder.parent)
    recorder = _make_recorder(folder, rank, world_size)
    alone = [(rank, rank + 1)]
    readiness = Readiness(without=alone) if recorder is None else Readiness(alone)
    hub = HeartbeatServer(limit_s) if len(hosts) > 1 and rank == hosts[0][0] else None
    if hub is not None:
        readiness = msgspec.structs.replace(
            readiness, hub_token=hub.token, hub=_open_hub(hub, host_infos[1:])
        )
    text = messages.encode(readiness)
    joined = exchange_available(
        store, f"{turn}/ready", rank, text, world_size, _join_readiness, _TIMEOUT
    )
    ready = read_message(joined, Readiness, "the flight recorders of all ranks")
    recording, without = (
        from_ranges(ranges, world_size) for ranges in (ready.recording, ready.without)
    )
    if recorder is None or without:  # all ranks are watched or none
        if hub is not None:
            hub.close()
        if recorder is not None:
            recorder.close()
        lock.close()
        _remove_recorder(folder, rank, owns_folder)
        raise NoSpaceError(without, folder)
    peers = {}
    for peer in local:
        if peer != rank and peer in recording:
            with suppress(OSError, ValueError):  # of another version, or removed already
                peers[peer] = RecorderReader(layout.rank_file(folder, peer))
    heartbeat: HeartbeatServer | HeartbeatClient | None = hub
    if rank not in hosts[0] and address in ready.hub:  # else there is no route
        heartbeat = HeartbeatClient(ready.hub[address], ready.hub_token, rank, limit_s, hosts[0][0])
    return Rendezvous(
        folder, owns_folder, lock, recorder, peers, PrefixStore(turn, store), hosts, heartbeat
    )


def _make_recorder(folder: Path, rank: int, world_size: int) -> FlightRecorder | None:
    try:
        return FlightRecorder(folder, rank, world_size, socket.gethostname(), jobs.command_line())
    except OSError:
        return None


def _join_hosts(published: Mapping[int, str]) -> str:
    """Return the `HostInfo` of each host, from those of the ranks."""
    members: dict[str, dict[int, HostInfo]] = {}
    for rank, text in published.items():
        info = read_message(text, HostInfo, f"the host of rank {rank}")
        members.setdefault(info.key, {})[rank] = info
    hosts = []
    for infos in members.values():
        first = next(iter(infos.values()))
        addresses = sorted({address for info in infos.values() for address in info.addresses})
        hosts.append(HostInfo(to_ranges(infos), first.token, first.base, addresses))
    return messages.encode(hosts)


def _join_readiness(published: Mapping[int, str]) -> str:
    """Return the `Readiness` of all ranks, from those of each."""
    by_rank = {
        rank: read_message(text, Readiness, f"the flight recorder of rank {rank}")
        for rank, text in published.items()
    }
    recording = to_ranges(rank for rank, readiness in by_rank.items() if readiness.recording)
    without = to_ranges(rank for rank, readiness in by_rank.items() if not readiness.recording)
    hub = next((readiness for readiness in by_rank.values() if readiness.hub_token), Readiness())
    return messages.encode(Readiness(recording, without, hub.hub_token, hub.hub))


def _own_address(store: Any) -> str:
    """Return this host's address in the network of the store; "" if it cannot be determined."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "")
    address = ""
    # the second: the default route
    for name in (host,) if host else (socket.gethostname(), "192.0.2.1", "localhost"):
        with suppress(OSError):
            address = address_towards(name)
            if not address.startswith("127."):  # as many hosts resolve their own name
                break
    return address


def _open_hub(hub: HeartbeatServer, others: Sequence[HostInfo]) -> dict[str, str]:
    """Open the hub of heartbeats towards the other hosts; return its address for each of their
    addresses.
    """
    addresses = {}
    for address in {address for host in others for address in host.addresses}:
        with suppress(OSError):  # there is no route
            if address:
                addresses[address] = hub.listen_for(address)
    return addresses


def _make_folder(token: str, base: str, local: Sequence[int], rank: int) -> tuple[Path, bool]:
    chosen = environment.records_dir()
    if chosen is not None:
        if rank == local[0]:
            (chosen / "report.json").unlink(missing_ok=True)  # of groups that were destroyed since
        return chosen, False
    if not re.fullmatch(r"[0-9a-f]{12}", token):  # it becomes part of a path
        raise LockstepError(
            f"rank {local[0]} published the token {token!r}: expected twelve hexadecimal digits"
        )
    folder = jobs.resolve_base(base, token) / f"{token}-{local[0]}" / "attempt-0"
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if rank == local[0]:
        jobs.remove_dead()
        job = (
            jobs.command_line(),
            os.getpid(),
            len(local),
            rank,
            time.time(),
            socket.gethostname(),
            current_folder(),
        )
        jobs.write_description(folder, jobs.JobDescription(*job))
    return folder, True


def _remove_recorder(folder: Path, rank: int, owns_folder: bool) -> None:
    with suppress(OSError):
        layout.rank_file(folder, rank).unlink(missing_ok=True)
    if owns_folder:
        jobs.remove(folder.parent)
