"""The session: the watchdog of this process from its first process group until the last one is
destroyed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from ..errors import InterruptedRunError, LockstepError, TransportError, ranks_in_words
from ..flight_recorder import RawRecord, RecorderReader, RecordLog, jobs
from ..flight_recorder.layout import StateWords
from ..gloo import SocketTracker, abort_gloo
from . import delivery
from . import report as reports
from .cross_host import CrossHost
from .deadlock import CycleSearch, deadlock_finding, explained, find_other_tag
from .delivery import ErrorDelivery, StackFile, collect_stacks, deliver_error
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
from .rendezvous import Rendezvous
from .report import Finding
from .rounds import Rounds, shown_limit
from .shared_state import Limits, PendingCall, WatchdogState
from .states import (
    JobStates,
    collect_waits,
    current_wait,
    describe_record,
    make_report,
    rank_status,
    wait_in,
)


class Session:
    """Makes the parts of the watchdog, and makes, adopts and distributes the report.

    Args:
        rendezvous: what this rank knows of the others.
        limits: time limits and modes.
        sockets: of the process groups.

    Attributes:
        state: what the parts share.
        monitors: of the groups of this rank that are watched.
        groups: the process groups whose waits end when something goes wrong, with their monitors.
        rounds: of the groups whose ranks negotiate, with their monitors.
        is_interrupted: whether the membership of an elastic job has ended the waits.
    """

    def __init__(self, rendezvous: Rendezvous, limits: Limits, sockets: SocketTracker) -> None:
        self.state = state = WatchdogState(rendezvous, limits)
        state.fail = self._fail_unless_lost if limits.expects_losses else self.fail
        state.poll_report = self.poll_report
        state.raise_root_cause = self.raise_root_cause
        self.monitors: list[GroupMonitor] = []
        self.groups: dict[Any, GroupMonitor] = {}
        self.rounds: dict[GroupMonitor, Rounds] = {}
        self.cross_host = CrossHost(state, self.monitors)
        self._stacks = StackFile(state.folder, state.recorder)
        self._sockets = sockets
        self._groups_made: dict[tuple[str, tuple[int, ...]], int] = {}
        self.is_interrupted = False

    def start(self, close: Callable[[], None], log: RecordLog | None) -> None:
        """Start monitoring.

        Args:
            close: closes the session; called when the interpreter exits.
            log: gets all records, if they are kept.
        """
        self._delivery = ErrorDelivery(self.state)
        self.state.keeps_log = log is not None
        self._exit_hooks = ExitHooks(self.state, self.cross_host, close)
        self._thread = MonitorThread(
            self.state, self.monitors, self.cross_host, self._delivery, self.rounds, log
        )

    def close(self) -> None:
        """Stop monitoring and remove this rank's files."""
        state = self.state
        self._thread.stop()
        self._exit_hooks.close()
        self._delivery.close()
        self.cross_host.close()
        self._stacks.close()
        state.health.close()
        for group in list(self.groups):
            group.watchdog_monitor = None
        self.groups.clear()
        for reader in state.readers.values():
            reader.close()
        state.recorder.close()
        state.rendezvous.lock.close()
        if state.rendezvous.owns_folder:
            self._remove_files()
        # Nothing more is found out. With the session's own methods the state and the session would
        # form a cycle, and stay with all that they hold until Python looks for such cycles: in an
        # elastic job some hundred changes of workers later.
        state.fail = state.raise_root_cause = _do_nothing
        state.poll_report = _has_ended

    def _remove_files(self) -> None:
        """Remove this rank's files, and the folder with the last of them."""
        folder = self.state.folder
        rank = self.state.rank
        with suppress(OSError):  # another rank has removed the folder
            for name in (f"rank-{rank}", f"stack-{rank}"):
                (folder / name).unlink(missing_ok=True)
            if not any(folder.glob("rank-*")):
                jobs.remove(folder.parent)

    def add_group(
        self, name: str, title: str, ranks: tuple[int, ...], limit_s: float = 0.0
    ) -> GroupMonitor:
        """Start monitoring a group; for the arguments see `GroupMonitor`."""
        uses = self._groups_made[name, ranks] = self._groups_made.get((name, ranks), 0) + 1
        monitor = GroupMonitor(self.state, name, title, ranks, uses, limit_s)
        with self.state.lock:
            self.monitors.append(monitor)
        return monitor

    def remove_group(self, group: Any) -> None:
        """Forget a group that is about to be destroyed."""
        self.exclude_group(group)
        self.groups.pop(group, None)

    def exclude_group(self, group: Any) -> None:
        """Stop monitoring a group; its waits still end when something goes wrong."""
        monitor = self.groups.get(group)
        if monitor is not None and monitor in self.monitors:
            group.watchdog_monitor = None
            self.remove_monitor(monitor)

    def watch_rounds(
        self,
        group: Any,
        purpose: Callable[[], str],
        warning_s: float,
        stall_s: float,
        setting: str,
    ) -> Rounds | None:
        """Monitor the rounds of a group in place of its collectives; for the arguments see
        `Rounds`. None if the group is not monitored.
        """
        monitor = self.groups.get(group)
        if monitor is None or monitor not in self.monitors:
            return None
        group.watchdog_monitor = None
        rounds = Rounds(monitor, purpose, warning_s, stall_s, setting)
        self.rounds[monitor] = rounds
        return rounds

    def remove_monitor(self, monitor: GroupMonitor) -> None:
        """Stop monitoring what `monitor` monitors."""
        rounds = self.rounds.pop(monitor, None)
        if rounds is not None:
            rounds.close()
        monitor.close()
        with self.state.lock:
            self.monitors.remove(monitor)

    def mark_groups_destroyed(self) -> None:
        """Record that this rank destroys all its groups, so that ranks that wait for it know that
        it has not died.
        """
        if self.state.recorder.phase not in ("raised", "ended"):
            self.state.recorder.set_phase("left")

    def fail(self, finding: Finding) -> None:
        """Make a report of a finding, unless there is one, and adopt it."""
        state = self.state
        if state.error is None and not self.poll_report():
            try:
                made = self.make_report(finding)
            except Exception:  # a failure to collect the details must not hold the error back
                made = make_report(finding, {}, {}, state.recorder.world_size)
            first = self.cross_host.publish_report(made)
            # no space, or the folder is gone: this rank at least raises the error
            with suppress(OSError):
                reports.write_once(state.folder, first)
            if not self.poll_report():
                self.adopt_report(first)

    def _fail_unless_lost(self, finding: Finding) -> None:
        """As `fail` in an elastic job, whose membership finds losses sooner, and which goes on
        after them.
        """
        if finding.kind not in ("lost", "left", "frozen"):
            self.fail(finding)

    def poll_report(self) -> bool:
        """Adopt the report that a rank of this host has made, if there is one; return whether there
        is.
        """
        state = self.state
        path = state.folder / "report.json"
        if state.error is None and path.exists():
            try:
                self.adopt_report(reports.read(path))
            except LockstepError:  # the folder is gone: the job is over
                return False
        return state.error is not None

    def adopt_report(self, report: reports.Report) -> None:
        """Make every collective of this rank raise this report, and end its waits."""
        with self.state.lock:
            if self.state.error is not None:
                return
            self.state.error = delivery.make_error(report)
        self._end_waits()  # before the store is used, which may take a while
        self.cross_host.publish_report(report)

    def interrupt(self, error: TransportError) -> None:
        """End this rank's waits with `error`, now and from now on; the program is not interrupted
        anywhere else.
        """
        with self.state.lock:
            if self.state.error is None:
                self.state.delivered.set()
                self.state.error = error
        self.is_interrupted = True
        self._end_waits()

    def _end_waits(self) -> None:
        for group in list(self.groups):
            with suppress(Exception):  # it may be destroyed already
                abort_gloo(group)
                group.abort()
        self._sockets.shutdown()
        for monitor in list(self.monitors):
            monitor.abort_messages()

    def make_report(self, finding: Finding) -> reports.Report:
        """Return the report of a finding, with the stacks of the ranks that are not in a
        collective.
        """
        state = self.state
        gone = state.health.poll()
        stopped = {rank for rank in state.peers if state.health.is_stopped(rank)}
        running = [
            reader
            for rank, reader in state.readers.items()
            if rank not in gone and rank not in stopped and reader.phase == "runs"
        ]
        stacks = collect_stacks(state.folder, running)
        rows = self.cross_host.rank_statuses()
        several_hosts = len(state.rendezvous.hosts) > 1
        for rank, reader in state.readers.items():
            stack = stacks.get(rank, ())
            rows[rank] = rank_status(
                reader.state(), several_hosts, rank in gone, rank in stopped, stack
            )
        return make_report(finding, state.readers, rows, state.recorder.world_size)

    def raise_root_cause(self, error: BaseException, ranks: Collection[int] | None = None) -> None:
        """Raise the report instead of `error`, if that is only a symptom of it and the report comes
        within seconds.
        """
        delivery.await_root_cause(self.state, self.monitors, error, ranks)


