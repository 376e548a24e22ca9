"""The monitor thread, which looks ten times a second for reports, dead ranks, deadlocks and stragglers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import ranks_in_words
from ..flight_recorder import RawRecord, RecordLog
from ..flight_recorder.layout import StateWords
from .channels import explained, is_message_sent, is_receive_posted, is_recv
from .cross_host import CrossHost
from .deadlock import LocalCycles
from .diagnosis import (
    OWN_WORK_FACTOR,
    ObservationClock,
    describe_call,
    diagnose_missing,
    find_exception,
)
from .error_delivery import ErrorDelivery, collect_stacks, deliver_error
from .group_monitor import GroupMonitor
from .mismatch import Finding
from .shared_state import PendingCall, WatchdogState

__all__ = ["MonitorThread"]

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
        log: gets all records, if they are kept.
    """

    def __init__(
        self,
        state: WatchdogState,
        monitors: Sequence[GroupMonitor],
        cross_host: CrossHost,
        delivery: ErrorDelivery,
        log: RecordLog | None = None,
    ) -> None:
        self._state, self._monitors, self._cross_host = state, monitors, cross_host
        self._delivery, self._log = delivery, log
        self._stop = threading.Event()
        self._cycles = LocalCycles(state.rank, state.readers)
        self._clock = ObservationClock()
        self._failures: dict[str, int] = {}  # of each check, consecutive
        self._reported: set[str] = set()  # checks whose failures were reported
        self._warned: dict[tuple[int, int], float] = {}  # length of the wait for a collective at the last warning
        self._thread = threading.Thread(target=self._run, name="lockstep watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)  # the interpreter must not exit while the thread is in a call of the store
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
        """Return what `check` returns; None if it fails, which is reported once and ends neither thread nor checks."""
        name = getattr(check, "__qualname__", str(check))
        try:
            found = check(*args)
        except Exception as error:
            # the memory of a rank that is exiting may be gone, which is reported only if it persists
            self._failures[name] = self._failures.get(name, 0) + 1
            transient = isinstance(error, OSError | ValueError | KeyError) and self._failures[name] < _TRANSIENT
            if not transient and name not in self._reported and not self._stop.is_set():
                self._reported.add(name)
                with suppress(Exception):
                    rank, text = self._state.rank, f"{type(error).__name__}: {error}"
                    self._state.write_message(f"rank {rank}: {name} of the watchdog failed and is retried: {text}")
            return None
        self._failures.pop(name, None)
        return found

    def _deliver_error(self) -> bool:
        deliver_error(self._state, self._delivery, self._stop)
        return True

    def _check_all(self) -> None:
        state = self._state
        self._try(self._reap_completed)
        self._try(self._write_log)
        self._try(state.update_last_solo)
        self._try(self._cross_host.tick, self._clock.tick())
        finding = self._try(self._find_exception)
        if finding is None and self._try(self._is_program_running):
            found = (self._try(self._check_collective, monitor) for monitor in list(self._monitors))
            finding = next((each for each in found if each is not None), None) or self._try(self._check_messages)
            if finding is None and not state.limits.debugging:
                finding = self._try(self._cycles.find)
        if finding is not None:
            self._try(state.fail, finding)

    # --- checks

    def _reap_completed(self) -> None:
        for monitor in list(self._monitors):
            monitor.reap_completed()

    def _write_log(self) -> None:
        if self._log is not None:
            try:
                self._log.flush()
            except OSError as error:
                self._state.write_message(f"rank {self._state.rank} stops recording its timeline: {error}")
                self._log = None

    def _find_exception(self) -> Finding | None:
        return find_exception(self._state, self._is_waiting())

    def _is_waiting(self) -> bool:
        """Return whether this rank waits for a missing rank; one that is present, and then raises, delays nobody."""
        raw = self._state.current_wait()
        if raw is not None and raw.peer >= 0:
            return True
        firsts = [(monitor, monitor.first_pending()) for monitor in list(self._monitors)]
        return any(first is not None and bool(monitor.missing_ranks(first.sequence)) for monitor, first in firsts)

    def _is_program_running(self) -> bool:
        return self._state.recorder.phase not in ("raised", "ended", "left")

    def _check_collective(self, monitor: GroupMonitor) -> Finding | None:
        """Check this rank's first pending collective of a group."""
        first = monitor.first_pending()
        if first is None:
            return None
        self._compare(monitor, first)
        missing = monitor.missing_ranks(first.sequence)
        if not missing:
            return None
        finding = diagnose_missing(self._state, monitor, first, missing, self._clock)
        return finding or self._check_stragglers(first, missing, monitor.ranks, monitor.key)

    def _compare(self, monitor: GroupMonitor, pending: PendingCall) -> None:
        """Find the difference that two ranks have both missed because they called at the same moment."""
        own = self._state.own.raw(pending.number)
        for peer in monitor.peers:
            if own is not None:
                monitor.compare_with(peer, own, raises=False)

    def _check_messages(self) -> Finding | None:
        """Check the message for which this rank waits."""
        state = self._state
        raw = state.current_wait()
        if raw is None or raw.peer < 0:
            raw = self._pending_receive()
        if raw is None or raw.peer == state.rank:
            return None
        peer, receives = state.peers.get(raw.peer), is_recv(state.own, raw)
        if receives and peer is not None and is_message_sent(state.own, peer, raw):
            return None  # the message arrives, whatever has become of its sender
        pending = PendingCall.of(raw)
        monitor = next((each for each in self._monitors if each.key == raw.key), None)
        if monitor is None:
            return None
        if monitor.moved is not None:
            state.recorder.set_word(StateWords().moved, monitor.moved())
        finding = diagnose_missing(state, monitor, pending, [raw.peer], self._clock)
        if finding is not None and peer is not None:
            return explained(finding, state.own, peer, raw)
        if not receives and peer is not None and peer.knows_channels and is_receive_posted(state.own, peer, raw):
            return finding  # data moves
        return finding or self._check_stragglers(pending, [raw.peer], (state.rank, raw.peer), raw.key)

    def _pending_receive(self) -> RawRecord | None:
        """Return the first receive for which a stream waits, if any."""
        pending = (each for monitor in list(self._monitors) for each in list(monitor.pending_receives)[:1])
        return next((self._state.own.raw(each.number) for each in pending), None)

    # --- stragglers

    def _check_stragglers(
        self, pending: PendingCall, missing: list[int], ranks: tuple[int, ...], key: int
    ) -> Finding | None:
        state, limits = self._state, self._state.limits
        waited = self._clock.observed_s((key, pending.number))
        stalled = 0.0 if self._is_any_stopped(missing) else self._clock.observed_s(("stalled", key, pending.number))
        if limits.debugging or waited < limits.warning_s:
            return None
        busy = [rank for rank in missing if rank not in state.peers or state.peers[rank].phase != "waits"]
        culprits = busy or missing
        where = describe_call(state, pending.number)
        allowed_s = max(limits.stall_s, self._group_limit_s(key))
        if state.seconds_since_solo(stalled) >= allowed_s:
            return Finding(
                "stall",
                f"{ranks_in_words(culprits).capitalize()} did not reach {where} within {allowed_s:.0f} s.",
                tuple(culprits),
                f"{'It is' if len(culprits) == 1 else 'They are'} slow or in an endless loop, as the stack shows, "
                "or only some ranks call this collective.",
                "Speed up the slow part, or let all ranks do it, and call every collective on every rank of its group. "
                "--stall-timeout (LOCKSTEP_STALL_TIMEOUT) sets this limit.",
                key,
                pending.sequence,
            )
        last = self._warned.get((key, pending.number), 0.0)
        waiting = set(ranks) - set(missing)
        if all(rank in state.peers and state.peers[rank].activity_is_own for rank in culprits):
            last = max(last, limits.warning_s * OWN_WORK_FACTOR / _REPEAT_FACTOR)
        if state.rank == min(waiting, default=state.rank) and waited > last * _REPEAT_FACTOR:
            self._warned = {(key, pending.number): waited}
            self._warn(where, culprits, sorted(waiting), waited, allowed_s)
        return None

    def _is_any_stopped(self, ranks: list[int]) -> bool:
        """Return whether, in an elastic job, one of `ranks` is stopped; its launcher sees to that."""
        state = self._state
        return state.limits.expects_losses and any(state.health.is_stopped(rank) for rank in ranks)

    def _group_limit_s(self, key: int) -> float:
        """Return the timeout that the user has set for the group `key`; 0 for none."""
        return next((monitor.limit_s for monitor in self._monitors if monitor.key == key), 0.0)

    def _warn(self, where: str, missing: list[int], waiting: list[int], waited: float, allowed_s: float) -> None:
        state = self._state
        readers = [state.peers[rank] for rank in missing if rank in state.peers]
        stacks = collect_stacks(state.folder, readers)
        verb = "has" if len(missing) == 1 else "have"
        who = f"{ranks_in_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        text = f"{ranks_in_words(missing)} {verb} not reached {where} for {waited:.1f} s; {who}."
        if state.seconds_since_solo(waited) >= _TICK_S and not self._is_any_stopped(missing):
            text += f" This becomes an error after {allowed_s:.0f} s."
        for reader in readers[:3]:
            places = [f"in {reader.activity}"] if reader.activity else []
            if stack := stacks.get(reader.rank):
                places.append(f"at {' < '.join(stack[:3])}")
            if places:  # on a line of its own: a source line ends with no full stop
                text += f"\n  Rank {reader.rank} is {', '.join(places)}"
        state.write_message(f"straggler: {text}")
