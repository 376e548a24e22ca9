"""Why a collective does not go on: a rank that is gone, has left, does not move, or waits for this one in turn."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..recorder import Raw, Recording
from ..recorder.layout import State
from .finding import Finding
from .member import Member, Started

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Cycle", "first_line", "has_raised", "names", "who_has_gone", "why_late"]

_STOPPED_S = 1.0  # a process that is stopped for so long is not just passing through that state
_STABLE_S = 0.4  # so long ranks must have waited for each other
_AT = State()


def names(ranks: Iterable[int]) -> str:
    """ "Rank 1" or "Ranks 1, 2 and 5"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return f"Ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


# Ranks that are given the same bad input all raise the same error, which is then worth more than a report on the first.
_COMPANY_S = 2.0


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
    if not waits and time.monotonic() - first.reals[_AT.since] < _COMPANY_S:
        return None
    what = first_line(first.said())
    if _UNUSED in what:
        return _unused(first)
    sentence = f"Rank {first.rank} has raised {what or 'an exception'}"
    advice = "Its traceback is below; the others were ended because of it."
    return Finding("raised", sentence if sentence.endswith(".") else f"{sentence}.", (first.rank,), "", advice)


_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def _unused(recording: Recording) -> Finding:
    found = _INDICES.search(recording.said())
    which = f" (numbers {', '.join(found[1].split())} of model.parameters())" if found else ""
    return Finding(
        "parameters",
        f"Rank {recording.rank} has parameters without gradients{which}, for which others wait in the backward pass.",
        (recording.rank,),
        "Its forward pass takes another way through the model than that of the others.",
        "Use the same layers on every rank, or say DistributedDataParallel(..., find_unused_parameters=True).",
    )


def first_line(words: str) -> str:
    """``ValueError: what it says``, of a traceback; the first line of it where it has several."""
    lines = words.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), "")[:300]


def who_has_gone(session: Session) -> Finding | None:
    """A rank without which nobody can communicate any more, whatever it was last seen in."""
    gone = session.health.look()
    for rank, recording in session.peers.items():
        if recording.phase == "raised":
            return has_raised(session)
        if rank in gone and recording.phase not in ("ended", "left"):
            return _lost(recording, "a collective")
    for recording in session.peers.values():
        if recording.phase in ("ended", "left"):
            return _left(recording, "a collective")
    return None


def why_late(
    session: Session, member: Member, started: Started, late: Iterable[int], stopped: dict[int, float]
) -> Finding | None:
    """Why ranks will not come to a collective, if they never will.

    Args:
        session: of this process.
        member: of the group.
        started: this rank's collective.
        late: who has not come.
        stopped: since when which rank's process has been stopped.
    """
    where = in_words(session, started.number)
    for rank in late:
        recording = session.peers.get(rank)
        if recording is None:
            continue
        finding = _of(session, recording, where, stopped)
        if finding is not None:
            return Finding(
                finding.kind,
                finding.sentence,
                finding.culprits,
                finding.cause,
                finding.advice,
                member.key,
                started.sequence,
            )
    return None


def _of(session: Session, recording: Recording, where: str, stopped: dict[int, float]) -> Finding | None:
    rank, phase = recording.rank, recording.phase
    if phase in ("ended", "left"):
        return _left(recording, where)
    if rank in session.health.gone:
        return _lost(recording, where)
    since = stopped.get(rank)
    if since is not None and time.monotonic() - since > _STOPPED_S and not session.limits.debugging:
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
        cause = "It had fewer batches than the others."
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


class Cycle:
    """Finds ranks of this machine that wait for each other in a circle."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: tuple[tuple[int, int], ...] = ()
        self._since = 0.0

    def look(self) -> Finding | None:
        """The circle that this rank is in, once it has been seen for a while."""
        now, found = time.monotonic(), self._through_me()
        if found != self._seen:
            self._seen, self._since = found, now
        if not found or now - self._since < _STABLE_S:
            return None
        told = []
        for index, (rank, number) in enumerate(found):
            recording = self._session.recordings[rank]
            raw = recording.raw(number)
            if raw is None:
                return None
            record = recording.record(raw)
            told.append(f"rank {rank} waits in {record.what} at {record.place} for rank {found[index - 1][0]}")
        sentence = "; ".join(told)
        return Finding(
            "desync",
            f"{sentence[0].upper()}{sentence[1:]}.",
            (),
            "Ranks communicate in different orders, or a message is received that nobody sends.",
            "Let both sides call what belongs together in the same order, and send for every recv.",
        )

    def _through_me(self) -> tuple[tuple[int, int], ...]:
        """(rank, number of the record that it waits in), each waited for by the next one and waiting for the last."""
        session = self._session
        waiting = {rank: raw for rank, each in session.recordings.items() if (raw := _waits_in(each)) is not None}
        paths = [[session.rank]] if session.rank in waiting else []
        for path in paths:
            for rank in _waited_for(session, path[-1], waiting):
                if rank == session.rank:
                    circle = path[::-1]
                    return tuple((each, waiting[each].number) for each in circle)
                if rank not in path:
                    paths.append([*path, rank])
        return ()


def _waits_in(recording: Recording) -> Raw | None:
    if recording.phase != "waits" or recording.word(_AT.threads) != 1:
        return None  # another thread may do what is waited for
    return recording.raw(recording.word(_AT.since_record))


def _waited_for(session: Session, rank: int, waiting: dict[int, Raw]) -> Iterator[int]:
    """Those of the waiting ranks that `rank` waits for."""
    raw, own = waiting[rank], session.recordings[rank]
    for other in waiting:
        recording = session.recordings[other]
        if other == rank:
            continue
        if raw.peer >= 0:
            is_recv = own.text(raw.what).startswith("recv")
            sent, received = recording.messages(rank, sent=True), own.messages(other, sent=False)
            if raw.peer == other and is_recv and sent < received:
                yield other
        else:
            lane = recording.lane(raw.key)
            if lane >= 0 and recording.head(lane) < raw.sequence:
                yield other
