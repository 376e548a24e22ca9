"""The jobs of this host: messages to their launchers, their descriptions, and the rendezvous of their ranks."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import sys
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
from ..flight_recorder import FlightRecorder, RecorderReader, layout, open_job
from ..messages import Integer
from ..stores import Ranges, exchange_available, from_ranges, read_message, to_ranges
from ..system import private_folders
from ..system.heartbeat import Heartbeat, HeartbeatClient, HeartbeatServer, address_towards
from ..system.job_folders import JobFolderLock, is_abandoned
from ..system.terminal_text import plain
from .call_sites import current_folder

__all__ = [
    "EVENTS",
    "JobDescription",
    "MessageReader",
    "NoSpaceError",
    "Rendezvous",
    "command_line",
    "default_base",
    "find_jobs",
    "make_base",
    "remove",
    "remove_dead",
    "rendezvous",
    "resolve_base",
    "write_description",
    "write_message",
]


# --- Messages from ranks to the user, shown by the launcher -----------------------------------------------------------

_MAX_CHARACTERS = 2000  # of a line of JSON (ASCII); up to 4 KiB that are written at once are not interleaved
_MAX_READ = 1 << 20  # bytes of messages that are read at once


def write_message(folder: Path | None, text: str) -> None:
    """Write a message for the launcher that reads those in `folder`; to standard error if that is None."""
    if folder is None:
        sys.stderr.write(f"lockstep: {text}\n")
        sys.stderr.flush()
        return
    while len(line := messages.encode(_Message(text)) + "\n") > _MAX_CHARACTERS:
        text = text[: len(text) * 3 // 4]
    descriptor = os.open(folder / "messages", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class _Message(msgspec.Struct, frozen=True):
    """A message from a rank to the user."""

    text: str


class MessageReader:
    """Reads the messages in a job's folder, each of them once."""

    def __init__(self, folder: Path) -> None:
        self._path, self._read = folder / "messages", 0

    def read(self) -> list[str]:
        """Return the messages that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(_MAX_READ)
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return [text for line in complete.splitlines() if (text := _parse_message(line))]


def _parse_message(line: bytes) -> str:
    try:
        return "\n".join(map(plain, messages.decode(line, _Message).text.split("\n")))
    except ValueError:  # not written by `write_message`
        return ""


# --- Job descriptions, and the folders of jobs ------------------------------------------------------------------------

_NAME = "job.json"


EVENTS = "events"
"""The file in the folder of a job's records with what has happened in an elastic job, a line each."""


class JobDescription(msgspec.Struct, frozen=True):
    """The description of a job, a file beside the flight recorders of its ranks.

    Attributes:
        program: its command line.
        pid: of its launcher, or of the rank that made the folder; when it and all ranks have ended, so has the job.
        workers: number of ranks on this host.
        first_rank: the lowest of them.
        started: Unix time of its start.
        host: name of this host.
        cwd: the folder in which it was started.
        folder: its run directory, "" for none.
        control: the path of the socket by which `lockstep resize` reaches the launcher of an elastic job; else "".
    """

    program: str
    pid: Integer
    workers: Integer
    first_rank: Integer = 0
    started: float = 0.0
    host: str = ""
    cwd: str = ""
    folder: str = ""
    control: str = ""


def make_base() -> Path:
    """Make the folder of this user's jobs; with a random name if another user has taken the default one.

    Raises:
        OSError: it cannot be made.
    """
    return private_folders.make_folder(layout.parent(), environment.runtime_dir())


def default_base() -> str:
    """Make the default folder of this user's jobs and return its path; "" if another user has taken it."""
    return str(private_folders.make_usual_folder(layout.parent(), environment.runtime_dir()) or "")


def resolve_base(published: str, token: str) -> Path:
    """Return the folder of jobs that another rank has chosen.

    Args:
        published: its `default_base`.
        token: a random text that it has published, from which a random name is made.

    Raises:
        OSError: the folder cannot be made.
        LockstepError: other users can write to the folder.
    """
    if not published:
        return private_folders.make_random_folder(layout.parent(), token)
    folder = Path(published)
    if not folder.name.startswith("lockstep") or not private_folders.is_private(folder):
        raise LockstepError(f"{folder} is not a private folder of this user, as flight recorders need")
    return folder


def remove(job: Path) -> None:
    """Remove a job's folder, and its parent if that was made for it."""
    shutil.rmtree(job, ignore_errors=True)
    private_folders.remove_if_random(job.parent)


def write_description(folder: Path, job: JobDescription) -> None:
    """Write the description of a job into its `folder`."""
    draft = folder / f".{_NAME}"
    draft.write_text(messages.encode(job))
    draft.replace(folder / _NAME)