def _do_nothing(*_: object) -> None:
    """What a closed session does about a failure."""


def _has_ended() -> bool:
    """Whether the report of a closed session is there: nobody has to wait for one."""
    return True


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
        self._warned: dict[
            tuple[int, int], float
        ] = {}  # length of the wait for a collective at the last warning
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
            found = check(*args)
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
        return found

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
            found = (self._try(self._check_collective, monitor) for monitor in list(self._monitors))
            finding = next((each for each in found if each is not None), None) or self._try(
                self._check_messages
            )
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
            first is not None and bool(monitor.missing_ranks(first.sequence))
            for monitor, first in firsts
        )

    def _is_program_running(self) -> bool:
        return self._state.recorder.phase not in ("raised", "ended", "left")

    def _find_deadlock(self) -> Finding | None:
        """Return the cycle of ranks of this host that this rank is in."""
        state = self._state
        readers = dict[int, RecorderReader]()
        own = state.current_wait()
        if own is not None and time.monotonic() - own.entered > _TICK_S:  # most waits are shorter
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
        own = self._state.own.raw(first.number)
        for peer in monitor.peers:
            # two ranks that have called at the same moment have both missed the difference
            if own is not None:
                monitor.compare_with(peer, own, raises=False)
        missing = monitor.missing_ranks(first.sequence)
        if not missing:
            return self._check_held_up(first, monitor.ranks_within(first.sequence), monitor)
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
        monitor = next((each for each in self._monitors if each.key == raw.key), None)
        wait = wait_in(state.own, raw)
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
                finding, state.rank, wait, find_other_tag(state.own, wait, state.peers)
            )
        if peer is not None and peer.knows_channels and is_matched:
            return None  # data moves
        return self._check_stragglers(pending, [raw.peer], (state.rank, raw.peer), monitor)

    def _pending_receive(self) -> RawRecord | None:
        """Return the first receive for which a stream waits, if any."""
        pending = (
            each for monitor in list(self._monitors) for each in list(monitor.pending_receives)[:1]
        )
        return next((self._state.own.raw(each.number) for each in pending), None)

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
        where = describe_record(state.own, pending.number)
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
            where = describe_record(state.own, pending.number)
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


