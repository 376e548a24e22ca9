"""Cross-host state: one rank of each host publishes how its host's ranks do and polls the states of
other hosts.

Every host publishes the state of its ranks twice a second, and polls two values: the state of the
first host, and the report. Only the first host polls the states of all and compares them. With h
hosts these are 2 h + 2 messages a period at the job's store, whatever the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from .. import messages
from ..errors import ranks_in_words
from ..flight_recorder import Record, decode_batch, describe
from ..flight_recorder.layout import StateWords
from ..flight_recorder.rank_progress import OtherHosts, SlowestRank, SlowRank, write_other_hosts
from ..gloo import SocketTracker
from . import report as reports
from .deadlock import CycleSearch, deadlock_finding
from .diagnosis import (
    FROZEN_S,
    OWN_WORK_FACTOR,
    SIMULTANEOUS_S,
    ObservationClock,
    exception_finding,
    held_up_warning,
    missing_finding,
    stall_finding,
    straggler_warning,
    why_held_up,
)
from .mismatch import compare_records, describe_difference
from .report import Call, Finding, RankStatus, Report
from .report_text import seconds
from .shared_state import WatchdogState
from .states import (
    GroupState,
    HostState,
    JobStates,
    RecordRow,
    Wait,
    collect_state,
    describe_record,
)

if TYPE_CHECKING:
    from .monitor import GroupMonitor

PERIOD_S = 0.5
_PROGRESS_PERIOD_S = 1.0
_REPORT = "report"


class Store(Protocol):
    """The methods of torch's stores that are used."""

    def set(self, key: str, value: str) -> None:
        """Set `key` to `value`."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`, all of which exist."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it has the value `expected`; return the value that it has
        then.
        """


class StateExchange:
    """The part of one host in the exchange of states.

    Args:
        store: of the job.
        host: index of this host.
        hosts: number of hosts.
    """

    def __init__(self, store: Store, host: int, hosts: int) -> None:
        self._store = store
        self._host = host
        self._hosts = hosts
        self._count = 0
        self._polled: dict[
            int, tuple[int, float]
        ] = {}  # the last count of each host, and when it was new
        self._before: dict[int, int] = {}  # the last counts before this host was absent

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
        """Return the report, "" without one, and states: of all hosts on the first one, else of the
        first host.
        """
        hosts = range(self._hosts) if self._host == 0 else (0,)
        report, *values = self._store.multi_get([_REPORT, *(f"state/{host}" for host in hosts)])
        states = {
            host: messages.decode(value, HostState)
            for host, value in zip(hosts, values, strict=True)
        }
        now = time.monotonic()
        for host, state in states.items():
            if host not in self._polled or self._polled[host][0] != state.count:
                self._polled[host] = (state.count, now)
        return report.decode(), states

    def reset_silence(self) -> None:
        """Restart the measurement of silences, as this host has not polled for a while."""
        now = time.monotonic()
        self._before = {host: count for host, (count, _) in self._polled.items()}
        self._polled = {host: (count, now) for host, (count, _) in self._polled.items()}

    def silent_s(self, host: int) -> float:
        """Return the seconds since a host has published a new state."""
        polled = self._polled.get(host)
        return 0.0 if polled is None else time.monotonic() - polled[1]

    def is_outdated(self, host: int) -> bool:
        """Return whether a host has published nothing since this one was absent: the whole job may
        have been stopped, one rank after the other.
        """
        return host in self._before and self._polled[host][0] == self._before[host]

    def publish_report(self, text: str) -> str:
        """Publish a report; return the one that all hosts get, which may be another host's."""
        return self._store.compare_set(_REPORT, "", text).decode()


def find_fault(
    job: JobStates, uneven: bool = False, may_be_stopped: Collection[int] = ()
) -> Finding | None:
    """Return the first thing that is wrong.

    Args:
        job: the states of all hosts.
        uneven: whether ranks have different numbers of batches on purpose.
        may_be_stopped: ranks of which it is no fault that they are stopped.
    """
    for key in job.groups:
        finding = find_divergence(job, uneven, (key,)) or _find_missing(job, key, may_be_stopped)
        if finding is not None:
            return finding
    return None