def find_jobs() -> dict[Path, JobDescription]:
    """Return the running jobs of this user by folder, the oldest first."""
    found = {folder: _read(folder / _NAME) for folder in _folders()}
    running = [(folder, job) for folder, job in found.items() if job is not None and _is_running(folder, job)]
    return dict(sorted(running, key=lambda each: each[1].started))


def remove_dead() -> None:
    """Remove the folders of jobs that were killed before they could do so themselves."""
    for job in _jobs():
        if is_abandoned(job):
            remove(job)


def _jobs() -> list[Path]:
    bases = private_folders.find_folders(layout.parent(), environment.runtime_dir())
    return [job for base in bases for job in _inside(base)]


def _folders() -> list[Path]:
    return [folder for job in _jobs() for folder in _inside(job)]


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # another job has removed it at this moment
        return []


def _read(path: Path) -> JobDescription | None:
    try:
        return messages.decode(path.read_text(), JobDescription)
    except (OSError, ValueError, RecursionError):  # removed by now, or not written by `write_description`
        return None


def _is_running(folder: Path, job: JobDescription) -> bool:
    """Return whether the launcher or a rank is alive: without a launcher, other ranks may outlive the first one."""
    if _is_alive(job.pid):
        return True
    ranks = open_job(folder).values()
    pids = [reader.pid for reader in ranks]
    for reader in ranks:
        reader.close()
    return any(map(_is_alive, pids))


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):  # it does not exist, or belongs to another user, as the process id was reused
        return False
    return True


# --- Rendezvous: ranks find each other's flight recorders when their first group is made ------------------------------

Hosts = tuple[tuple[int, ...], ...]

_TIMEOUT = timedelta(seconds=60)  # the other ranks make the same group now; one without a watchdog does not answer


class NoSpaceError(LockstepError):
    """Some ranks have no space for a flight recorder, so that no rank is watched.

    Args:
        ranks: those ranks.
        folder: of the job.

    Attributes:
        ranks: those ranks.
    """

    def __init__(self, ranks: list[int], folder: Path) -> None:
        super().__init__(f"no space in {folder.parent.parent} for the flight recorders of ranks {ranks}")
        self.ranks = ranks


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows of the others after the rendezvous.

    Attributes:
        folder: with the flight recorders of this host's ranks.
        owns_folder: whether the ranks have made the folder, and remove it; otherwise the launcher does.
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


class _RankHost(msgspec.Struct, frozen=True):
    """What a rank publishes about its host: its key, a token and a base for a folder, and its address."""

    key: str
    token: str
    base: str
    address: str


class _HostRanks(msgspec.Struct, frozen=True):
    """The ranks of one host, the token and the base of the first of them, and the addresses of all."""

    ranks: Ranges
    token: str
    base: str
    addresses: list[str]


class _HubAddresses(msgspec.Struct, frozen=True):
    """The token of the heartbeat hub, and its address for each address of other hosts."""

    token: str
    by_address: dict[str, str]


class _Readiness(msgspec.Struct, frozen=True):
    """Whether a rank has a flight recorder, and where its heartbeat hub listens, if it has one."""

    has_recorder: bool
    hub: _HubAddresses | None


class _AllReadiness(msgspec.Struct, frozen=True):
    """The ranks with a flight recorder, those without, and where the heartbeat hub listens."""

    recording: Ranges
    without: Ranges
    hub: _HubAddresses | None


def rendezvous(store: Any, rank: int, world_size: int, host_key: str, limit_s: float = 30.0) -> Rendezvous:
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
    turn = f"lockstep-watch/{store.add(f'lockstep-watch/turn/{rank}', 1)}"
    records = environment.records_dir()
    base = default_base() if records is None else ""
    own_address = _own_address(store)
    if records is not None:  # two launchers on one host have a folder each, and read nothing in that of the other
        host_key = f"{host_key} {records}"
    mine = messages.encode(_RankHost(host_key, secrets.token_hex(6), base, own_address))
    grouped = exchange_available(store, f"{turn}/hosts", rank, mine, world_size, _group_by_host, _TIMEOUT)
    found = read_message(grouped, list[_HostRanks], "the ranks of each host")
    hosts = tuple(tuple(from_ranges(each.ranks, world_size)) for each in found)
    here = next((number for number, ranks in enumerate(hosts) if rank in ranks), None)
    if here is None:
        raise TransportError(f"the ranks of each host: expected rank {rank} among them, got {hosts}")
    local = hosts[here]
    folder, owns_folder = _make_folder(found[here].token, found[here].base, local, rank)
    lock = JobFolderLock(folder.parent)
    recorder = _make_recorder(folder, rank, world_size)
    hub = HeartbeatServer(limit_s) if len(hosts) > 1 and rank == hosts[0][0] else None
    own_hub = None if hub is None else _HubAddresses(hub.token, _open_hub(hub, found[1:]))
    ready = messages.encode(_Readiness(recorder is not None, own_hub))
    combined = exchange_available(store, f"{turn}/ready", rank, ready, world_size, _group_by_readiness, _TIMEOUT)
    readiness = read_message(combined, _AllReadiness, "the flight recorders of all ranks")
    recording, without = (from_ranges(each, world_size) for each in (readiness.recording, readiness.without))
    if recorder is None or without:  # all ranks are watched or none
        if hub is not None:
            hub.close()
        if recorder is not None:
            recorder.close()
        lock.close()
        _remove_recorder(folder, rank, owns_folder)
        raise NoSpaceError(without, folder)
    peers = {}
    for each in local:
        if each != rank and each in recording:
            with suppress(OSError, ValueError):  # of another version, or removed already
                peers[each] = RecorderReader(layout.rank_file(folder, each))
    heartbeat = hub or _spoke(readiness.hub, rank, own_address, hosts, limit_s)
    return Rendezvous(folder, owns_folder, lock, recorder, peers, PrefixStore(turn, store), hosts, heartbeat)


