"""Diagnosis: why a collective does not complete: a rank died, exited, raised an exception, is
stopped, or is slow.

Whether a process lives is found out by `lockstep.system.processes`, and whether a host does by
`lockstep.system.heartbeat`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from .. import environment
from ..errors import ranks_in_words
from ..flight_recorder import RecorderReader
from ..flight_recorder.layout import StateWords
from ..system.processes import ProcessStatus
from .report import Finding, RankStatus, advice_on_method, method_in
from .report_text import seconds
from .states import DESTROYED_GROUPS, SILENT_S, rank_status

if TYPE_CHECKING:
    from .shared_state import WatchdogState

OWN_WORK_FACTOR = (
    6.0  # the first warning about work of Lockstep's own, such as a first plot, comes so much later
)

# Ranks that get the same bad input all raise the same error, which is then worth more than a report
# on the first one.
SIMULTANEOUS_S = 2.0


_LONGEST_TICK_S = 0.5
_WORDS = StateWords()


class ObservationClock:
    """Measures for how long a condition has been observed in every tick of the monitor thread.

    A whole job may be stopped for an hour and continue, or starve on an overloaded host: the time
    between two ticks of this process tells nothing about the other ranks, and counts for
    `_LONGEST_TICK_S` at most.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._now = 0.0
        self._ticks = 0
        self._seen: dict[
            Hashable, tuple[float, int]
        ] = {}  # since when, and in which tick it was observed last

    def tick(self) -> float:
        """Begin another tick; return the seconds since the last one, by the monotonic clock."""
        now = time.monotonic()
        passed = now - self._last
        self._last = now
        self._now += min(passed, _LONGEST_TICK_S)
        self._ticks += 1
        for condition in [
            condition for condition, (_, last) in self._seen.items() if last < self._ticks - 1
        ]:
            del self._seen[condition]
        return passed

    def observed_s(self, condition: Hashable) -> float:
        """Return for how many seconds `condition` has been observed in every tick, this one
        included.
        """
        since, _ = self._seen.get(condition, (self._now, 0))
        self._seen[condition] = since, self._ticks
        return self._now - since


_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def exception_finding(rows: Iterable[RankStatus]) -> Finding | None:
    """Return the finding for the first of the ranks that has raised an exception, if any."""
    row = next((row for row in rows if row.state == "raised"), None)
    if row is None:
        return None
    if _UNUSED in row.note:
        return _unused_parameters(row)
    sentence = f"Rank {row.rank} raised {row.note or 'an exception'}"
    if row.note.startswith("bdb.BdbQuit") and environment.debug_rank() is None:
        cause = "breakpoint() has no terminal to read from."
        advice = (
            f"Start the job with `lockstep run --debug-rank {row.rank} ...`, which gives rank "
            f"{row.rank} the terminal."
        )
        return Finding("raised", f"{sentence}.", (row.rank,), cause, advice)
    advice = "Its traceback is below; the other ranks were ended because of it."
    return Finding(
        "raised", sentence if sentence.endswith(".") else f"{sentence}.", (row.rank,), "", advice
    )


def _unused_parameters(row: RankStatus) -> Finding:
    indices = _INDICES.search(row.traceback)
    which = f" (indices {', '.join(indices[1].split())} of model.parameters())" if indices else ""
    return Finding(
        "parameters",
        f"Rank {row.rank} has parameters without gradients{which}, for which the other ranks wait "
        "in the backward pass.",
        (row.rank,),
        "Its forward pass takes another path through the model than that of the other ranks.",
        "Use the same layers on every rank, or pass DistributedDataParallel(..., "
        "find_unused_parameters=True).",
    )


