"""Which ranks run on the same machine, and can share memory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..c10d import Store
from .meeting import tell_all

__all__ = ["Machine", "host_key", "machines"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks of one machine share.

    Attributes:
        ranks: their numbers in the group, in order.
        size: the most bytes of shared memory that they may take together; 0 when none of them says.
    """

    ranks: tuple[int, ...]
    size: int


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


def machines(store: Store, rank: int, ranks: int, size: int) -> list[Machine]:
    """The machines of all `ranks`, in order of their lowest rank; every rank must call it.

    Args:
        store: where they meet.
        rank: this rank.
        ranks: their number.
        size: the most bytes of shared memory that this rank wishes; 0 for no wish. The memory of a machine has one
            layout, so the least of its ranks' wishes is taken.
    """
    answers = tell_all(store, "host", rank, json.dumps([host_key(), size]), range(ranks))
    return _by_key([json.loads(answer) for answer in answers])


def _by_key(answers: Sequence[tuple[str, int]]) -> list[Machine]:
    members: dict[str, list[int]] = {}
    for rank, (key, _) in enumerate(answers):
        members.setdefault(key, []).append(rank)
    wishes = [[answers[rank][1] for rank in ranks if answers[rank][1]] for ranks in members.values()]
    return [Machine(tuple(ranks), min(wish, default=0)) for ranks, wish in zip(members.values(), wishes, strict=True)]
