"""Why a collective does not go on: a rank that is gone, has left, has raised an exception, or does not move."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..recorder import Raw, Recording
from ..recorder.layout import State
from .finding import Finding
from .member import Member, Started
from .patience import Patience

if TYPE_CHECKING:
    from .view import Session

__all__ = [
    "COMPANY_S",
    "first_line",
    "has_raised",
    "in_words",
    "last_collective",
    "names",
    "raised_by",
    "who_has_gone",
    "why_late",
]

_STOPPED_S = 1.0  # a process that is stopped for so long is not just passing through that state
_RECENT = 8  # records among which this rank's last collective is looked for
_AT = State()


def names(ranks: Iterable[int]) -> str:
    """ "Rank 1" or "Ranks 1, 2 and 5"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return f"Ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


# Ranks that are given the same bad input all raise the same error, which is then worth more than a report on the first.
COMPANY_S = 2.0


def has_raised(session: Session, waits: bool = True) -> Finding | None:
    """The first rank that ends with an exception of its own.

    Args:
        session: of this rank.
        waits: whether this rank waits for others. One that does not may be about to raise the same, and has time to.
    """
    found = [each for each in session.recordings.values() if each.phase == "raised" and each.rank != session.rank]
    if not found:
        return None
    first = min(found, key=lambda each: each.reals[_AT.since])
    if not waits and time.monotonic() - first.reals[_AT.since] < COMPANY_S:
        return None
    return raised_by(first.rank, first_line(first.said()), first.said())


def raised_by(rank: int, what: str, words: str) -> Finding:
    """What is to be said of a rank that has raised `what`, with the traceback `words`."""
    if _UNUSED in what:
        return _unused(rank, words)
    sentence = f"Rank {rank} has raised {what or 'an exception'}"
    advice = "Its traceback is below; the others were ended because of it."
    return Finding("raised", sentence if sentence.endswith(".") else f"{sentence}.", (rank,), "", advice)


_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def _unused(rank: int, words: str) -> Finding:
    found = _INDICES.search(words)
    which = f" (numbers {', '.join(found[1].split())} of model.parameters())" if found else ""
    return Finding(
        "parameters",
        f"Rank {rank} has parameters without gradients{which}, for which others wait in the backward pass.",
        (rank,),
        "Its forward pass takes another way through the model than that of the others.",
        "Use the same layers on every rank, or say DistributedDataParallel(..., find_unused_parameters=True).",
    )


def first_line(words: str) -> str:
    """``ValueError: what it says``, of a traceback; the first line of it where it has several."""
    lines = words.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), "")[:300]


def who_has_gone(session: Session, ranks: Collection[int] | None = None) -> Finding | None:
    """A rank without which nobody can communicate any more, whatever it was last seen in.

    Args:
        session: of this process.
        ranks: those that cannot communicate, as far as that is known: others may have gone in good order.
    """
    gone = session.health.look()
    if any(recording.phase == "raised" for recording in session.peers.values()):
        return has_raised(session)
    peers = {rank: each for rank, each in session.peers.items() if ranks is None or rank in ranks}
    for rank, recording in peers.items():
        if rank in gone and recording.phase not in ("ended", "left"):
            return _of_last(session, recording, _lost)
    for recording in peers.values():
        if recording.phase in ("ended", "left"):
            return _of_last(session, recording, _left)
    return None


def last_collective(session: Session) -> tuple[Member, Raw] | None:
    """What this rank has called last, in a group that it is still in."""
    last = next((raw for raw in reversed(list(session.own.raws(_RECENT))) if raw.sequence), None)
    member = next((each for each in session.members if last is not None and each.key == last.key), None)
    return None if last is None or member is None else (member, last)


def _of_last(session: Session, recording: Recording, make: Callable[[Recording, str], Finding]) -> Finding:
    """What is to be said of a rank without which this one's last collective has failed."""
    found = last_collective(session)
    if found is None or recording.rank not in found[0].missing(found[1].sequence):
        return make(recording, "a collective")
    member, last = found
    return replace(make(recording, in_words(session, last.number)), key=member.key, sequence=last.sequence)


def why_late(
    session: Session, member: Member, started: Started, late: Iterable[int], patience: Patience
) -> Finding | None:
    """Why ranks will not come to a collective, if they never will.

    Args:
        session: of this process.
        member: of the group.
        started: this rank's collective.
        late: who has not come.
        patience: with those that are stopped.
    """
    where = in_words(session, started.number)
    for rank in late:
        recording = session.peers.get(rank)
        if recording is None:
            continue
        finding = _of(session, recording, where, patience)
        if finding is not None:
            return replace(finding, key=member.key, sequence=started.sequence)
    return None


def _of(session: Session, recording: Recording, where: str, patience: Patience) -> Finding | None:
    rank, phase = recording.rank, recording.phase
    if phase in ("ended", "left"):
        return _left(recording, where)
    if rank in session.health.gone:
        return _lost(recording, where)
    if session.limits.debugging or not session.health.is_stopped(rank):
        return None
    if patience.seconds(("stopped", rank)) > _STOPPED_S:
        return Finding(
            "frozen",
            f"Rank {rank} (process {recording.pid} on {recording.host}) is stopped, and others wait for it in {where}.",
            (rank,),
            "Somebody has sent it SIGSTOP or pressed Ctrl-Z.",
            "To look at one rank with a debugger, start the job with --debug-rank.",
        )
    return None


def _lost(recording: Recording, where: str) -> Finding:
    return Finding(
        "lost",
        f"Rank {recording.rank} died while others waited for it in {where}: its process {recording.pid} on "
        f"{recording.host} is gone.",
        (recording.rank,),
        "It was killed (SIGKILL; the kernel does that when memory runs out), crashed in C code, or called os._exit.",
        "See the exit code that the launcher shows, and the kernel's log (dmesg) for what ran out of memory.",
    )


def _left(recording: Recording, where: str) -> Finding:
    how = "has destroyed its process group" if recording.phase == "left" else "has come to its end"
    state = recording.state()
    after = f" after {state.batch} batches" if state.finished else ""
    cause = "It left the loop, or the program, sooner than the others; or only some ranks call this collective."
    if state.finished:
        cause = "It had fewer batches than the others, or has skipped one."
    return Finding(
        "left",
        f"Rank {recording.rank} {how}{after} while others waited for it in {where}.",
        (recording.rank,),
        cause,
        "Let all ranks do the same number of steps, and call every collective on every rank of its group.",
    )


def in_words(session: Session, number: int) -> str:
    """What this rank's record of that number is, e.g. ``all_reduce(float32[4], sum) at train.py:3 in main``."""
    raw = session.own.raw(number)
    if raw is None:
        return "a collective"
    record = session.own.record(raw)
    return f"{record.what} at {record.place}"