def _make_recorder(folder: Path, rank: int, world_size: int) -> FlightRecorder | None:
    try:
        return FlightRecorder(folder, rank, world_size, socket.gethostname(), command_line())
    except OSError:
        return None


def _group_by_host(published: Mapping[int, str]) -> str:
    """Return a `_HostRanks` for each host, from the `_RankHost` of each rank."""
    members: dict[str, dict[int, _RankHost]] = {}
    for rank, text in published.items():
        own = read_message(text, _RankHost, f"the host of rank {rank}")
        members.setdefault(own.key, {})[rank] = own
    hosts = []
    for ranks in members.values():
        first, addresses = next(iter(ranks.values())), sorted({own.address for own in ranks.values()})
        hosts.append(_HostRanks(to_ranges(ranks), first.token, first.base, addresses))
    return messages.encode(hosts)


def _group_by_readiness(published: Mapping[int, str]) -> str:
    """Return the `_AllReadiness`, from the `_Readiness` of each rank."""
    answers = {
        rank: read_message(text, _Readiness, f"the flight recorder of rank {rank}") for rank, text in published.items()
    }
    recording = to_ranges(rank for rank, answer in answers.items() if answer.has_recorder)
    without = to_ranges(rank for rank, answer in answers.items() if not answer.has_recorder)
    hub = next((answer.hub for answer in answers.values() if answer.hub is not None), None)
    return messages.encode(_AllReadiness(recording, without, hub))


def _own_address(store: Any) -> str:
    """Return this host's address in the network of the store; "" if it cannot be determined."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, found = getattr(store, "host", ""), ""
    for name in (host,) if host else (socket.gethostname(), "192.0.2.1", "localhost"):  # the second: the default route
        with suppress(OSError):
            found = address_towards(name)
            if not found.startswith("127."):  # as many hosts resolve their own name
                break
    return found


def _open_hub(hub: HeartbeatServer, others: Sequence[_HostRanks]) -> dict[str, str]:
    """Open the heartbeat hub towards the other hosts; return its address for each of their addresses."""
    found = {}
    for address in {address for host in others for address in host.addresses}:
        with suppress(OSError):  # there is no route
            if address:
                found[address] = hub.listen_for(address)
    return found


def _spoke(hub: _HubAddresses | None, rank: int, address: str, hosts: Hosts, limit_s: float) -> HeartbeatClient | None:
    """Connect to the hub of the first rank, from another host; None if there is no route."""
    if hub is None or rank in hosts[0] or address not in hub.by_address:
        return None
    return HeartbeatClient(hub.by_address[address], hub.token, rank, limit_s, hosts[0][0])


def _make_folder(token: str, base: str, local: Sequence[int], rank: int) -> tuple[Path, bool]:
    given = environment.records_dir()
    if given is not None:
        if rank == local[0]:
            (given / "report.json").unlink(missing_ok=True)  # of groups that were destroyed since
        return given, False
    if not re.fullmatch(r"[0-9a-f]{12}", token):  # it becomes part of a path
        raise LockstepError(f"rank {local[0]} published the token {token!r}: expected twelve hexadecimal digits")
    folder = resolve_base(base, token) / f"{token}-{local[0]}" / "attempt-0"
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if rank == local[0]:
        remove_dead()
        job = (command_line(), os.getpid(), len(local), rank, time.time(), socket.gethostname(), current_folder())
        write_description(folder, JobDescription(*job))
    return folder, True


def _remove_recorder(folder: Path, rank: int, owns_folder: bool) -> None:
    with suppress(OSError):
        layout.rank_file(folder, rank).unlink(missing_ok=True)
    if owns_folder:
        remove(folder.parent)


def command_line() -> str:
    """Return the command line of this process."""
    return " ".join(sys.argv)[:200]