_EXIT_PAUSE_S = 0.05
_REQUESTED = (KeyboardInterrupt, SystemExit, GeneratorExit, InterruptedRunError)


def record_exception(state: WatchdogState, error: BaseException) -> None:
    """Record that this rank ends with `error`."""
    if os.getpid() != state.recorder.pid:
        return  # a forked child; the rank is its parent
    state.is_exiting = True
    state.has_failed = not (isinstance(error, SystemExit) and error.code in (None, 0))
    if state.recorder.phase in ("raised", "left"):
        return
    if isinstance(error, _REQUESTED) or error is state.error or state.error is not None:
        record_exit(state)  # it follows the failure of another rank, or was requested
        return
    frames = error.__traceback__
    while frames is not None and _runs_program(frames):
        frames = frames.tb_next
    state.recorder.write_traceback("".join(traceback.format_exception(type(error), error, frames)))
    state.recorder.set_phase("raised")


def _runs_program(frames: TracebackType) -> bool:
    """Return whether this frame belongs to what runs the program, and not to the program."""
    name = str(frames.tb_frame.f_globals.get("__name__", ""))
    package = __package__.partition(".")[0]
    return name == "runpy" or name.startswith((f"{package}.launcher", f"{package}.ray"))


def record_exit(state: WatchdogState) -> None:
    """Record that this rank ends in good order."""
    if os.getpid() != state.recorder.pid:
        return
    state.is_exiting = True
    if state.recorder.phase not in ("raised", "left"):
        state.recorder.set_phase("ended")


class ExitHooks:
    """Records how this rank ends when the interpreter exits, and closes the session.

    Args:
        state: of the watchdog.
        cross_host: compares the last collectives across hosts.
        close: closes the session.
    """

    def __init__(
        self, state: WatchdogState, cross_host: CrossHost, close: Callable[[], None]
    ) -> None:
        self._state: WatchdogState | None = state
        self._cross_host: CrossHost | None = cross_host
        self._close: Callable[[], None] | None = close
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Remove the hooks."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook
        self._state = self._cross_host = self._close = (
            None  # torch's own hook may keep this one alive
        )

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._state is not None:
            record_exception(self._state, error)
        self._previous_hook(kind, error, trace)

    def _at_exit(self) -> None:
        state = self._state
        if state is None or self._cross_host is None or self._close is None:
            return
        known = state.error
        if os.getpid() == state.recorder.pid and state.recorder.phase != "raised":
            self._cross_host.compare_at_exit()
        record_exit(state)
        self._close()
        if state.error is not known:  # too late to raise it
            sys.stderr.write(f"{type(state.error).__name__}: {state.error}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        # The program has destroyed no groups. Gloo's threads release the last tensors a moment
        # after a collective has returned, and abort the process if the interpreter is gone by then.
        time.sleep(_EXIT_PAUSE_S)
