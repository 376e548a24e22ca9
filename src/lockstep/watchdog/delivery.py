"""Raises the report in the program's thread wherever that is: in Python, in C code, or in a wait
inside Gloo.

It also collects the stacks of other ranks, which become part of the report.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from .. import environment
from ..error_lines import write_error_line
from ..errors import DesyncError, LockstepError, RankLostError, StallError, TransportError
from ..flight_recorder import FlightRecorder, RawRecord, RecorderReader
from ..flight_recorder.layout import StateWords
from .call_sites import main_frame, stack_of
from .deadlock import explained, find_other_tag
from .diagnosis import local_exception, local_finding
from .report import Finding, Report
from .report_text import as_text
from .shared_state import PendingCall, WatchdogState
from .states import describe_record, wait_in

if TYPE_CHECKING:
    from .monitor import GroupMonitor

__all__ = [
    "ErrorDelivery",
    "StackFile",
    "await_root_cause",
    "collect_stacks",
    "deliver_error",
    "find_gone_rank",
    "is_rejection",
    "is_transport_error",
    "make_error",
    "own_stack",
]


_STACK_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 3  # programs use SIGUSR1 and 2 themselves
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LONGEST = 64 << 10


class StackFile:
    """Lets other ranks read this rank's stack: at a signal, faulthandler writes it into a file of
    the job's folder.
    """

    def __init__(self, folder: Path, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._file: IO[str] = _path(folder, recorder.rank).open("w")
        if threading.current_thread() is threading.main_thread():
            # takes effect after `close`: a signal may still arrive
            signal.signal(_STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(_STACK_SIGNAL, file=self._file, all_threads=False, chain=False)
        recorder.set_word(StateWords().stack_signal, _STACK_SIGNAL)

    def close(self) -> None:
        """Stop answering."""
        self._recorder.set_word(StateWords().stack_signal, 0)
        faulthandler.unregister(_STACK_SIGNAL)
        self._file.close()


def own_stack() -> tuple[str, ...]:
    """Return the stack of this process's main thread, innermost frame first."""
    frame = main_frame()
    frames = reversed(traceback.extract_stack(frame)) if frame is not None else ()
    return stack_of([(entry.filename, entry.lineno or 0, entry.name) for entry in frames])


def collect_stacks(
    folder: Path, readers: Collection[RecorderReader], timeout_s: float = 0.4
) -> dict[int, tuple[str, ...]]:
    """Return the stacks of the ranks that answer in time, innermost frame first.

    Args:
        folder: of the job.
        readers: of the flight recorders of those ranks, whose processes must be alive.
        timeout_s: how long to wait for all of them.
    """
    before: dict[int, int] = {}
    for reader in readers:
        number = reader.state_word(StateWords().stack_signal)
        path = _path(folder, reader.rank)
        if not number or reader.pid == os.getpid():
            continue
        with suppress(OSError):
            before[reader.rank] = path.stat().st_size
            os.kill(reader.pid, number)
    stacks: dict[int, tuple[str, ...]] = {}
    deadline = time.monotonic() + timeout_s
    while len(stacks) < len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank in before.keys() - stacks.keys():
            text = _new_text(_path(folder, rank), before[rank])
            if text.endswith("\n"):
                frames = [(file, int(line), name) for file, line, name in _FRAME.findall(text)]
                stacks[rank] = stack_of(frames)
    if any(reader.pid == os.getpid() for reader in readers):
        stacks |= {r.rank: own_stack() for r in readers if r.pid == os.getpid()}
    return stacks


