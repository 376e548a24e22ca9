"""Which ranks run on the same host, and can share memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ... import messages
from ...stores import Ranges, exchange, from_ranges, read_message, to_ranges
from . import virtual_host
from .c10d import Store


@dataclass(frozen=True, slots=True)
class Host:
    """The ranks of one host, which share memory.

    Attributes:
        ranks: their numbers in the group, in order.
        size: the most bytes of shared memory that they may take together; None when no rank sets a
            limit.
    """

    ranks: tuple[int, ...]
    size: int | None


class _RankHost(msgspec.Struct, frozen=True):
    """What a rank publishes: the key of its host, and the most bytes of shared memory that it
    allows there.
    """

    key: str
    size: int | None


# each rank receives that of every host
class _HostRanks(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of one host, and the least of their limits."""

    ranks: Ranges
    size: int | None


def host_key() -> str:
    """Return a string that is equal for two processes if they can open each other's memory.

    Made of the kernel's boot ID, the PID and network namespaces, and the user: containers on one
    host that do not see each other's processes count as hosts of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]  # noqa: PTH115 - not a path
    except OSError:  # no Linux
        return virtual_host.current().key(socket.gethostname())
    return virtual_host.current().key(" ".join([boot, *spaces, str(os.getuid())]))


def find_hosts(store: Store, rank: int, ranks: int, size: int | None) -> list[Host]:
    """Return the hosts of all `ranks`, in order of their lowest rank; every rank must call it.

    Args:
        store: of the group's rendezvous.
        rank: this rank.
        ranks: their number.
        size: the most bytes of shared memory that this rank allows; None for no limit. The memory
            of a host has one layout, so the least of its ranks' limits is taken.

    Raises:
        StallError: some ranks do not call it in time.
        TransportError: what is in the store is damaged.
    """
    mine = messages.encode(_RankHost(host_key(), size))
    combined = exchange(store, "host", rank, mine, range(ranks), _group_by_host)
    hosts = read_message(combined, list[_HostRanks], "the ranks of each host")
    return [Host(tuple(from_ranges(host.ranks, ranks)), host.size) for host in hosts]


def _group_by_host(texts: Mapping[int, str]) -> str:
    """Return the ranks of each host, and the least of their limits."""
    members: dict[str, list[int]] = {}
    sizes: dict[int, int | None] = {}
    for rank, text in texts.items():
        rank_host = read_message(text, _RankHost, f"the host of rank {rank}")
        sizes[rank] = rank_host.size
        members.setdefault(rank_host.key, []).append(rank)
    hosts = []
    for ranks in members.values():
        limits = [size for rank in ranks if (size := sizes[rank]) is not None]
        hosts.append(_HostRanks(to_ranges(ranks), min(limits, default=None)))
    return messages.encode(hosts)