def missing_finding(
    row: RankStatus, where: str, process: str = "", batches: int | None = None
) -> Finding | None:
    """Return why a rank will never call that in which others wait for it; None if it still may.

    Args:
        row: what the rank is doing.
        where: the call in which others wait.
        process: its process and the host of it, if that is this host.
        batches: how many batches it has had, if they are not as many as this rank's.
    """
    name = f"Rank {row.rank}"
    if row.host:
        name += f" on {row.host}"
    if row.state == "died":
        gone = f": its {process} is gone" if process else ""
        return Finding(
            "lost",
            f"{name} died while other ranks waited for it in {where}{gone}.",
            (row.rank,),
            "It was killed (SIGKILL; the kernel does that when memory runs out), crashed in C "
            "code, or called os._exit.",
            "See the exit status that the launcher shows, and the kernel's log (dmesg) for "
            "out-of-memory kills.",
        )
    if row.state == "ended":
        return _exit_finding(row, name, where, batches)
    if row.state == "frozen":
        stopped = f"{name} ({process})" if process else name
        return Finding(
            "frozen",
            f"{stopped} is stopped while other ranks wait for it in {where}.",
            (row.rank,),
            "It has received SIGSTOP, or Ctrl-Z was pressed.",
            "To stop one rank in a debugger, start the job with --debug-rank.",
        )
    if row.state == "lost":
        return Finding(
            "lost",
            f"{name} and its host are unreachable while other ranks wait for it in {where}.",
            (row.rank,),
            "Its host, or the network to it, is down.",
            "Check whether that host can be reached, and what its kernel's log (dmesg) says.",
        )
    return None


def _exit_finding(row: RankStatus, name: str, where: str, batches: int | None) -> Finding:
    how = "destroyed its process group" if row.note == DESTROYED_GROUPS else "exited"
    after = f" after {batches} batch{'es'[: 2 * (batches != 1)]}" if batches is not None else ""
    cause = (
        "It left its loop, or the program, earlier than the others; or only some ranks call this "
        "collective."
    )
    advice = (
        "Let all ranks do the same number of steps, and call every collective on every rank of "
        "its group."
    )
    if method := method_in(where):
        cause = (
            f"It did not call {method}, which the other ranks are in: the call is in a branch "
            "that some ranks take."
        )
        advice = advice_on_method(method)
    elif batches is not None:
        cause = "It had fewer batches than the others, or skipped one."
    sentence = f"{name} {how}{after} while other ranks waited for it in {where}."
    return Finding("left", sentence, (row.rank,), cause, advice)


def stall_finding(
    ranks: Collection[int], where: str, limit_s: float, setting: str, stacks: str = ""
) -> Finding:
    """Return the finding for ranks that have not reached the call `where` within a limit.

    Args:
        ranks: these ranks.
        where: the call in which others wait for them.
        limit_s: seconds.
        setting: the name of what sets this limit.
        stacks: what the cause refers to, where the report has the stacks of these ranks.
    """
    return Finding(
        "stall",
        f"{ranks_in_words(ranks).capitalize()} did not reach {where} within {limit_s:.0f} s.",
        tuple(ranks),
        f"{'It is' if len(ranks) == 1 else 'They are'} slow or in an endless loop{stacks}, or "
        "only some ranks call this collective.",
        "Speed up the slow part, or let all ranks do it, and call every collective on every rank "
        f"of its group. {setting} sets this limit.",
    )


def straggler_warning(
    ranks: Collection[int],
    where: str,
    waited_s: float,
    waiting: str,
    limit_s: float,
    places: Mapping[int, str],
) -> str:
    """Return the warning of ranks that have not reached the call `where` yet.

    Args:
        ranks: these ranks.
        where: the call in which others wait for them.
        waited_s: seconds for which they wait.
        waiting: who waits.
        limit_s: seconds after which it becomes an error; 0 if that is not said.
        places: what ranks are doing, as far as that is known.
    """
    verb = "has" if len(ranks) == 1 else "have"
    text = (
        f"straggler: {ranks_in_words(ranks)} {verb} not reached {where} for {waited_s:.1f} s; "
        f"{waiting}."
    )
    if limit_s:
        text += f" This becomes an error after {limit_s:.0f} s."
    for rank, place in places.items():  # on a line of its own: a source line ends with no full stop
        text += f"\n  Rank {rank} is {place}"
    return text


