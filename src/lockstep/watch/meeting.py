"""Where the ranks of a job find each other's recordings: once, when their first group is made."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from .. import environment
from ..errors import LockstepError
from ..recorder import Recorder, Recording, places
from . import jobs
from .places import current_folder

__all__ = ["Met", "NoRoomError", "meet", "program"]

_PATIENCE = timedelta(seconds=60)  # others make the same group at this moment; one that does not watch says nothing


class NoRoomError(LockstepError):
    """Some ranks have no room for a recording, so that none is watched.

    Args:
        ranks: those.
        folder: where there is no room.

    Attributes:
        ranks: those.
    """

    def __init__(self, ranks: list[int], folder: Path) -> None:
        super().__init__(f"there is no room in {folder.parent.parent} for recordings of the ranks {ranks}")
        self.ranks = ranks


@dataclass(frozen=True)
class Met:
    """What a rank has learnt.

    Attributes:
        folder: with the recordings of this machine.
        made: whether this job has made the folder, and removes it.
        recorder: this rank's.
        peers: recordings of the other ranks of this machine that watch, by rank.
        store: where machines tell each other how their ranks do.
        machines: the ranks that watch, machine by machine; this one's among them.
    """

    folder: Path
    made: bool
    recorder: Recorder
    peers: dict[int, Recording]
    store: Any
    machines: tuple[tuple[int, ...], ...]


def meet(store: Any, rank: int, world_size: int, machine: str) -> Met:
    """Tell the others where this rank's recording lies, and learn about theirs; every rank must call it.

    Args:
        store: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        machine: a text that is the same for two ranks if they can open each other's files.

    Raises:
        NoRoomError: some rank cannot record.
        OSError, LockstepError, RuntimeError: this rank cannot learn of the others.
    """
    turn = f"lockstep-watch/{store.add(f'lockstep-watch/turn/{rank}', 1)}"
    base = jobs.usual_base() if environment.watch_dir() is None else ""
    mine = {"machine": machine, "pid": os.getpid(), "token": secrets.token_hex(6), "base": base}
    said = _exchange(store, f"{turn}/who", rank, mine, world_size)
    local = [each for each, text in said.items() if text["machine"] == machine]
    folder, made = _folder(said, local, rank)
    recorder = _record(folder, rank, world_size)
    ready = _exchange(store, f"{turn}/recorded", rank, {"ready": recorder is not None}, world_size)
    without = [each for each, text in ready.items() if not text["ready"]]
    if recorder is None or without:  # for all or for none: the others would take part in what nobody compares
        if recorder is not None:
            recorder.close()
        _remove(folder, rank, made)
        raise NoRoomError(without, folder)
    peers = {}
    for each in local:
        if each != rank and each in ready:
            with suppress(OSError, ValueError):  # of another version, or gone already
                peers[each] = Recording(places.rank_file(folder, each))
    return Met(folder, made, recorder, peers, PrefixStore(turn, store), _machines(said))


def _record(folder: Path, rank: int, world_size: int) -> Recorder | None:
    try:
        return Recorder(folder, rank, world_size, socket.gethostname(), program())
    except OSError:
        return None


def _exchange(store: Any, topic: str, rank: int, said: dict[str, Any], count: int) -> dict[int, dict[str, Any]]:
    """What each rank has said about `topic`; without those that have not come in time."""
    store.set(f"{topic}/{rank}", json.dumps(said))
    keys = [f"{topic}/{each}" for each in range(count)]
    with suppress(RuntimeError):  # some have not come in time
        store.wait(keys, _PATIENCE)
    return {each: json.loads(store.get(key).decode()) for each, key in enumerate(keys) if store.check([key])}


def _machines(said: dict[int, dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    found: dict[str, list[int]] = {}
    for rank, text in said.items():
        found.setdefault(text["machine"], []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _folder(said: dict[int, dict[str, Any]], local: Sequence[int], rank: int) -> tuple[Path, bool]:
    given = environment.watch_dir()
    if given is not None:
        if rank == local[0]:
            (given / "report.json").unlink(missing_ok=True)  # of groups that have been destroyed since
        return given, False
    token = said[local[0]]["token"]
    if not re.fullmatch(r"[0-9a-f]{12}", token):  # it is to be part of a path
        raise LockstepError(f"rank {local[0]} calls its recordings {token!r}, and should twelve hexadecimal digits")
    folder = jobs.base_of(said[local[0]]["base"], token) / f"{token}-{local[0]}" / "attempt-0"
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if rank == local[0]:
        jobs.remove_dead()
        about = (program(), os.getpid(), len(local), rank, time.time(), socket.gethostname(), current_folder())
        jobs.describe(folder, jobs.About(*about))
    return folder, True


def _remove(folder: Path, rank: int, made: bool) -> None:
    with suppress(OSError):
        places.rank_file(folder, rank).unlink(missing_ok=True)
    if made:
        jobs.remove(folder.parent)


def program() -> str:
    """What is run, as it is typed."""
    return " ".join(sys.argv)[:200]
