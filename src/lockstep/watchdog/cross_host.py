"""Cross-host state: one rank of each host publishes how its host's ranks do and polls the states of other hosts.

Every host publishes the state of its ranks twice a second, and polls two values: the state of the first host, and the
report. Only the first host polls the states of all and compares them. With h hosts these are 2 h + 2 messages a period
at the job's store, whatever the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from msgspec import structs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from .. import messages
from ..errors import ranks_in_words
from ..flight_recorder import RecorderReader
from ..flight_recorder.layout import GROUP_SLOTS, StateWords
from ..gloo import SocketTracker
from . import report as reports
from .channels import awaited_channels, is_recv, message_number, receive_number
from .deadlock import CrossHostCycles, current_wait
from .diagnosis import (
    OWN_WORK_FACTOR,
    SIMULTANEOUS_S,
    exception_finding,
    exit_finding,
    lost_finding,
    stopped_finding,
)
from .group_monitor import GroupMonitor
from .host_state import GroupState, HostState, HostStates, Pending, RankRow, RecordRow, Wait
from .mismatch import BATCH_ADVICE, Finding, describe_collective
from .report import RankStatus, Report, rank_status
from .shared_state import WatchdogState

__all__ = [
    "HISTORY",
    "PERIOD_S",
    "CrossHost",
    "JobHosts",
    "LostHosts",
    "StateExchange",
    "Store",
    "StragglerWait",
    "collect_state",
    "find_divergence",
    "find_exception",
    "find_fault",
    "find_waits",
    "rank_statuses",
]

# --- The state that a host publishes ----------------------------------------------------------------------------------

HISTORY = 6  # last collectives of a group that are published; those before were compared in earlier periods


def collect_state(
    readers: Mapping[int, RecorderReader], gone: Collection[int], stopped: Collection[int], skip: Collection[int]
) -> HostState:
    """Return the state of this host's ranks, as JSON can represent it.

    Args:
        readers: of the flight recorders of this host's ranks.
        gone: ranks whose processes have ended.
        stopped: ranks whose processes are stopped.
        skip: keys of groups that have no ranks on other hosts.
    """
    waits = {rank: wait for rank, reader in readers.items() if (wait := _wait(reader)) is not None}
    found = HostState(
        ranks={
            rank: RankRow.of(rank_status(reader.state(), True, rank in gone, rank in stopped))
            for rank, reader in readers.items()
        },
        waits=waits,
        channels={rank: counts for rank in waits if (counts := readers[rank].channels()) is not None},
        sent={rank: _sent_messages(reader) for rank, reader in readers.items()},
        solo=any(reader.in_solo_section for rank, reader in readers.items() if rank not in gone),
        activities={rank: reader.activity for rank, reader in readers.items() if reader.activity},
        own_work=[rank for rank, reader in readers.items() if reader.activity_is_own],
    )
    for reader in readers.values():
        for slot in range(GROUP_SLOTS):
            key = reader.state_word((reader.layout.group_keys >> 3) + slot)
            if key and key not in skip:
                _add(found.groups.setdefault(key, []), _group_state(reader, slot, key))
    return found


def _wait(reader: RecorderReader) -> Wait | None:
    raw = current_wait(reader)
    if raw is None:
        return None
    if raw.peer < 0:
        return Wait(raw.number, -1, key=raw.key, sequence=raw.sequence)
    if raw.peer == reader.rank:  # a receive from any rank
        return None
    is_send = not is_recv(reader, raw)
    if not reader.knows_channels:
        return None if is_send else Wait(raw.number, raw.peer, receive_number(reader, raw))
    channels = awaited_channels(reader, raw)
    return Wait(raw.number, raw.peer, message_number(reader, raw), channels=channels, is_send=is_send)


def _sent_messages(reader: RecorderReader) -> dict[int, int]:
    """Return how many messages the rank has sent, by destination."""
    counts = ((peer, reader.messages(peer, sent=True)) for peer in range(reader.world_size))
    return {peer: count for peer, count in counts if count}


def _group_state(reader: RecorderReader, slot: int, key: int) -> GroupState:
    """Return the state of one rank in one group."""
    last, records, pending = reader.last_sequence(slot), [], None
    for sequence in range(max(1, last + 1 - HISTORY), last + 1):
        raw = reader.raw(reader.record_number(slot, sequence))
        if raw is None or raw.key != key or raw.sequence != sequence:
            continue
        if not raw.left and pending is None:
            pending = Pending(sequence, round(time.monotonic() - raw.entered, 1), reader.limit_s(slot))
        records.append(RecordRow(raw.sequence, raw.fingerprint, raw.line, raw.batch, raw.loop, int(raw.name > 0)))
    raw = reader.raw(reader.record_number(slot, last))
    numbers = (0, 0, 0) if raw is None else (raw.what, raw.call_site, raw.group)
    return GroupState([reader.rank], last, pending, records, *(reader.text(number) for number in numbers))


def _add(states: list[GroupState], state: GroupState) -> None:
    """Add a rank's state to those of its host, joined with an equal one, as all are while all is well."""
    equal = next((each for each in states if each.is_equal(state)), None)
    if equal is None:
        states.append(state)
    else:
        equal.ranks += state.ranks