FROZEN_S = 1.0
"""A process that is stopped for a shorter time, in seconds, may only pass through that state."""

_PROCESS_STATES = {
    "T": "stopped by a signal ({process}, state T; `kill -CONT {pid}` lets it go on)",
    "t": "held by a debugger ({process}, state t)",
    "D": "in uninterruptible sleep ({process}, state D: it waits for a disk, a network file "
    "system, swapped memory or a driver)",
}


def why_held_up(reader: RecorderReader, status: ProcessStatus | None) -> str:
    """Return why a rank of this host does not run, as its process shows; "" if it seems to run.

    Args:
        reader: of its flight recorder.
        status: of its process; None if it is not known.
    """
    process = f"process {reader.pid} on {reader.host}"
    letter = "?" if status is None else status.state
    if letter in _PROCESS_STATES:
        return _PROCESS_STATES[letter].format(process=process, pid=reader.pid)
    silent_s = time.monotonic() - reader.floats[_WORDS.heartbeat]
    if status is None or silent_s < SILENT_S:
        return ""
    return (
        f"without a heartbeat for {seconds(silent_s)} ({process}, state {letter}): it is swapped "
        "out, frozen, or in C code that holds the interpreter"
    )


def held_up_warning(where: str, waited_s: float, waiting: str, reasons: Mapping[int, str]) -> str:
    """Return the warning of ranks that hold up the call `where`, which they have made.

    Args:
        where: the call.
        waited_s: seconds for which the others wait.
        waiting: who waits.
        reasons: why each of these ranks does not run, see `why_held_up`.
    """
    text = f"held up: {waiting} waited in {where} for {waited_s:.1f} s, though all have called it."
    for rank, reason in reasons.items():
        text += f"\n  Rank {rank} is {reason}"
    return text


def local_finding(
    state: WatchdogState, rank: int, where: str, clock: ObservationClock | None = None
) -> Finding | None:
    """Return why a rank of this host will never call that in which this rank waits; None if it
    still may.

    Args:
        state: of the watchdog.
        rank: the other rank; nothing is known of one on another host.
        where: the call in which this rank waits.
        clock: measures for how long the rank has been stopped; None if that is no reason.
    """
    reader = state.peers.get(rank)
    if reader is None:
        return None
    # what stays stopped in an elastic job is killed by its launcher, and replaced
    is_excused = state.limits.debugging or state.limits.expects_losses
    is_frozen = False
    if clock is not None and not is_excused and state.health.is_stopped(rank):
        is_frozen = clock.observed_s(("stopped", rank)) > FROZEN_S
    is_gone = rank in state.health.gone
    if not (is_gone or is_frozen or reader.phase in ("ended", "left")):
        return None
    own_state = state.own_reader.state()
    other = reader.state()
    in_same_loop = reader.state_word(_WORDS.loop) == state.own_reader.state_word(_WORDS.loop)
    ran_out = (
        other.finished
        and in_same_loop
        and (own_state.finished, own_state.batch) != (other.finished, other.batch)
    )
    status = rank_status(other, False, is_gone, is_frozen)
    process = f"process {reader.pid} on {reader.host}"
    return missing_finding(status, where, process, other.batch if ran_out else None)


def local_exception(state: WatchdogState, waits: bool = True) -> Finding | None:
    """Return the finding for the first other rank of this host that has raised an exception, if
    any.

    Args:
        state: of the watchdog.
        waits: whether this rank waits for others. If not, it may be about to raise the same, and
            gets time to.
    """
    raised = [reader for reader in state.peers.values() if reader.phase == "raised"]
    if not raised:
        return None
    first = min(raised, key=lambda reader: reader.floats[_WORDS.since])
    if not waits and time.monotonic() - first.floats[_WORDS.since] < SIMULTANEOUS_S:
        return None
    return exception_finding([rank_status(first.state(), False, False, False)])
