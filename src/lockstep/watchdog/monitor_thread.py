"""The monitor thread: looks again and again whether this rank's collectives and messages will end,
reports what will not, and warns of what takes long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import ranks_in_words
from ..flight_recorder import RawRecord, RecordLog
from ..flight_recorder.layout import StateWords
from .cross_host import CrossHost
from .deadlock import CycleSearch, deadlock_finding, explained, find_other_tag
from .delivery import ErrorDelivery, collect_stacks, deliver_error
from .diagnosis import (
    FROZEN_S,
    OWN_WORK_FACTOR,
    ObservationClock,
    held_up_warning,
    local_exception,
    stall_finding,
    straggler_warning,
    why_held_up,
)
from .monitor import GroupMonitor
from .report import Finding
from .rounds import Rounds, shown_limit
from .shared_state import PendingCall, WatchdogState
from .states import JobStates, collect_waits, current_wait, describe_record, wait_in

_TICK_S = 0.1
_T = TypeVar("_T")
_TRANSIENT = 50  # consecutive failures of a check that are not reported: five seconds
_REPEAT_FACTOR = 6.0  # a warning is repeated when the wait is this many times as long


class MonitorThread:
    """The monitor thread of this process.

    Args:
        state: of the watchdog.
        monitors: of the groups of this rank; the list may change.
        cross_host: publishes and polls the states of hosts.
        delivery: raises the error in the program's thread.
        rounds: of the groups whose ranks negotiate; they may change.
        log: gets all records, if they are kept.
    """

    def __init__(
        self,
        state: WatchdogState,
        monitors: Sequence[GroupMonitor],
        cross_host: CrossHost,
        delivery: ErrorDelivery,
        rounds: Mapping[GroupMonitor, Rounds],
        log: RecordLog | None = None,
    ) -> None:
        self._state = state
        self._monitors = monitors
        self._cross_host = cross_host
        self._delivery = delivery
        self._rounds = rounds
        self._log = log
        self._stop = threading.Event()
        self._cycles = CycleSearch()
        self._clock = ObservationClock()
        self._failures: dict[str, int] = {}  # of each check, consecutive
        self._reported: set[str] = set()  # checks whose failures were reported
        # length of the wait for a collective at the last warning
        self._warned: dict[tuple[int, int], float] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            # the interpreter must not exit while the thread is in a call of the store
            self._thread.join(2.0)
        if self._log is not None:
            with suppress(OSError):  # the disk is full
                self._log.close()

    def _run(self) -> None:
        state = self._state
        while not self._stop.wait(_TICK_S) and os.getpid() == state.recorder.pid:
            self._try(state.health.poll)
            self._try(state.recorder.record_heartbeat)
            if not self._try(state.poll_report):
                state.last_poll = time.monotonic()
                self._check_all()
            elif self._try(self._deliver_error):
                return

    def _try(self, check: Callable[..., _T], *args: Any) -> _T | None:
        """Return what `check` returns; None if it fails, which is reported once and ends neither
        thread nor checks.
        """
        name = getattr(check, "__qualname__", str(check))
        try:
            answer = check(*args)
        except Exception as error:
            # the memory of a rank that is exiting may be gone, which is reported only if it
            # persists
            self._failures[name] = self._failures.get(name, 0) + 1
            transient = (
                isinstance(error, OSError | ValueError | KeyError)
                and self._failures[name] < _TRANSIENT
            )
            if not transient and name not in self._reported and not self._stop.is_set():
                self._reported.add(name)
                with suppress(Exception):
                    rank = self._state.rank
                    text = f"{type(error).__name__}: {error}"
                    self._state.write_message(
                        f"rank {rank}: {name} of the watchdog failed and is retried: {text}"
                    )
            return None
        self._failures.pop(name, None)
        return answer

    def _deliver_error(self) -> bool:
        deliver_error(self._state, self._delivery, self._stop)
        return True

    def _check_all(self) -> None:
        state = self._state
        self._try(self._reap_completed)
        self._try(self._record_long_rounds)
        self._try(self._write_log)
        self._try(state.update_last_solo)
        self._try(self._cross_host.tick, self._clock.tick())
        finding = self._try(self._find_exception)
        if finding is None and self._try(self._is_program_running):
            for monitor in list(self._monitors):
                finding = finding or self._try(self._check_collective, monitor)
            finding = finding or self._try(self._check_messages)
            if finding is None and not state.limits.debugging:
                finding = self._try(self._find_deadlock)
        if finding is not None:
            self._try(state.fail, finding)

    def _reap_completed(self) -> None:
        for monitor in list(self._monitors):
            monitor.reap_completed()

    def _record_long_rounds(self) -> None:
        for rounds in list(self._rounds.values()):
            rounds.record_long()

    def _write_log(self) -> None:
        if self._log is not None:
            try:
                self._log.flush()
            except OSError as error:
                self._state.write_message(
                    f"rank {self._state.rank} stops recording its timeline: {error}"
                )
                self._log = None

    def _find_exception(self) -> Finding | None:
        return local_exception(self._state, self._is_waiting())

    def _is_waiting(self) -> bool:
        """Return whether this rank waits for a missing rank; one that is present, and then raises,
        delays nobody.
        """
        raw = self._state.current_wait()
        if raw is not None and raw.peer >= 0:
            return True
        firsts = [(monitor, monitor.first_pending()) for monitor in list(self._monitors)]
        return any(
            first is not None and bool(monitor.peers.missing(first.sequence))
            for monitor, first in firsts
        )

    def _is_program_running(self) -> bool:
        return self._state.recorder.phase not in ("raised", "ended", "left")

    def _find_deadlock(self) -> Finding | None:
        """Return the cycle of ranks of this host that this rank is in."""
        state = self._state
        waiting_in = state.current_wait()
        if waiting_in is None or time.monotonic() - waiting_in.entered <= _TICK_S:
            self._cycles.forget()  # most waits are shorter
            return None
        readers = {
            rank: reader
            for rank, reader in state.readers.items()
            if current_wait(reader) is not None
        }
        job = JobStates([tuple(readers)], {0: collect_waits(readers)})
        cycle = self._cycles.find(job, job.waits.keys() & {state.rank}, {})
        if not cycle:
            return None
        calls = {rank: describe_record(readers[rank], job.waits[rank].record) for rank in cycle}
        tags = {rank: find_other_tag(readers[rank], job.waits[rank], readers) for rank in cycle}
        return deadlock_finding(cycle, job.waits, calls, tags)

    def _check_collective(self, monitor: GroupMonitor) -> Finding | None:
        """Check this rank's first pending collective of a group."""
        first = monitor.first_pending()
        if first is None:
            return None
        record = self._state.own_reader.raw(first.number)
        if record is not None:
            monitor.peers.compare_all(record)
        missing = monitor.peers.missing(first.sequence)
        if not missing:
            return self._check_held_up(first, monitor.peers.within(first.sequence), monitor)
        return monitor.diagnose(first, missing, self._clock) or self._check_stragglers(
            first, missing, monitor.ranks, monitor
        )

    def _check_messages(self) -> Finding | None:
        """Check the message for which this rank waits."""
        state = self._state
        raw = state.current_wait()
        if raw is None or raw.peer < 0:
            raw = self._pending_receive()
        if raw is None or raw.peer == state.rank:
            return None
        monitor = next((known for known in self._monitors if known.key == raw.key), None)
        wait = wait_in(state.own_reader, raw)
        peer = state.peers.get(raw.peer)
        is_matched = peer is not None and wait.is_matched_by(state.rank, peer)
        if monitor is None:
            return None
        if is_matched and not wait.is_send:
            # the message arrives, whatever has become of its sender, unless that still sends it
            theirs = None if peer is None else peer.raw(peer.state_word(StateWords().since_record))
            is_sent = peer is None or peer.phase != "waits"
            if is_sent or theirs is None or theirs.peer != state.rank:
                return None
            return self._check_held_up(PendingCall.of(raw), [raw.peer], monitor)
        if monitor.moved is not None:
            state.recorder.set_word(StateWords().moved, monitor.moved())
        pending = PendingCall.of(raw)
        finding = monitor.diagnose(pending, [raw.peer], self._clock)
        if finding is not None:
            return explained(
                finding, state.rank, wait, find_other_tag(state.own_reader, wait, state.peers)
            )
        if peer is not None and peer.knows_channels and is_matched:
            return None  # data moves
        return self._check_stragglers(pending, [raw.peer], (state.rank, raw.peer), monitor)

    def _pending_receive(self) -> RawRecord | None:
        """Return the first receive for which a stream waits, if any."""
        for monitor in list(self._monitors):
            for first in list(monitor.pending_receives)[:1]:
                return self._state.own_reader.raw(first.number)
        return None

    def _check_stragglers(
        self,
        pending: PendingCall,
        missing: list[int],
        ranks: tuple[int, ...],
        monitor: GroupMonitor,
    ) -> Finding | None:
        state = self._state
        limits = monitor.limits
        key = monitor.key
        waited = self._clock.observed_s((key, pending.number))
        stalled = (
            0.0
            if self._is_any_stopped(missing)
            else self._clock.observed_s(("stalled", key, pending.number))
        )
        limit_s = max(limits.stall_s, monitor.limit_s)
        if limits.debugging or waited < min(limits.warning_s, limit_s):
            return None
        busy = [
            rank
            for rank in missing
            if rank not in state.peers or state.peers[rank].phase != "waits"
        ]
        culprits = busy or missing
        where = describe_record(state.own_reader, pending.number)
        if state.seconds_since_solo(stalled) >= limit_s:
            stacks = ", as the stack shows"
            return stall_finding(culprits, where, limit_s, limits.setting, stacks).at(
                key, pending.sequence
            )
        if waited < limits.warning_s:
            return None
        last = self._warned.get((key, pending.number), 0.0)
        waiting = set(ranks) - set(missing)
        if all(rank in state.peers and state.peers[rank].activity_is_own for rank in culprits):
            last = max(last, limits.warning_s * OWN_WORK_FACTOR / _REPEAT_FACTOR)
        if state.rank == min(waiting, default=state.rank) and waited > last * _REPEAT_FACTOR:
            self._warned = {(key, pending.number): waited}
            self._warn(where, culprits, sorted(waiting), waited, shown_limit(limit_s))
        return None

    def _check_held_up(
        self, pending: PendingCall, inside: list[int], monitor: GroupMonitor
    ) -> Finding | None:
        """Check the processes of the ranks that are in the call in which this rank waits: one that
        is stopped is reported, one that does not run for another reason is warned about.

        Nothing is said of a call that takes long while all run: there may be much data.

        Args:
            pending: the call, which all have made.
            inside: the other ranks of this host that are in it.
            monitor: of its group.
        """
        state = self._state
        waited = self._clock.observed_s(("held up", monitor.key, pending.number))
        if state.limits.debugging or waited < FROZEN_S:
            return None
        stopped = [rank for rank in inside if state.health.is_stopped(rank)]
        finding = monitor.diagnose(pending, stopped, self._clock)
        if finding is not None:
            return finding
        reasons = dict[int, str]()
        for rank in inside:
            status = state.health.status(rank)
            reason = why_held_up(state.peers[rank], status)
            condition = ("process state", rank, "" if status is None else status.state)
            if reason and self._clock.observed_s(condition) >= FROZEN_S:
                reasons[rank] = reason
        last = self._warned.get((monitor.key, pending.number), 0.0)
        waiting = sorted({state.rank, *inside} - reasons.keys())
        is_due = waited >= max(state.limits.warning_s, last * _REPEAT_FACTOR)
        if reasons and is_due and state.rank == waiting[0]:
            self._warned = {(monitor.key, pending.number): waited}
            who = f"{ranks_in_words(waiting)} {'has' if len(waiting) == 1 else 'have'}"
            where = describe_record(state.own_reader, pending.number)
            state.write_message(held_up_warning(where, waited, who, reasons))
        return None

    def _is_any_stopped(self, ranks: list[int]) -> bool:
        """Return whether, in an elastic job, one of `ranks` is stopped; its launcher sees to
        that.
        """
        state = self._state
        return state.limits.expects_losses and any(state.health.is_stopped(rank) for rank in ranks)

    def _warn(
        self, where: str, missing: list[int], waiting: list[int], waited: float, limit_s: float
    ) -> None:
        state = self._state
        readers = [state.peers[rank] for rank in missing if rank in state.peers]
        stacks = collect_stacks(state.folder, readers)
        places = {}
        for reader in readers[:3]:
            known = [f"in {reader.activity}"] if reader.activity else []
            if reason := why_held_up(reader, state.health.status(reader.rank)):
                known.append(reason)
            if stack := stacks.get(reader.rank):
                known.append(f"at {' < '.join(stack[:3])}")
            if known:
                places[reader.rank] = ", ".join(known)
        if state.seconds_since_solo(waited) < _TICK_S or self._is_any_stopped(missing):
            limit_s = 0.0  # the wait does not count
        who = f"{ranks_in_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        state.write_message(straggler_warning(missing, where, waited, who, limit_s, places))