# --- The exchange through the job's store -----------------------------------------------------------------------------

PERIOD_S = 0.5
_REPORT = "report"


class Store(Protocol):
    """The methods of torch's stores that are used."""

    def set(self, key: str, value: str) -> None:
        """Set `key` to `value`."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`, all of which exist."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it has the value `expected`; return the value that it has then."""


class StateExchange:
    """The part of one host in the exchange of states.

    Args:
        store: of the job.
        host: index of this host.
        hosts: number of hosts.
    """

    def __init__(self, store: Store, host: int, hosts: int) -> None:
        self._store, self._host, self._hosts = store, host, hosts
        self._count = 0
        self._polled: dict[int, tuple[int, float]] = {}  # the last count of each host, and when it was new

    def initialize(self) -> None:
        """Publish an empty state; every host must have done so before any host polls."""
        self._store.set(f"state/{self._host}", messages.encode(HostState()))
        if self._host == 0:
            self._store.set(_REPORT, "")

    def publish(self, state: HostState) -> None:
        """Publish the state of this host's ranks."""
        self._count += 1
        # unique in time, as another rank may have published for this host before
        state = structs.replace(state, count=time.time_ns() + self._count)
        self._store.set(f"state/{self._host}", messages.encode(state))

    def poll(self) -> tuple[str, dict[int, HostState]]:
        """Return the report, "" without one, and states: of all hosts on the first one, else of the first host."""
        hosts = range(self._hosts) if self._host == 0 else (0,)
        report, *values = self._store.multi_get([_REPORT, *(f"state/{host}" for host in hosts)])
        states = {host: messages.decode(value, HostState) for host, value in zip(hosts, values, strict=True)}
        now = time.monotonic()
        for host, state in states.items():
            if host not in self._polled or self._polled[host][0] != state.count:
                self._polled[host] = (state.count, now)
        return report.decode(), states

    def reset_silence(self) -> None:
        """Restart the measurement of silences, as this host has not polled for a while."""
        now = time.monotonic()
        self._polled = {host: (count, now) for host, (count, _) in self._polled.items()}

    def silent_s(self, host: int) -> float:
        """Return the seconds since a host has published a new state."""
        polled = self._polled.get(host)
        return 0.0 if polled is None else time.monotonic() - polled[1]

    def publish_report(self, text: str) -> str:
        """Publish a report; return the one that all hosts get, which may be another host's."""
        return self._store.compare_set(_REPORT, "", text).decode()


# --- Diagnosis from the states of hosts (pure) ------------------------------------------------------------------------

LostHosts = Mapping[int, tuple[str, str]]
"""Hosts whose ranks do not respond, by index: the state of these ranks, "lost" or "died", and a note."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A `GroupState`, the index of its host, and its records by sequence number."""

    host: int
    state: GroupState
    records: Mapping[int, RecordRow]