def _new_text(path: Path, start: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(_LONGEST).decode(errors="replace")
    return ""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


_DELIVERY_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 4  # programs use SIGUSR1 and 2 themselves
_IN_COLLECTIVE_S = 1.0  # a collective that waits ends with an error within this time
_GRACE_S = 5.0  # a thread that has not got the error by then is in C code that never returns
_EXIT_STATUS = 86  # tells the launcher that this process only follows the failure of another one


class ErrorDelivery:
    """A signal handler in which the main thread raises the watchdog's error.

    Attributes:
        is_installed: whether there is one, which only the main thread can install.
    """

    def __init__(self, state: WatchdogState) -> None:
        self._state = state
        self.is_installed = threading.current_thread() is threading.main_thread()
        if self.is_installed:
            self._before = signal.signal(_DELIVERY_SIGNAL, self._raise)

    def close(self) -> None:
        """Restore the previous signal handler."""
        if self.is_installed and threading.current_thread() is threading.main_thread():
            self.is_installed = False
            signal.signal(_DELIVERY_SIGNAL, self._before or signal.SIG_DFL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        state = self._state
        if state.error is not None and not state.program.has_error:
            state.check()


def deliver_error(state: WatchdogState, delivery: ErrorDelivery, stop: threading.Event) -> None:
    """Make the program's thread raise the watchdog's error, and make sure that the process ends
    after it.

    A thread that is not the main thread cannot be interrupted: it gets the error in a collective.

    Args:
        state: of the watchdog.
        delivery: its signal handler.
        stop: ends the delivery.
    """
    program = state.program
    thread = program.thread
    begin = time.monotonic()
    while (
        not program.has_error and thread.is_alive() and not program.is_exiting and not stop.is_set()
    ):
        waited = time.monotonic() - begin
        if waited > _GRACE_S:
            _exit_process(
                state, f"{thread.name} does not return from {' < '.join(own_stack()) or 'a call'}"
            )
        if delivery.is_installed and (
            waited > _IN_COLLECTIVE_S or thread.ident not in state.waiting_threads
        ):
            with suppress(OSError, ValueError):  # the thread has ended
                signal.pthread_kill(thread.ident or 0, _DELIVERY_SIGNAL)
        stop.wait(0.1)
    # the program may handle the error as it likes, but threads must not keep a program alive that
    # is over
    over = 0.0
    while not stop.wait(0.2):
        state.recorder.record_heartbeat()
        if threading.main_thread().is_alive() and not program.is_exiting:
            continue
        over = over or time.monotonic()
        if time.monotonic() - over > _GRACE_S:
            names = [
                other.name
                for other in threading.enumerate()
                if not other.daemon and other is not thread
            ]
            _exit_process(state, f"threads keep the process alive ({', '.join(names)})")


def _exit_process(state: WatchdogState, why: str) -> None:
    with suppress(Exception):
        write_error_line(f"lockstep: rank {state.rank}: {why}; the process is ended\n{state.error}")
    os._exit(_EXIT_STATUS)


_TIMEOUT_S = 3.0  # in which the monitor threads find out why other ranks do not respond
_ELASTIC_TIMEOUT_S = (
    0.25  # the same in an elastic job, whose membership hears of a loss within milliseconds
)
_CROSS_HOST_TIMEOUT_S = 8.0  # the same if there are ranks on other hosts, which may be unreachable
_RECENT = 8  # records among which this rank's last collective is searched
_REJECTIONS = (ValueError, TypeError, NotImplementedError)
_REJECTED = re.compile(r"ProcessGroup\w+::\w+: |Cannot use ReduceOp|Invalid scalar type")
_TRANSPORT_WORDS = (
    *(
        "gloo/",
        "pair closure",
        "connection",
        "connect ",
        "peer",
        "socket",
        "timed out",
        "nccl",
        "shm:",
    ),
    "lockstep.errors",
)


def await_root_cause(
    state: WatchdogState,
    monitors: Sequence[GroupMonitor],
    error: BaseException,
    ranks: Collection[int] | None = None,
) -> None:
    """Raise the watchdog's error instead of `error` if that is only a symptom of it; otherwise
    return.

    Args:
        state: of the watchdog.
        monitors: of the groups of this rank.
        error: the exception with which a call has ended.
        ranks: who takes part in that call; all ranks if None.
    """
    if state.error is None and is_transport_error(error):
        with _waiting_in_last(state, monitors):
            _await_report(state, monitors, ranks)
    if state.error is not None and error is not state.error and isinstance(error, Exception):
        state.program.note_error()
        raise state.error from None


@contextmanager
def _waiting_in_last(state: WatchdogState, monitors: Sequence[GroupMonitor]) -> Iterator[None]:
    """Let other ranks see this rank wait in its last collective during the body, though the wait
    itself has failed.
    """
    waits = state.current_wait()
    last = last_collective(state, monitors)
    if last is None or (waits is not None and waits.peer >= 0):  # it still is in a message
        yield
        return
    monitor, raw = last
    with state.lock:
        known = any(
            call.number == raw.number and call.work is None for call in list(monitor.pending)
        )
        pending = PendingCall.of(raw)
        if not known:
            monitor.pending.append(pending)
            state.recorder.reopen(raw.number)
            state.recorder.begin_wait(raw.number, raw.entered)
    try:
        yield
    finally:
        if not known:
            now = time.monotonic()
            state.recorder.end_wait(now)
            monitor.finish(pending, now)


def _await_report(
    state: WatchdogState, monitors: Sequence[GroupMonitor], ranks: Collection[int] | None
) -> None:
    timeout_s = _TIMEOUT_S if len(state.rendezvous.hosts) == 1 else _CROSS_HOST_TIMEOUT_S
    if state.limits.expects_losses:
        timeout_s = _ELASTIC_TIMEOUT_S
    begin = time.monotonic()
    while not state.poll_report() and time.monotonic() - begin < timeout_s:
        if time.monotonic() - begin > _TIMEOUT_S / 4:
            finding = find_gone_rank(state, monitors, ranks)
            if finding is not None:
                state.fail(finding)
        time.sleep(0.01)


def find_gone_rank(
    state: WatchdogState, monitors: Sequence[GroupMonitor], ranks: Collection[int] | None = None
) -> Finding | None:
    """Return the finding for a rank without which nobody can communicate any more.

    Args:
        state: of the watchdog.
        monitors: of the groups of this rank.
        ranks: those whose communication has failed, if that is known: other ranks may have exited
            in good order.
    """
    gone = state.health.poll()
    finding = local_exception(state)
    if finding is not None:
        return finding
    peers = [rank for rank in state.peers if ranks is None or rank in ranks]
    ended = {rank for rank in peers if state.peers[rank].phase in ("ended", "left")}
    dead = [rank for rank in peers if rank in gone and rank not in ended]
    culprit = next(iter((*dead, *(rank for rank in peers if rank in ended))), None)
    return None if culprit is None else _in_last_call(state, monitors, culprit)


def _in_last_call(
    state: WatchdogState, monitors: Sequence[GroupMonitor], rank: int
) -> Finding | None:
    """Return the finding for a rank without which this rank's last message or collective has
    failed.
    """
    raw = state.current_wait()
    if raw is not None and raw.peer == rank:
        wait = wait_in(state.own_reader, raw)
        finding = local_finding(state, rank, describe_record(state.own_reader, raw.number))
        tag = find_other_tag(state.own_reader, wait, state.peers)
        return None if finding is None else explained(finding, state.rank, wait, tag)
    last_call = last_collective(state, monitors)
    if last_call is None or rank not in last_call[0].peers.missing(last_call[1].sequence):
        return local_finding(state, rank, "a collective")
    monitor, last = last_call
    finding = local_finding(state, rank, describe_record(state.own_reader, last.number))
    return None if finding is None else finding.at(monitor.key, last.sequence)


def last_collective(
    state: WatchdogState, monitors: Iterable[GroupMonitor]
) -> tuple[GroupMonitor, RawRecord] | None:
    """Return this rank's last collective, and its group, if the rank is still in that group."""
    last = next(
        (raw for raw in reversed(list(state.own_reader.raws(_RECENT))) if raw.sequence), None
    )
    monitor = next(
        (watched for watched in monitors if last is not None and watched.key == last.key), None
    )
    return None if last is None or monitor is None else (monitor, last)


def is_transport_error(error: BaseException) -> bool:
    """Return whether an exception says that other ranks cannot be reached, not that something is
    wrong on this one.
    """
    if isinstance(error, TransportError):
        return True
    if (
        not isinstance(error, RuntimeError)
        or isinstance(error, LockstepError)
        or is_rejection(error)
    ):
        return False
    text = str(error).lower()
    return "Dist" in type(error).__name__ or any(word in text for word in _TRANSPORT_WORDS)


def is_rejection(error: BaseException) -> bool:
    """Return whether the backend has rejected a call for its arguments, before anything was
    sent.
    """
    return isinstance(error, _REJECTIONS) or _REJECTED.match(str(error)) is not None


def make_error(report: Report) -> TransportError:
    """Return the exception that every rank raises; under a launcher, which shows the whole report
    once, a short one.
    """
    data = report.to_json()
    text = report.sentence if environment.under_launcher() else as_text(report)
    if report.kind == "lost":
        return RankLostError(report.culprits[0] if report.culprits else -1, text, data)
    if report.kind == "stall":
        return StallError(text, report.culprits, data)
    return DesyncError(text, data)
