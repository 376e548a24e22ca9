"""Diagnosis: why a collective does not complete: a rank died, exited, raised an exception, or is stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from .. import environment
from ..flight_recorder import RawRecord, RecorderReader
from ..flight_recorder.layout import StateWords
from .channels import explained
from .group_monitor import GroupMonitor
from .mismatch import Finding, advice_on_method, method_in
from .shared_state import PendingCall, WatchdogState

__all__ = [
    "OWN_WORK_FACTOR",
    "SIMULTANEOUS_S",
    "ObservationClock",
    "describe_call",
    "diagnose_missing",
    "exception_finding",
    "exception_line",
    "exit_finding",
    "find_exception",
    "find_gone_rank",
    "last_collective",
    "lost_finding",
    "stopped_finding",
]

_STOPPED_S = 1.0  # a process that is stopped for a shorter time may only pass through that state
_RECENT = 8  # records among which this rank's last collective is searched
_WORDS = StateWords()

OWN_WORK_FACTOR = 6.0  # the first warning about work of Lockstep's own, such as a first plot, comes so much later

# Ranks that get the same bad input all raise the same error, which is then worth more than a report on the first one.
SIMULTANEOUS_S = 2.0


# --- Durations, by a clock that stands still while this process itself does not run -----------------------------------

_LONGEST_TICK_S = 0.5


class ObservationClock:
    """Measures for how long a condition has been observed in every tick of the monitor thread.

    A whole job may be stopped for an hour and continue, or starve on an overloaded host: the time between two ticks of
    this process tells nothing about the other ranks, and counts for `_LONGEST_TICK_S` at most.
    """

    def __init__(self) -> None:
        self._last, self._now, self._ticks = time.monotonic(), 0.0, 0
        self._seen: dict[Hashable, tuple[float, int]] = {}  # since when, and in which tick it was observed last

    def tick(self) -> float:
        """Begin another tick; return the seconds since the last one, by the monotonic clock."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._now += min(passed, _LONGEST_TICK_S)
        self._ticks += 1
        for condition in [each for each, (_, last) in self._seen.items() if last < self._ticks - 1]:
            del self._seen[condition]
        return passed

    def observed_s(self, condition: Hashable) -> float:
        """Return for how many seconds `condition` has been observed in every tick, this one included."""
        since, _ = self._seen.get(condition, (self._now, 0))
        self._seen[condition] = since, self._ticks
        return self._now - since


# --- Texts ------------------------------------------------------------------------------------------------------------


def describe_call(state: WatchdogState, number: int) -> str:
    """Return this rank's record of that number as text: ``all_reduce(float32[4], sum) at train.py:3 in main``."""
    raw = state.own.raw(number)
    if raw is None:
        return "a collective"
    record = state.own.record(raw)
    return f"{record.description} at {record.call_site}"


def exception_line(traceback: str) -> str:
    """Return the line ``ValueError: message`` of a traceback; the first of them for a message of several lines."""
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), "")[:300]


# --- Findings ---------------------------------------------------------------------------------------------------------

_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def exception_finding(rank: int, exception: str, traceback: str) -> Finding:
    """Return the finding for a rank that has raised `exception`, a line of text."""
    if _UNUSED in exception:
        return _unused_parameters(rank, traceback)
    sentence = f"Rank {rank} raised {exception or 'an exception'}"
    if exception.startswith("bdb.BdbQuit") and environment.debug_rank() is None:
        cause = "breakpoint() has no terminal to read from."
        advice = f"Start the job with `lockstep run --debug-rank {rank} ...`, which gives rank {rank} the terminal."
        return Finding("raised", f"{sentence}.", (rank,), cause, advice)
    advice = "Its traceback is below; the other ranks were ended because of it."
    return Finding("raised", sentence if sentence.endswith(".") else f"{sentence}.", (rank,), "", advice)


def _unused_parameters(rank: int, traceback: str) -> Finding:
    found = _INDICES.search(traceback)
    which = f" (indices {', '.join(found[1].split())} of model.parameters())" if found else ""
    return Finding(
        "parameters",
        f"Rank {rank} has parameters without gradients{which}, for which the other ranks wait in the backward pass.",
        (rank,),
        "Its forward pass takes another path through the model than that of the other ranks.",
        "Use the same layers on every rank, or pass DistributedDataParallel(..., find_unused_parameters=True).",
    )


def lost_finding(rank: int, where: str, host: str = "", detail: str = "") -> Finding:
    """Return the finding for a rank whose process died while others waited for it in `where`."""
    name, details = f"Rank {rank}{host and f' on {host}'}", detail and f": {detail}"
    return Finding(
        "lost",
        f"{name} died while other ranks waited for it in {where}{details}.",
        (rank,),
        "It was killed (SIGKILL; the kernel does that when memory runs out), crashed in C code, or called os._exit.",
        "See the exit status that the launcher shows, and the kernel's log (dmesg) for out-of-memory kills.",
    )


def exit_finding(rank: int, where: str, host: str = "", how: str = "exited", batches: int | None = None) -> Finding:
    """Return the finding for a rank that exited, or destroyed its groups, while others waited for it in `where`."""
    after = f" after {batches} batch{'es'[: 2 * (batches != 1)]}" if batches is not None else ""
    cause = "It left its loop, or the program, earlier than the others; or only some ranks call this collective."
    advice = "Let all ranks do the same number of steps, and call every collective on every rank of its group."
    if method := method_in(where):
        cause = f"It did not call {method}, which the other ranks are in: the call is in a branch that some ranks take."
        advice = advice_on_method(method)
    elif batches is not None:
        cause = "It had fewer batches than the others, or skipped one."
    return Finding(
        "left",
        f"Rank {rank}{host and f' on {host}'} {how}{after} while other ranks waited for it in {where}.",
        (rank,),
        cause,
        advice,
    )