def find_divergence(
    job: JobStates, uneven: bool = False, keys: Collection[int] | None = None
) -> Finding | None:
    """Return the first collective at which hosts diverge.

    Args:
        job: the states of the hosts.
        uneven: whether ranks have different numbers of batches on purpose.
        keys: of the groups to look at; None for all.
    """
    for key in job.groups if keys is None else keys:
        first: dict[
            int, tuple[GroupState, RecordRow]
        ] = {}  # by sequence number; the others are compared with it
        parts = job.groups.get(key, [])
        for part in parts:
            if part is not parts[0] and part.records == parts[0].records:
                continue  # as all are while all is well
            for record in part.records:
                state, theirs = first.setdefault(record.sequence, (part, record))
                ranks = state.ranks[0], part.ranks[0]
                if record == theirs or job.host_of[ranks[0]] == job.host_of[ranks[1]]:
                    continue  # ranks of one host compare their calls themselves
                kinds = compare_records(theirs, record, uneven)
                kind = next((kind for kind in kinds if kind in ("desync", "batches")), None)
                if kind is not None:
                    calls = _as_record(state, theirs), _as_record(part, record)
                    return describe_difference(kind, ranks, calls).at(key, record.sequence)
    return None


def _as_record(state: GroupState, row: RecordRow) -> Record:
    """Return a record with what is published of it: its texts if it is the last one of its
    group.
    """
    what = "something else"
    call_site = ""
    source = ""
    if state.last == row.sequence:
        what = state.what
        call_site, _, source = state.call_site.partition("\n")
    batch, finished = decode_batch(row.batch)
    return Record(
        0,
        what,
        call_site,
        source,
        state.title,
        row.sequence,
        batch,
        finished,
        0.0,
        None,
        loop=row.loop,
    )


def _find_missing(job: JobStates, key: int, may_be_stopped: Collection[int]) -> Finding | None:
    """Return the finding for a rank that others wait for and that will never call the collective,
    or that is stopped within it.
    """
    stopped = {rank for rank, row in job.rows.items() if row.state == "frozen"}
    excused = stopped & set(may_be_stopped)
    for part in job.groups[key]:
        awaited = [*job.missing(key, part.pending)]
        if not stopped.issuperset(part.ranks):  # of those that wait, one runs
            awaited += stopped.intersection(job.within(key, part.pending))
        for rank in awaited:
            finding = None
            if rank in job.rows and rank not in excused:
                finding = missing_finding(job.rows[rank], part.last_call())
            if finding is not None:
                return finding.at(key, part.pending)
    return None


def find_stragglers(job: JobStates) -> Iterator[tuple[int, GroupState, list[int]]]:
    """Yield groups in which ranks wait for others: key, state of ranks that wait, the ranks that
    are missing.
    """
    for key, parts in job.groups.items():
        for part in parts:
            missing = job.missing(key, part.pending)
            if missing:
                yield key, part, missing


def find_held_up(
    job: JobStates, reasons: Mapping[int, str]
) -> Iterator[tuple[int, GroupState, list[int]]]:
    """Yield groups in which ranks wait in a collective that all have called, and some do not run:
    key, state of ranks that wait, the ranks that do not run.

    Args:
        job: the states of all hosts.
        reasons: why ranks do not run.
    """
    for key, parts in job.groups.items():
        for part in parts:
            within = job.within(key, part.pending)
            held_up = [rank for rank in within if rank in reasons]
            runs = not reasons.keys() >= set(part.ranks)
            if held_up and runs and not job.missing(key, part.pending):
                yield key, part, held_up


def find_deadlock(cycles: CycleSearch, job: JobStates, counts: Mapping[int, int]) -> Finding | None:
    """Return the cycle of waits that has existed for a while, if any; see `CycleSearch.find`."""
    cycle = cycles.find(job, sorted(job.waits), counts)
    if not cycle:
        return None
    calls = {rank: job.rows[rank].call or Call("a collective", "an unknown line") for rank in cycle}
    texts = {
        rank: f"{describe(call.name, call.batch, call.what)} at {call.call_site}"
        for rank, call in calls.items()
    }
    return deadlock_finding(
        cycle, job.waits, texts, {rank: _other_tag(job.waits, rank) for rank in cycle}
    )