@dataclass(frozen=True, slots=True)
class JobHosts:
    """Where the ranks of a job are.

    Attributes:
        hosts: the ranks of each host.
        groups: the ranks of each group that this rank is in, by the group's key.
    """

    hosts: Sequence[Sequence[int]]
    groups: Mapping[int, Sequence[int]]

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host; -1 if it is not known."""
        return next((host for host, ranks in enumerate(self.hosts) if rank in ranks), -1)


class StragglerWait(NamedTuple):
    """A collective in which ranks wait for stragglers.

    Attributes:
        key, sequence: group and sequence number.
        seconds: how long they have waited.
        limit_s: timeout that the user has set; 0 for none.
        call: what it is.
        missing: the ranks that have not called it.
        waiting: the ranks that wait.
    """

    key: int
    sequence: int
    seconds: float
    limit_s: float
    call: str
    missing: list[int]
    waiting: list[int]


def rank_statuses(job: JobHosts, states: HostStates, lost: LostHosts) -> dict[int, RankStatus]:
    """Return the status of every rank, as far as it is known."""
    rows: dict[int, RankStatus] = {}
    for host, (state, note) in lost.items():
        rows |= {rank: RankStatus(rank, state, note) for rank in job.hosts[host]}
    for host, published in states.items():
        for rank, row in published.ranks.items():
            status = row.status(rank)
            if host in lost and status.state not in ("ended", "raised", "died"):
                status = structs.replace(status, state=lost[host][0], note=lost[host][1])
            rows[rank] = status
    return rows


def find_fault(job: JobHosts, states: HostStates, lost: LostHosts, uneven: bool = False) -> Finding | None:
    """Return the first thing that is wrong.

    Args:
        job: where the ranks are.
        states: of the hosts.
        lost: the hosts that do not respond.
        uneven: whether ranks have different numbers of batches on purpose.
    """
    rows = rank_statuses(job, states, lost)
    for key, parts in _parts_of_groups(job, states).items():
        found = _divergence(key, parts, uneven) or _unreachable(key, parts, rows)
        if found is not None:
            return found
    return None


def find_divergence(job: JobHosts, states: HostStates, uneven: bool = False) -> Finding | None:
    """Return the first collective at which hosts diverge; for the arguments see `find_fault`."""
    found = (_divergence(key, parts, uneven) for key, parts in _parts_of_groups(job, states).items())
    return next((each for each in found if each is not None), None)


def find_exception(job: JobHosts, states: HostStates) -> tuple[Finding | None, bool]:
    """Return the finding for a rank that has raised an exception, if any, and whether any rank waits for another."""
    found = next((row for row in rank_statuses(job, states, {}).values() if row.state == "raised"), None)
    if found is None:
        return None, False
    waits = any(True for _ in find_waits(job, states))
    return exception_finding(found.rank, found.note, found.traceback), waits


def find_waits(job: JobHosts, states: HostStates) -> Iterator[StragglerWait]:
    """Yield the collectives in which ranks wait for others."""
    for key, parts in _parts_of_groups(job, states).items():
        for part in parts:
            state, wait = part.state, part.state.pending
            if wait is not None:
                missing = sorted(_missing_ranks(parts, wait.sequence))
                if missing:
                    yield StragglerWait(
                        key, wait.sequence, wait.seconds, wait.limit_s, state.last_call(), missing, list(state.ranks)
                    )


def _missing_ranks(parts: Sequence[_Part], sequence: int) -> list[int]:
    """Return the ranks that have not called the collective `sequence`."""
    return [rank for part in parts if part.state.last < sequence for rank in part.state.ranks]


def _parts_of_groups(job: JobHosts, states: HostStates) -> dict[int, list[_Part]]:
    found: dict[int, list[_Part]] = {}
    for host, published in states.items():
        for key, group_states in published.groups.items():
            for state in group_states:
                part = _Part(host, state, {record.sequence: record for record in state.records})
                found.setdefault(key, []).append(part)
    for key, members in job.groups.items():
        known = {rank for part in found.get(key, []) for rank in part.state.ranks}
        for rank in members:
            if rank not in known:  # its host has not published it yet
                silent = _Part(job.host_of(rank), GroupState([rank], 0, None, [], "", ""), {})
                found.setdefault(key, []).append(silent)
    return found


def _divergence(key: int, parts: list[_Part], uneven: bool) -> Finding | None:
    first: dict[int, _Part] = {}  # by sequence number: all others are compared with the first part that has it
    for part in parts:
        for sequence, record in part.records.items():
            other = first.setdefault(sequence, part)
            if record != other.records[sequence] and other.host != part.host:
                found = _difference(key, sequence, (other, part), uneven)
                if found is not None:
                    return found
    return None


def _difference(key: int, sequence: int, pair: tuple[_Part, _Part], uneven: bool) -> Finding | None:
    one, other = pair
    where = describe_collective(sequence, one.state.title)
    own, others = one.records[sequence], other.records[sequence]
    if own.fingerprint != others.fingerprint:
        called = [
            f"rank {part.state.ranks[0]} called "
            + (part.state.last_call() if part.state.last == sequence else "something else")
            for part in pair
        ]
        cause = "A collective is in a branch that only some ranks take, or their tensors differ."
        advice = "Call the same collectives in the same order on every rank of the group."
        return Finding("desync", f"Desync at {where}: {', '.join(called)}.", (), cause, advice, key, sequence)
    same_loop = own.loop == others.loop != 0
    if same_loop and min(own.batch, others.batch) >= 0 and own.batch != others.batch and not uneven:
        found = [f"rank {part.state.ranks[0]} is on batch {part.records[sequence].batch}" for part in pair]
        return Finding("batches", f"Batch mismatch at {where}: {', '.join(found)}.", (), *BATCH_ADVICE, key, sequence)
    return None


def _unreachable(key: int, parts: list[_Part], rows: Mapping[int, RankStatus]) -> Finding | None:
    """Return the finding for a rank that others wait for and that will never call the collective."""
    for part in parts:
        wait = part.state.pending
        for rank in _missing_ranks(parts, wait.sequence) if wait is not None else []:
            row = rows.get(rank)
            finding = _finding_of(row, part.state.last_call()) if row is not None else None
            if finding is not None and wait is not None:
                return replace(finding, key=key, sequence=wait.sequence)
    return None


def _finding_of(row: RankStatus, where: str) -> Finding | None:
    if row.state == "died":
        return lost_finding(row.rank, where, row.host)
    if row.state == "ended":
        return exit_finding(row.rank, where, row.host)
    if row.state == "frozen":
        return stopped_finding(row.rank, where, row.host and f" on {row.host}")
    if row.state == "lost":
        return Finding(
            "lost",
            f"Rank {row.rank}{row.host and f' on {row.host}'} and its host are unreachable while other ranks wait for "
            f"it in {where}.",
            (row.rank,),
            "Its host, or the network to it, is down.",
            "Check whether that host can be reached, and what its kernel's log (dmesg) says.",
        )
    return None


# --- The cross-host part of one rank's watchdog -----------------------------------------------------------------------

_STORE_TIMEOUT = timedelta(seconds=5)
_WAIT_S = 3.0  # ranks that have waited for so long may report that the store or the first host is lost
_EXIT_TIMEOUT_S = 1.0  # in which the other hosts may also reach the end of the program
_ABSENT_S = 1.0  # a monitor thread that has not run for so long has missed what others published
_STALL_ADVICE = "--stall-timeout (LOCKSTEP_STALL_TIMEOUT) sets this limit."


class CrossHost:
    """Publishes this host's state, polls those of other hosts, and finds what is wrong between hosts.

    Does nothing if all ranks are on one host.

    Args:
        state: of the watchdog.
        monitors: of the groups of this rank; the list may change.
    """

    def __init__(self, state: WatchdogState, monitors: Sequence[GroupMonitor]) -> None:
        self._state, self._monitors, self._job = state, monitors, state.rendezvous
        self._exchange: StateExchange | None = None
        self._states: dict[int, HostState] = {}
        self._next_period = self._failing_since = self._raised_since = 0.0
        self._warned: set[tuple[int, int]] = set()  # the wait that was warned about last
        self._cycles = CrossHostCycles()
        self._warned_groups: set[int] = set()  # in which ranks are on different batches
        self._host = 0
        self._is_final = False  # whether this rank is about to exit
        self._heartbeat = self._job.heartbeat
        if len(self._job.hosts) > 1:
            self._host = next(i for i, ranks in enumerate(self._job.hosts) if state.rank in ranks)
            store = _clone_store(self._job.store, state.limits.heartbeat_s)
            store.set_timeout(_STORE_TIMEOUT)
            self._exchange = StateExchange(store, self._host, len(self._job.hosts))
            if state.rank == self._job.hosts[self._host][0]:
                self._exchange.initialize()

    def tick(self, passed_s: float) -> None:
        """Publish and poll once a period, if this rank does so for its host.

        Args:
            passed_s: seconds since the last tick.
        """
        exchange, now = self._exchange, time.monotonic()
        if exchange is None:
            return
        if passed_s > _ABSENT_S:  # this process was stopped or got no processor: others may have been, too
            exchange.reset_silence()
            self._failing_since = 0.0
        if self._heartbeat is not None:
            self._heartbeat.poll()  # before the states are polled: ranks publish how they exit, and then exit
        if now < self._next_period or not self._represents_host():
            return
        self._next_period = now + PERIOD_S
        own = self._own_state()
        try:
            exchange.publish(own)
            self._failing_since = 0.0
        except RuntimeError as error:
            self._failing_since = self._failing_since or now
            if time.monotonic() - self._failing_since > _WAIT_S and self._has_long_wait():
                self._state.fail(_store_lost(error))
            return
        with suppress(RuntimeError):  # a host has not published anything yet
            report, self._states = exchange.poll()
            solo = any(state.solo for state in self._states.values())
            self._state.recorder.set_word(StateWords().solo_elsewhere, solo)
            if report:
                self._adopt_report(report)
            else:
                self._diagnose(own)

    def compare_at_exit(self) -> None:
        """Compare the last collectives at the end of a program; they may not have been published yet."""
        exchange, state = self._exchange, self._state
        if exchange is None or state.error is not None or state.has_failed or not self._represents_host():
            return
        self._is_final, deadline, own = True, time.monotonic() + _EXIT_TIMEOUT_S, self._own_state()
        with suppress(RuntimeError, OSError, ValueError):  # the store is gone, and its host
            exchange.publish(own)
            report, states = exchange.poll()
            while not report and not _are_final(states) and time.monotonic() < deadline:
                time.sleep(0.01)
                report, states = exchange.poll()
            # no report is adopted: it may be about this very exit, for which others have waited in vain
            finding = find_divergence(self._job_hosts(), {**states, self._host: own}, self._may_be_uneven())
            if finding is not None:
                state.fail(finding)

    def rank_statuses(self) -> dict[int, RankStatus]:
        """Return the status of each rank on other hosts, as far as it is known."""
        return rank_statuses(self._job_hosts(), self._states, self._lost_hosts())

    def publish_report(self, report: Report) -> Report:
        """Publish a report; return the first one that any host has published, which may be another.

        What a host finds after that may only be a consequence: ranks exit, and their peers' connections with them.
        """
        if self._exchange is not None:
            with suppress(RuntimeError, ValueError):  # the others find that this host does not respond
                return reports.from_json(self._exchange.publish_report(report.to_json()))
        return report

    def close(self) -> None:
        """Publish how this host's ranks have ended, and stop."""
        if self._exchange is not None and self._represents_host():
            with suppress(RuntimeError, OSError, ValueError):
                self._exchange.publish(self._own_state())
        if self._heartbeat is not None:
            self._heartbeat.close()

    def abandon(self) -> None:
        """Stop in a forked child: the connections to other hosts belong to its parent."""
        if self._heartbeat is not None:
            self._heartbeat.close_in_child()

    # --- this host

    def _represents_host(self) -> bool:
        """Return whether this is the first of its host's ranks that is able to publish."""
        state = self._state
        for rank in self._job.hosts[self._host]:
            if rank == state.rank:
                return True
            peer = state.peers.get(rank)
            able = peer is not None and peer.phase not in ("ended", "left") and rank not in state.health.gone
            # a rank that holds the interpreter for long cannot publish; that two ranks do is harmless
            silent_s = time.monotonic() - peer.floats[StateWords().heartbeat] if peer is not None else 0.0
            if able and silent_s < _ABSENT_S and not state.health.is_stopped(rank):
                return False
        return False

    def _own_state(self) -> HostState:
        state = self._state
        stopped = [rank for rank in state.peers if state.health.is_stopped(rank)]
        local = {monitor.key for monitor in self._monitors if not monitor.remote_ranks}
        found = collect_state(state.readers, state.health.gone, stopped, local)
        if self._host == 0:  # the other hosts poll this one only
            found.solo = found.solo or any(each.solo for each in self._states.values())
        found.final = self._is_final
        return found

    def _has_long_wait(self) -> bool:
        """Return whether ranks of this host have long waited for others; if not, nobody need be there any more."""
        state, before = self._state, time.monotonic() - _WAIT_S
        firsts = {monitor.key: monitor.first_pending() for monitor in self._monitors if monitor.remote_ranks}
        if any(first is not None and first.entered < before for first in firsts.values()):
            return True
        waiting = [each for each in state.peers.values() if each.phase == "waits"]
        raws = [each.raw(each.state_word(StateWords().since_record)) for each in waiting]
        return any(raw is not None and raw.key in firsts and raw.entered < before for raw in raws)

    # --- diagnosis

    def _diagnose(self, own: HostState) -> None:
        state = self._state
        lost = self._lost_hosts()
        if self._host == 0:
            job = self._job_hosts()
            finding = find_fault(job, self._states, lost, self._may_be_uneven())
            finding = finding or self._find_exception(job, self._states)
            self._warn_of_batches(job)
            if finding is None and not state.limits.debugging:
                finding = self._cycles.find(self._states) or self._check_stragglers()
        else:
            finding = self._check_first_host(lost.get(0), own)
        if finding is not None:
            state.fail(finding)

    def _may_be_uneven(self) -> bool:
        """Return whether different batches are no error."""
        return bool(self._state.uneven_batches) or not self._state.limits.strict

    def _warn_of_batches(self, job: JobHosts) -> None:
        """Warn once for each group that ranks are on different batches, unless its pre-flight check does."""
        state = self._state
        if state.uneven_batches or state.limits.strict:
            return
        unchecked = {each.key for each in self._monitors if each.remote_ranks and each.preflight is None}
        keys = unchecked - self._warned_groups
        states = {
            host: structs.replace(each, groups={key: rows for key, rows in each.groups.items() if key in keys})
            for host, each in self._states.items()
        }
        finding = find_divergence(job, states)
        if finding is not None and finding.kind == "batches":
            self._warned_groups.add(finding.key)
            state.write_message(f"warning: {finding.sentence} {finding.cause} {finding.advice}")

    def _find_exception(self, job: JobHosts, states: HostStates) -> Finding | None:
        """Return the finding for a rank that has raised: at once if others wait; else they may raise the same."""
        finding, waits = find_exception(job, states)
        if finding is None:
            return None
        self._raised_since = self._raised_since or time.monotonic()
        return finding if waits or time.monotonic() - self._raised_since >= SIMULTANEOUS_S else None

    def _job_hosts(self) -> JobHosts:
        groups = {monitor.key: monitor.ranks for monitor in self._monitors if monitor.remote_ranks}
        return JobHosts(self._job.hosts, groups)

    def _lost_hosts(self) -> dict[int, tuple[str, str]]:
        """Return the hosts whose ranks do not respond, of those that this rank polls; see `LostHosts`."""
        found = {}
        for host, ranks in enumerate(self._job.hosts):
            state = None if host == self._host else self._liveness(host, ranks)
            if state is not None:
                found[host] = state
        return found

    def _liveness(self, host: int, ranks: Sequence[int]) -> tuple[str, str] | None:
        heartbeat, limit_s = self._heartbeat, self._state.limits.heartbeat_s
        lives = {rank: "unknown" if heartbeat is None else heartbeat.state(rank) for rank in ranks}
        if "lost" in lives.values():
            return "lost", f"its host has not responded for {limit_s:g} s"
        if "alive" in lives.values():
            return None  # a host that publishes nothing is only busy
        if all(life in ("ended", "left") for life in lives.values()) and "ended" in lives.values():
            return "died", "its process is gone"
        silent_s = self._exchange.silent_s(host) if self._exchange is not None else 0.0
        return ("lost", f"for {silent_s:.1f} s") if silent_s > limit_s else None

    def _check_first_host(self, lost: tuple[str, str] | None, own: HostState) -> Finding | None:
        rows = self._states[0].ranks.values() if 0 in self._states else ()
        if rows and all(row.state in ("ended", "raised", "died") for row in rows):
            # the first host compares the states no more
            job, states = self._job_hosts(), {0: self._states[0], self._host: own}
            return find_fault(job, states, {}, self._may_be_uneven()) or self._find_exception(job, states)
        if lost is None or not self._has_long_wait():
            return None
        first = self._job.hosts[0]
        text = f"Rank {first[0]}, or its host, is unreachable while other ranks wait: {lost[1]}."
        return Finding("lost", text, tuple(first))

    def _check_stragglers(self) -> Finding | None:
        """Warn of stragglers on other hosts; return the finding if they have exceeded the limit."""
        limits = self._state.limits
        for wait in find_waits(self._job_hosts(), self._states):
            allowed_s = max(limits.stall_s, wait.limit_s)
            who = ranks_in_words(wait.missing).capitalize()
            if self._state.seconds_since_solo(wait.seconds) >= allowed_s:
                text = f"{who} did not reach {wait.call} within {allowed_s:.0f} s."
                return Finding("stall", text, tuple(wait.missing), "", _STALL_ADVICE, wait.key, wait.sequence)
            # ranks of one host warn of each other themselves
            host_of = {rank: i for i, ranks in enumerate(self._job.hosts) for rank in ranks}
            hosts = {host_of[rank] for rank in (*wait.missing, *wait.waiting)}
            known = (wait.key, wait.sequence) in self._warned
            own_work = {rank for state in self._states.values() for rank in state.own_work}
            warning_s = limits.warning_s * (OWN_WORK_FACTOR if own_work.issuperset(wait.missing) else 1.0)
            if wait.seconds > warning_s and len(hosts) > 1 and not known:
                self._warned = {(wait.key, wait.sequence)}
                verb = "has" if len(wait.missing) == 1 else "have"
                text = f"{who.lower()} {verb} not reached {wait.call} for {wait.seconds:.1f} s; other ranks wait."
                activities = {rank: text for state in self._states.values() for rank, text in state.activities.items()}
                for rank in wait.missing[:3]:
                    if rank in activities:
                        text += f"\n  Rank {rank} is in {activities[rank]}"
                self._state.write_message(f"straggler: {text}")
        return None

    def _adopt_report(self, text: str) -> None:
        with suppress(OSError, ValueError):
            reports.write_once(self._state.folder, reports.from_json(text))
        self._state.poll_report()


def _clone_store(store: Any, limit_s: float) -> Any:
    """Return the store with a connection of its own, which does not wait for ever for a lost host."""
    innermost = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    if not isinstance(innermost, TCPStore):  # that of an elastic job waits for nobody who is gone
        return store
    sockets = SocketTracker()
    with sockets.tracking():
        found = store.clone()
    sockets.keep_alive(limit_s)
    return found


def _are_final(states: Mapping[int, HostState]) -> bool:
    return all(state.final for state in states.values())


def _store_lost(error: RuntimeError) -> Finding:
    return Finding(
        "lost",
        "The job's store is unreachable: the host that serves it, or the network to it, is down.",
        (),
        str(error)[:200],
    )
