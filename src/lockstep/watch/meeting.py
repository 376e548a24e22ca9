"""Where the ranks of a job find each other's recordings: once, when their first group is made."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from .. import environment
from ..errors import LockstepError
from ..heartbeat import Heartbeat, Hub, Spoke, address_towards
from ..recorder import Recorder, Recording, places
from ..store_exchange import exchange_present, ranks_of, runs_of
from . import jobs
from .places import current_folder

__all__ = ["Met", "NoRoomError", "meet", "program"]

Machines = tuple[tuple[int, ...], ...]

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
        heartbeat: of the ranks on other machines; None where there are none.
    """

    folder: Path
    made: bool
    recorder: Recorder
    peers: dict[int, Recording]
    store: Any
    machines: tuple[tuple[int, ...], ...]
    heartbeat: Heartbeat | None = None


def meet(store: Any, rank: int, world_size: int, machine: str, limit_s: float = 30.0) -> Met:
    """Tell the others where this rank's recording lies, and learn about theirs; every rank must call it.

    Args:
        store: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        machine: a text that is the same for two ranks if they can open each other's files.
        limit_s: seconds in which the machines of other ranks must answer.

    Raises:
        NoRoomError: some rank cannot record.
        OSError, LockstepError, RuntimeError: this rank cannot learn of the others.
    """
    turn = f"lockstep-watch/{store.add(f'lockstep-watch/turn/{rank}', 1)}"
    base = jobs.usual_base() if environment.watch_dir() is None else ""
    own_address = _own_address(store)
    mine = json.dumps([machine, secrets.token_hex(6), base, own_address])
    said = json.loads(exchange_present(store, f"{turn}/who", rank, mine, world_size, _by_machine, _PATIENCE))
    machines = tuple(tuple(ranks_of(runs)) for runs, *_ in said)
    here = next(number for number, ranks in enumerate(machines) if rank in ranks)
    local, (_, token, base, _) = machines[here], said[here]
    folder, made = _folder(token, base, local, rank)
    recorder = _record(folder, rank, world_size)
    hub = Hub(limit_s) if len(machines) > 1 and rank == machines[0][0] else None
    doors = None if hub is None else [hub.token, _doors(hub, said[1:])]
    ready = json.dumps([recorder is not None, doors])
    told = exchange_present(store, f"{turn}/recorded", rank, ready, world_size, _by_readiness, _PATIENCE)
    *runs, doors = json.loads(told)
    recording, without = map(ranks_of, runs)
    if recorder is None or without:  # for all or for none: the others would take part in what nobody compares
        if hub is not None:
            hub.close()
        if recorder is not None:
            recorder.close()
        _remove(folder, rank, made)
        raise NoRoomError(without, folder)
    peers = {}
    for each in local:
        if each != rank and each in recording:
            with suppress(OSError, ValueError):  # of another version, or gone already
                peers[each] = Recording(places.rank_file(folder, each))
    heartbeat = hub or _spoke(doors, rank, own_address, machines, limit_s)
    return Met(folder, made, recorder, peers, PrefixStore(turn, store), machines, heartbeat)


def _record(folder: Path, rank: int, world_size: int) -> Recorder | None:
    try:
        return Recorder(folder, rank, world_size, socket.gethostname(), program())
    except OSError:
        return None


def _by_machine(said: Mapping[int, str]) -> str:
    """The ranks of each machine, the token and the folder of the first of them, and the addresses of all."""
    found: dict[str, tuple[list[int], str, str, set[str]]] = {}
    for rank, text in said.items():
        machine, token, base, address = json.loads(text)
        ranks, _, _, addresses = found.setdefault(machine, ([], token, base, set()))
        ranks.append(rank)
        addresses.add(address)
    return json.dumps([[runs_of(ranks), *texts, sorted(addresses)] for ranks, *texts, addresses in found.values()])


def _by_readiness(said: Mapping[int, str]) -> str:
    """The ranks that record, those that cannot, and where the others find the hub."""
    answers = {rank: json.loads(text) for rank, text in said.items()}
    runs = [runs_of(rank for rank, (is_ready, _) in answers.items() if is_ready is wanted) for wanted in (True, False)]
    return json.dumps([*runs, next((doors for _, doors in answers.values() if doors is not None), None)])


def _own_address(store: Any) -> str:
    """This machine's address in the network in which the store is; "" where that cannot be found out."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, found = getattr(store, "host", ""), ""
    for name in (host,) if host else (socket.gethostname(), "192.0.2.1", "localhost"):  # the second: the usual way out
        with suppress(OSError):
            found = address_towards(name)
            if not found.startswith("127."):  # to which many a host gives its own name
                break
    return found


def _doors(hub: Hub, others: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Where the ranks of `others`, the machines but the first, find the hub, by their addresses."""
    found = {}
    for address in {address for *_, addresses in others for address in addresses}:
        with suppress(OSError):  # there is no way to it
            if address:
                found[address] = hub.open_towards(address)
    return found


def _spoke(
    doors: tuple[str, dict[str, str]] | None, rank: int, address: str, machines: Machines, limit_s: float
) -> Spoke | None:
    """The connection to the first rank, for one on another machine; None where there is no way to it."""
    if doors is None or rank in machines[0] or address not in doors[1]:
        return None
    return Spoke(doors[1][address], doors[0], rank, limit_s, machines[0][0])


def _folder(token: str, base: str, local: Sequence[int], rank: int) -> tuple[Path, bool]:
    given = environment.watch_dir()
    if given is not None:
        if rank == local[0]:
            (given / "report.json").unlink(missing_ok=True)  # of groups that have been destroyed since
        return given, False
    if not re.fullmatch(r"[0-9a-f]{12}", token):  # it is to be part of a path
        raise LockstepError(f"rank {local[0]} calls its recordings {token!r}, and should twelve hexadecimal digits")
    folder = jobs.base_of(base, token) / f"{token}-{local[0]}" / "attempt-0"
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
