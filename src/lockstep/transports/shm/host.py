"""Which ranks run on the same machine, and can share memory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...store_exchange import exchange, ranks_of, runs_of
from ..c10d import Store

__all__ = ["Machine", "host_key", "machines"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks of one machine share.

    Attributes:
        ranks: their numbers in the group, in order.
        size: the most bytes of shared memory that they may take together; None when no rank says.
    """

    ranks: tuple[int, ...]
    size: int | None


def host_key() -> str:
    """A text that is equal for two processes if they can open each other's memory.

    Made of the kernel's boot, the namespaces of process numbers and of the network, and the user: containers on one
    machine that do not see each other's processes count as machines of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]  # noqa: PTH115 - not a path
    except OSError:  # no Linux
        return socket.gethostname()
    return " ".join([boot, *spaces, str(os.getuid())])


def machines(store: Store, rank: int, ranks: int, size: int | None) -> list[Machine]:
    """The machines of all `ranks`, in order of their lowest rank; every rank must call it.

    Args:
        store: where they meet.
        rank: this rank.
        ranks: their number.
        size: the most bytes of shared memory that this rank wishes; None for no wish. The memory of a machine has
            one layout, so the least of its ranks' wishes is taken.
    """
    found = exchange(store, "host", rank, json.dumps([host_key(), size]), range(ranks), _by_key)
    return [Machine(tuple(ranks_of(runs)), least) for runs, least in json.loads(found)]


def _by_key(said: Mapping[int, str]) -> str:
    """The ranks of each machine, and the least of their wishes."""
    members: dict[str, list[int]] = {}
    sizes: dict[int, int | None] = {}
    for rank, text in said.items():
        key, sizes[rank] = json.loads(text)
        members.setdefault(key, []).append(rank)
    return json.dumps([[runs_of(ranks), _least(sizes[rank] for rank in ranks)] for ranks in members.values()])


def _least(sizes: Iterable[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)