def stopped_finding(rank: int, where: str, process: str) -> Finding:
    """Return the finding for a rank whose process is stopped while others wait for it in `where`."""
    return Finding(
        "frozen",
        f"Rank {rank}{process} is stopped while other ranks wait for it in {where}.",
        (rank,),
        "It has received SIGSTOP, or Ctrl-Z was pressed.",
        "To stop one rank in a debugger, start the job with --debug-rank.",
    )


# --- Diagnosis on this host -------------------------------------------------------------------------------------------


def find_exception(state: WatchdogState, waits: bool = True) -> Finding | None:
    """Return the finding for the first rank that has raised an exception.

    Args:
        state: of the watchdog.
        waits: whether this rank waits for others. If not, it may be about to raise the same, and gets time to.
    """
    raised = [each for each in state.readers.values() if each.phase == "raised" and each.rank != state.rank]
    if not raised:
        return None
    first = min(raised, key=lambda each: each.floats[_WORDS.since])
    if not waits and time.monotonic() - first.floats[_WORDS.since] < SIMULTANEOUS_S:
        return None
    traceback = first.traceback_text()
    return exception_finding(first.rank, exception_line(traceback), traceback)


def find_gone_rank(
    state: WatchdogState, monitors: Sequence[GroupMonitor], ranks: Collection[int] | None = None
) -> Finding | None:
    """Return the finding for a rank without which nobody can communicate any more.

    Args:
        state: of the watchdog.
        monitors: of the groups of this rank.
        ranks: those whose communication has failed, if that is known: other ranks may have exited in good order.
    """
    gone = state.health.poll()
    if any(reader.phase == "raised" for reader in state.peers.values()):
        return find_exception(state)
    peers = {rank: each for rank, each in state.peers.items() if ranks is None or rank in ranks}
    for rank, reader in peers.items():
        if rank in gone and reader.phase not in ("ended", "left"):
            return _in_last_collective(state, monitors, reader, _lost)
    for reader in peers.values():
        if reader.phase in ("ended", "left"):
            return _in_last_collective(state, monitors, reader, partial(_exited, state))
    return None


def last_collective(state: WatchdogState, monitors: Iterable[GroupMonitor]) -> tuple[GroupMonitor, RawRecord] | None:
    """Return this rank's last collective, and its group, if the rank is still in that group."""
    last = next((raw for raw in reversed(list(state.own.raws(_RECENT))) if raw.sequence), None)
    monitor = next((each for each in monitors if last is not None and each.key == last.key), None)
    return None if last is None or monitor is None else (monitor, last)


def _in_last_collective(
    state: WatchdogState,
    monitors: Sequence[GroupMonitor],
    reader: RecorderReader,
    make: Callable[[RecorderReader, str], Finding],
) -> Finding:
    """Return the finding for a rank without which this rank's last message or collective has failed."""
    waits = state.current_wait()
    if waits is not None and waits.peer == reader.rank:
        return explained(make(reader, describe_call(state, waits.number)), state.own, reader, waits)
    found = last_collective(state, monitors)
    if found is None or reader.rank not in found[0].missing_ranks(found[1].sequence):
        return make(reader, "a collective")
    monitor, last = found
    return replace(make(reader, describe_call(state, last.number)), key=monitor.key, sequence=last.sequence)


def diagnose_missing(
    state: WatchdogState,
    monitor: GroupMonitor,
    pending: PendingCall,
    missing: Iterable[int],
    clock: ObservationClock,
) -> Finding | None:
    """Return why missing ranks will never call a collective; None if they still may.

    Args:
        state: of the watchdog.
        monitor: of the group.
        pending: this rank's collective.
        missing: the ranks that have not called it.
        clock: measures for how long ranks have been stopped.
    """
    where = describe_call(state, pending.number)
    for rank in missing:
        reader = state.peers.get(rank)
        finding = _diagnose_rank(state, reader, where, clock) if reader is not None else None
        if finding is not None:
            return replace(finding, key=monitor.key, sequence=pending.sequence)
    return None


def _diagnose_rank(state: WatchdogState, reader: RecorderReader, where: str, clock: ObservationClock) -> Finding | None:
    rank = reader.rank
    if reader.phase in ("ended", "left"):
        return _exited(state, reader, where)
    if rank in state.health.gone:
        return _lost(reader, where)
    if state.limits.debugging or state.limits.expects_losses or not state.health.is_stopped(rank):
        return None  # what stays stopped in an elastic job is killed by its launcher, and replaced
    if clock.observed_s(("stopped", rank)) > _STOPPED_S:
        return stopped_finding(rank, where, f" (process {reader.pid} on {reader.host})")
    return None


def _lost(reader: RecorderReader, where: str) -> Finding:
    return lost_finding(reader.rank, where, detail=f"its process {reader.pid} on {reader.host} is gone")


def _exited(state: WatchdogState, reader: RecorderReader, where: str) -> Finding:
    how = "destroyed its process group" if reader.phase == "left" else "exited"
    own, left = state.own.state(), reader.state()
    in_same_loop = reader.state_word(_WORDS.loop) == state.own.state_word(_WORDS.loop)
    ran_out = left.finished and in_same_loop and (own.finished, own.batch) != (left.finished, left.batch)
    return exit_finding(reader.rank, where, how=how, batches=left.batch if ran_out else None)
