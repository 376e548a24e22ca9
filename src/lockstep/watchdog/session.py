"""The session: the watchdog of this process from its first process group until the last one is
destroyed.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..error_lines import write_error_line
from ..errors import LockstepError, TransportError
from ..flight_recorder import RecordLog, jobs
from ..gloo import SocketTracker, abort_gloo
from . import delivery
from . import report as reports
from .cross_host import CrossHost
from .delivery import ErrorDelivery, StackFile, collect_stacks
from .monitor import GroupMonitor
from .monitor_thread import MonitorThread
from .rendezvous import Rendezvous
from .report import Finding
from .rounds import Rounds
from .shared_state import Limits, WatchdogState
from .states import make_report, rank_status


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
        self._report_path = state.folder / "report.json"
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
                report = self.make_report(finding)
            except Exception:  # a failure to collect the details must not hold the error back
                report = make_report(finding, {}, {}, state.recorder.world_size)
            first = self.cross_host.publish_report(report)
            # no space, or the folder is gone: this rank at least raises the error
            with suppress(OSError):
                reports.write_once(state.folder, first)
            if not self.poll_report():
                self.adopt_report(first)

    def _fail_unless_lost(self, finding: Finding) -> None:
        """Make a report of a finding in an elastic job, unless it is a loss: the membership finds
        losses sooner, and the job goes on after them.
        """
        if finding.kind not in ("lost", "left", "frozen"):
            self.fail(finding)

    def poll_report(self) -> bool:
        """Adopt the report that a rank of this host has made, if there is one; return whether there
        is.
        """
        state = self.state
        if state.error is None and self._report_path.exists():
            try:
                self.adopt_report(reports.read(self._report_path))
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
                self.state.program.has_error = True
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
            if monitor.endable_waits is not None:
                monitor.endable_waits.abort_messages()

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


_EXIT_PAUSE_S = 0.05


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
            self._state.program.record_exception(error, self._state.error is not None)
        self._previous_hook(kind, error, trace)

    def _at_exit(self) -> None:
        state = self._state
        if state is None or self._cross_host is None or self._close is None:
            return
        known = state.error
        if os.getpid() == state.recorder.pid and state.recorder.phase != "raised":
            self._cross_host.compare_at_exit()
        state.program.record_exit()
        self._close()
        if state.error is not known:  # too late to raise it
            write_error_line(f"{type(state.error).__name__}: {state.error}")
            sys.stdout.flush()
            os._exit(1)
        # The program has destroyed no groups. Gloo's threads release the last tensors a moment
        # after a collective has returned, and abort the process if the interpreter is gone by then.
        time.sleep(_EXIT_PAUSE_S)