def _other_tag(waits: Mapping[int, Wait], rank: int) -> int | None:
    """Return the tag of the message in which the other rank waits, if it fits that of `rank` but
    for its tag.
    """
    wait = waits[rank]
    other = waits.get(waits[rank].peer)
    if (
        other is None
        or other.peer != rank
        or other.is_send == wait.is_send
        or other.tag == wait.tag
    ):
        return None
    return other.tag


_STORE_TIMEOUT = timedelta(seconds=5)
_WAIT_S = (
    3.0  # ranks that have waited for so long may report that the store or the first host is lost
)
_EXIT_TIMEOUT_S = 1.0  # in which the other hosts may also reach the end of the program
_ABSENT_S = 1.0  # a monitor thread that has not run for so long has missed what others published


class CrossHost:
    """Publishes this host's state, polls those of other hosts, and finds what is wrong between
    hosts.

    Does nothing if all ranks are on one host.

    Args:
        state: of the watchdog.
        monitors: of the groups of this rank; the list may change.
    """

    def __init__(self, state: WatchdogState, monitors: Sequence[GroupMonitor]) -> None:
        self._state = state
        self._monitors = monitors
        self._job = state.rendezvous
        self._exchange: StateExchange | None = None
        self._states: dict[int, HostState] = {}
        self._next_period = self._failing_since = self._raised_since = 0.0
        # the wait that was warned about last, and whether it was known why a rank does not run
        self._warned: set[tuple[int, int, bool]] = set()
        self._warned_held_up: set[tuple[int, int]] = set()  # the same, of a call that all have made
        self._cycles = CycleSearch()
        self._clock = ObservationClock()  # for how long processes have been in a state
        self._warned_groups: set[int] = set()  # in which ranks are on different batches
        self._slowest = SlowestRank()
        self._slowest_now: SlowRank | None = None
        self._next_progress = 0.0
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
        exchange = self._exchange
        now = time.monotonic()
        if exchange is None:
            return
        # this process was stopped or got no processor: others may have been, too
        if passed_s > _ABSENT_S:
            exchange.reset_silence()
            self._failing_since = 0.0
        if self._heartbeat is not None:
            # before the states are polled: ranks publish how they exit, and then exit
            self._heartbeat.poll()
        if now < self._next_period or not self._represents_host():
            return
        self._next_period = now + PERIOD_S
        own_state = self._own_state()
        try:
            exchange.publish(own_state)
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
            if now >= self._next_progress:
                self._next_progress = now + _PROGRESS_PERIOD_S
                self._note_progress(own_state, now)
            if report:
                with suppress(OSError, ValueError):
                    reports.write_once(self._state.folder, reports.from_json(report))
                self._state.poll_report()
                return
            lost = self._lost_hosts()
            finding = (
                self._check_all_hosts(lost)
                if self._host == 0
                else self._check_first_host(lost.get(0), own_state)
            )
            if finding is not None:
                self._state.fail(finding)

    def compare_at_exit(self) -> None:
        """Compare the last collectives at the end of a program; they may not have been published
        yet.
        """
        exchange = self._exchange
        state = self._state
        if (
            exchange is None
            or state.error is not None
            or state.program.has_failed
            or not self._represents_host()
        ):
            return
        self._is_final = True
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        own_state = self._own_state()
        with suppress(RuntimeError, OSError, ValueError):  # the store is gone, and its host
            exchange.publish(own_state)
            report, states = exchange.poll()
            while (
                not (report or all(host_state.final for host_state in states.values()))
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
                report, states = exchange.poll()
            # no report is adopted: it may be about this very exit, for which others have waited in
            # vain
            job = self._joined({**states, self._host: own_state})
            finding = find_divergence(job, self._may_be_uneven())
            if finding is not None:
                state.fail(finding)

    def rank_statuses(self) -> dict[int, RankStatus]:
        """Return the status of each rank on other hosts, as far as it is known."""
        return self._joined(self._states, self._lost_hosts()).rows

    def publish_report(self, report: Report) -> Report:
        """Publish a report; return the first one that any host has published, which may be another.

        What a host finds after that may only be a consequence: ranks exit, and their peers'
        connections with them.
        """
        if self._exchange is not None:
            # the others find that this host does not respond
            with suppress(RuntimeError, ValueError):
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

    def _represents_host(self) -> bool:
        """Return whether this is the first of its host's ranks that is able to publish."""
        state = self._state
        for rank in self._job.hosts[self._host]:
            if rank == state.rank:
                return True
            peer = state.peers.get(rank)
            able = (
                peer is not None
                and peer.phase not in ("ended", "left")
                and rank not in state.health.gone
            )
            # a rank that holds the interpreter for long cannot publish; that two ranks do is
            # harmless
            silent_s = (
                time.monotonic() - peer.floats[StateWords().heartbeat] if peer is not None else 0.0
            )
            if able and silent_s < _ABSENT_S and not state.health.is_stopped(rank):
                return False
        return False

    def _own_state(self) -> HostState:
        state = self._state
        self._clock.tick()
        stopped = []
        held_up = {}
        for rank, reader in state.peers.items():
            status = state.health.status(rank)
            reason = why_held_up(reader, status)
            condition = (rank, "" if status is None else status.state)
            if reason and self._clock.observed_s(condition) >= FROZEN_S:
                held_up[rank] = reason
                if status is not None and status.state == "T":
                    stopped.append(rank)
        local = {monitor.key for monitor in self._monitors if not monitor.remote_ranks}
        own_state = collect_state(state.readers, state.health.gone, stopped, local)
        if self._host == 0:  # the other hosts poll this one only
            own_state.solo = own_state.solo or any(other.solo for other in self._states.values())
            own_state.slowest = self._slowest_now
        own_state.final = self._is_final
        own_state.held_up = held_up
        return own_state

    def _note_progress(self, own_state: HostState, now: float) -> None:
        """Write how far the ranks of other hosts are, for the launcher and `lockstep top`."""
        others = [state for host, state in self._states.items() if host != self._host]
        ranks = [progress for state in others for progress in state.progress]
        if self._host == 0:
            self._slowest_now = self._slowest.find([*own_state.progress, *ranks], now)
            first = own_state
        else:
            first = self._states[0]
            self._slowest_now = first.slowest
        name = first.progress[0].host if first.progress else ""
        other_hosts = OtherHosts(time.time(), ranks, name, self._slowest_now)
        with suppress(OSError):  # the disk is full, or the job has just ended
            write_other_hosts(self._state.folder, other_hosts)

    def _has_long_wait(self) -> bool:
        """Return whether ranks of this host have long waited for others; if not, nobody need be
        there any more.
        """
        state = self._state
        before = time.monotonic() - _WAIT_S
        firsts = {
            monitor.key: monitor.first_pending()
            for monitor in self._monitors
            if monitor.remote_ranks
        }
        if any(first is not None and first.entered < before for first in firsts.values()):
            return True
        waiting = [reader for reader in state.peers.values() if reader.phase == "waits"]
        raws = [reader.raw(reader.state_word(StateWords().since_record)) for reader in waiting]
        return any(raw is not None and raw.key in firsts and raw.entered < before for raw in raws)

    def _joined(
        self, states: Mapping[int, HostState], lost: Mapping[int, tuple[str, str]] | None = None
    ) -> JobStates:
        groups = {monitor.key: monitor.ranks for monitor in self._monitors if monitor.remote_ranks}
        return JobStates(self._job.hosts, states, groups, lost)

    def _check_all_hosts(self, lost: Mapping[int, tuple[str, str]]) -> Finding | None:
        """Return what is wrong between hosts, on the first one."""
        job = self._joined(self._states, lost)
        finding = find_fault(
            job, self._may_be_uneven(), self._may_be_stopped()
        ) or self._find_exception(job)
        self._warn_of_batches(job)
        if finding is not None or self._state.limits.debugging:
            return finding
        counts = {host: state.count for host, state in self._states.items()}
        return find_deadlock(self._cycles, job, counts) or self._check_stragglers(job)

    def _check_first_host(
        self, lost: tuple[str, str] | None, own_state: HostState
    ) -> Finding | None:
        """Return what is wrong with the first host, on another one."""
        job = self._joined({**self._states, self._host: own_state})
        first = self._job.hosts[0]
        rows = [job.rows[rank] for rank in first if rank in job.rows]
        if rows and all(row.state in ("ended", "raised", "died") for row in rows):
            # the first host compares the states no more
            return find_fault(job, self._may_be_uneven()) or self._find_exception(job)
        if not self._has_long_wait():
            return None
        if lost is None:
            self._warn_of_first_host(job)
            return None
        text = f"Rank {first[0]}, or its host, is unreachable while other ranks wait: {lost[1]}."
        return Finding("lost", text, tuple(first))

    def _warn_of_first_host(self, job: JobStates) -> None:
        """Warn, on the second host, that the first one is silent while ranks of this host wait."""
        state = self._state
        if self._host != 1 or state.limits.debugging:
            return
        reasons = self._why_held_up(job, range(1))
        firsts = (monitor.first_pending() for monitor in self._monitors if monitor.remote_ranks)
        first = next((pending for pending in firsts if pending is not None), None)
        if reasons and first is not None and (0, first.number) not in self._warned_held_up:
            self._warned_held_up = {(0, first.number)}
            where = describe_record(state.own_reader, first.number)
            waited = time.monotonic() - first.entered
            who = f"{ranks_in_words([state.rank])} has"
            state.write_message(held_up_warning(where, waited, who, reasons))

    def _why_held_up(self, job: JobStates, hosts: Iterable[int]) -> dict[int, str]:
        """Return why ranks of these hosts do not run: as the hosts publish, or because a host
        publishes nothing.
        """
        exchange = self._exchange
        reasons = dict[int, str]()
        for host in hosts:
            if host in self._states:
                reasons.update(self._states[host].held_up)
            silent_s = 0.0
            if exchange is not None and host != self._host:
                silent_s = exchange.silent_s(host)
            if silent_s < self._state.limits.warning_s:
                continue
            for rank in self._job.hosts[host]:
                row = job.rows.get(rank)
                if row is None or row.state not in ("ended", "raised", "died"):
                    # a host of which no rank waits has not said its name
                    name = host if row is None else row.host
                    reasons[rank] = (
                        f"silent: its host {name} has published nothing for "
                        f"{seconds(silent_s)}; its processes may be stopped"
                    )
        return reasons

    def _may_be_stopped(self) -> set[int]:
        """Return the ranks of which it is no fault that they are stopped: what was published before
        this host was absent says nothing, as the whole job may have been stopped.
        """
        limits = self._state.limits
        is_excused = limits.debugging or limits.expects_losses
        exchange = self._exchange
        return {
            rank
            for host, ranks in enumerate(self._job.hosts)
            for rank in ranks
            if is_excused or (exchange is not None and exchange.is_outdated(host))
        }

    def _may_be_uneven(self) -> bool:
        """Return whether different batches are no error."""
        return bool(self._state.uneven_batches) or not self._state.limits.strict

    def _warn_of_batches(self, job: JobStates) -> None:
        """Warn once for each group that ranks are on different batches, unless its pre-flight check
        does.
        """
        state = self._state
        if state.uneven_batches or state.limits.strict:
            return
        unchecked = {
            monitor.key
            for monitor in self._monitors
            if monitor.remote_ranks and monitor.preflight is None
        }
        finding = find_divergence(job, keys=unchecked - self._warned_groups)
        if finding is not None and finding.kind == "batches":
            self._warned_groups.add(finding.key)
            state.write_message(finding.as_warning())

    def _find_exception(self, job: JobStates) -> Finding | None:
        """Return the finding for a rank that has raised: at once if others wait; else they may
        raise the same.
        """
        finding = exception_finding(job.rows.values())
        if finding is None:
            return None
        self._raised_since = self._raised_since or time.monotonic()
        is_waited_for = any(True for _ in find_stragglers(job))
        return (
            finding
            if is_waited_for or time.monotonic() - self._raised_since >= SIMULTANEOUS_S
            else None
        )

    def _lost_hosts(self) -> dict[int, tuple[str, str]]:
        """Return the hosts whose ranks do not respond, of those that this rank polls; see
        `JobStates`.
        """
        lost = {}
        for host, ranks in enumerate(self._job.hosts):
            state = None if host == self._host else self._liveness(host, ranks)
            if state is not None:
                lost[host] = state
        return lost

    def _liveness(self, host: int, ranks: Sequence[int]) -> tuple[str, str] | None:
        heartbeat = self._heartbeat
        limit_s = self._state.limits.heartbeat_s
        lives = {rank: "unknown" if heartbeat is None else heartbeat.state(rank) for rank in ranks}
        if "lost" in lives.values():
            return "lost", f"its host has not responded for {limit_s:g} s"
        if "alive" in lives.values():
            return None  # a host that publishes nothing is only busy
        if all(life in ("ended", "left") for life in lives.values()) and "ended" in lives.values():
            return "died", "its process is gone"
        silent_s = self._exchange.silent_s(host) if self._exchange is not None else 0.0
        return ("lost", f"for {silent_s:.1f} s") if silent_s > limit_s else None

    def _check_stragglers(self, job: JobStates) -> Finding | None:
        """Warn of stragglers on other hosts; return the finding if they have exceeded the limit."""
        limits_of_groups = {monitor.key: monitor.limits for monitor in self._monitors}
        states = self._states.values()
        activities = {rank: text for state in states for rank, text in state.activities.items()}
        own_work = {rank for state in states for rank in state.own_work}
        held_up = self._why_held_up(job, range(len(self._job.hosts)))
        for key, waiting, missing in find_stragglers(job):
            call = waiting.last_call()
            seconds = waiting.seconds
            limits = limits_of_groups.get(key, self._state.limits)
            limit_s = max(limits.stall_s, waiting.limit_s)
            if self._state.seconds_since_solo(seconds) >= limit_s:
                return stall_finding(missing, call, limit_s, limits.setting).at(
                    key, waiting.pending
                )
            # ranks of one host warn of each other themselves
            hosts = {job.host_of[rank] for rank in (*missing, *waiting.ranks)}
            warning = key, waiting.pending, not held_up.keys().isdisjoint(missing)
            warning_s = limits.warning_s * (
                OWN_WORK_FACTOR if own_work.issuperset(missing) else 1.0
            )
            if seconds > warning_s and len(hosts) > 1 and warning not in self._warned:
                self._warned = {warning}
                places = {}
                for rank in missing[:3]:
                    known = [f"in {activities[rank]}"] if rank in activities else []
                    known += [held_up[rank]] if rank in held_up else []
                    if known:
                        places[rank] = ", ".join(known)
                text = straggler_warning(missing, call, seconds, "other ranks wait", 0.0, places)
                self._state.write_message(text)
        self._warn_of_held_up(job, held_up)
        return None

    def _warn_of_held_up(self, job: JobStates, reasons: Mapping[int, str]) -> None:
        """Warn of ranks on other hosts that do not run, in a collective that all have called."""
        for key, waiting, held_up in find_held_up(job, reasons):
            hosts = {job.host_of[rank] for rank in (*held_up, *waiting.ranks)}
            warning = key, waiting.pending
            is_due = waiting.seconds > self._state.limits.warning_s
            # ranks of one host warn of each other themselves
            if is_due and len(hosts) > 1 and warning not in self._warned_held_up:
                self._warned_held_up = {warning}
                others = sorted(set(waiting.ranks) - reasons.keys())
                who = f"{ranks_in_words(others)} {'has' if len(others) == 1 else 'have'}"
                shown = {rank: reasons[rank] for rank in held_up[:3]}
                call = waiting.last_call()
                text = held_up_warning(call, waiting.seconds, who, shown)
                self._state.write_message(text)


def _clone_store(store: Any, limit_s: float) -> Any:
    """Return the store with a connection of its own, which does not wait for ever for a lost
    host.
    """
    innermost = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    if not isinstance(innermost, TCPStore):  # that of an elastic job waits for nobody who is gone
        return store
    sockets = SocketTracker()
    with sockets.tracking():
        clone = store.clone()
    sockets.keep_alive(limit_s)
    return clone


def _store_lost(error: RuntimeError) -> Finding:
    return Finding(
        "lost",
        "The job's store is unreachable: the host that serves it, or the network to it, is down.",
        (),
        str(error)[:200],
    )
