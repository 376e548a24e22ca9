"""What is wrong between machines, of what each of them has told (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .causes import raised_by
from .finding import Finding
from .judge import BATCHES
from .report import Call, RankRow

__all__ = ["Job", "Lost", "compare", "parted", "raised", "rows_of", "slow_of"]

Lost = Mapping[int, tuple[str, str]]
"""Machines whose ranks say nothing any more: their state, "lost" or "died", and a note, by number of the machine."""

Told = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Ranks of one machine of which the same is told in one group; see `telling`."""

    machine: int
    ranks: tuple[int, ...]
    head: int
    waits: tuple[int, float, float] | None
    records: Mapping[int, tuple[int, ...]]
    texts: tuple[str, str]
    title: str = ""  # of the group, "" for that of all ranks

    def called(self) -> str:
        """What they have called last."""
        return f"{self.texts[0]} at {self.texts[1].partition(chr(10))[0]}"


@dataclass(frozen=True, slots=True)
class Job:
    """Attributes: machines, the ranks of each; groups, the ranks of each group that is known here, by its key."""

    machines: Sequence[Sequence[int]]
    groups: Mapping[int, Sequence[int]]

    def machine_of(self, rank: int) -> int:
        """The number of a rank's machine; -1 where that is not known."""
        return next((number for number, ranks in enumerate(self.machines) if rank in ranks), -1)


def rows_of(job: Job, told: Told, lost: Lost) -> dict[int, RankRow]:
    """What is known of every rank."""
    rows: dict[int, RankRow] = {}
    for machine, (state, note) in lost.items():
        rows |= {rank: RankRow(rank, state, note) for rank in job.machines[machine]}
    for machine, said in told.items():
        for text, (state, note, host, pid, batch, waiting, call, words) in said.get("ranks", {}).items():
            rank, made = int(text), None if call is None else Call(*call)
            if machine in lost and state not in ("ended", "raised", "died"):
                state, note = lost[machine]
            rows[rank] = RankRow(rank, state, note, host, pid, batch, made, waiting, (), words)
    return rows


def compare(job: Job, told: Told, lost: Lost, uneven: bool = False) -> Finding | None:
    """The first thing that is wrong.

    Args:
        job: who is where.
        told: by each machine.
        lost: those that say nothing any more.
        uneven: ranks have different numbers of batches on purpose.
    """
    rows = rows_of(job, told, lost)
    for key, parts in _groups(job, told).items():
        found = _differing(key, parts, uneven) or _never_coming(key, parts, rows)
        if found is not None:
            return found
    return None


def parted(job: Job, told: Told, uneven: bool = False) -> Finding | None:
    """The first collective in which machines differ; see `compare`."""
    found = (_differing(key, parts, uneven) for key, parts in _groups(job, told).items())
    return next((each for each in found if each is not None), None)


def raised(job: Job, told: Told) -> tuple[Finding | None, bool]:
    """A rank that has raised an exception, if any; and whether any rank waits for one that has not come."""
    found = next((row for row in rows_of(job, told, {}).values() if row.state == "raised"), None)
    if found is None:
        return None, False
    return raised_by(found.rank, found.note, found.words), any(True for _ in slow_of(job, told))


def slow_of(job: Job, told: Told) -> Iterator[tuple[int, int, float, float, str, list[int], list[int]]]:
    """Each collective that is waited in.

    Yields:
        (group, sequence number, seconds, seconds that the user allows or 0, what, who has not come, who waits).
    """
    for key, parts in _groups(job, told).items():
        for part in parts:
            if part.waits is not None:
                sequence, seconds, limit_s = part.waits
                late = [rank for each in parts if each.head < sequence for rank in each.ranks]
                if late:
                    yield key, sequence, seconds, limit_s, part.called(), sorted(late), list(part.ranks)


def _groups(job: Job, told: Told) -> dict[int, list[_Part]]:
    found: dict[int, list[_Part]] = {}
    for machine, said in told.items():
        for key, parts in said.get("groups", {}).items():
            for ranks, head, waits, records, texts in parts:
                kept = {record[0]: tuple(record[1:]) for record in records}
                wait = (waits[0], waits[1], waits[2]) if waits else None
                found.setdefault(int(key), []).append(
                    _Part(machine, tuple(ranks), head, wait, kept, (texts[0], texts[1]), *texts[2:3])
                )
    for number, members in job.groups.items():
        known = {rank for part in found.get(number, []) for rank in part.ranks}
        for rank in members:
            if rank not in known:  # it has said nothing yet
                silent = _Part(job.machine_of(rank), (rank,), 0, None, {}, ("", ""))
                found.setdefault(number, []).append(silent)
    return found


def _differing(key: int, parts: list[_Part], uneven: bool) -> Finding | None:
    first: dict[int, _Part] = {}  # by sequence number: all others are compared with the first that tells of it
    for part in parts:
        for sequence, record in part.records.items():
            other = first.setdefault(sequence, part)
            if record != other.records[sequence] and other.machine != part.machine:
                found = _difference(key, sequence, (other, part), uneven)
                if found is not None:
                    return found
    return None


def _difference(key: int, sequence: int, pair: tuple[_Part, _Part], uneven: bool) -> Finding | None:
    one, other = pair
    whose = f"group {one.title}" if one.title else "all ranks"
    mine, theirs = one.records[sequence], other.records[sequence]
    if mine[0] != theirs[0]:
        told = [
            f"rank {each.ranks[0]} called " + (each.called() if each.head == sequence else "something else")
            for each in (one, other)
        ]
        advice = "Let every rank of the group call the same collectives in the same order."
        cause = "A collective stands in a branch that only some ranks take, or their tensors differ."
        sentence = f"As collective {sequence} of {whose}, {told[0]} and {told[1]}."
        return Finding("desync", sentence, (), cause, advice, key, sequence)
    batches, same_loop = (mine[2], theirs[2]), mine[3] == theirs[3] and mine[3]
    if same_loop and min(batches) >= 0 and batches[0] != batches[1] and not uneven:
        ranks = one.ranks[0], other.ranks[0]
        sentence = f"Rank {ranks[0]} is on batch {batches[0]}, rank {ranks[1]} is on batch {batches[1]}."
        return Finding("batches", sentence, (), *BATCHES, key, sequence)
    return None


def _never_coming(key: int, parts: list[_Part], rows: Mapping[int, RankRow]) -> Finding | None:
    for part in parts:
        if part.waits is None:
            continue
        for rank in (rank for each in parts if each.head < part.waits[0] for rank in each.ranks):
            row = rows.get(rank)
            if row is not None and row.state in _SENTENCES:
                kind, text, cause, advice = _SENTENCES[row.state]
                where = f" on {row.host}" if row.host else ""
                sentence = f"Rank {rank}{where} {text} for it in {part.called()}."
                return Finding(kind, sentence, (rank,), cause, advice, key, part.waits[0])
    return None


_SENTENCES = {
    "died": (
        *("lost", "died while others waited"),
        "It was killed (SIGKILL; the kernel does that when memory runs out), crashed in C code, or called os._exit.",
        "See the exit code that the launcher shows, and the kernel's log (dmesg) for what ran out of memory.",
    ),
    "ended": (
        *("left", "has come to its end while others waited"),
        "It left the loop, or the program, sooner than the others; or only some ranks call this collective.",
        "Let all ranks do the same number of steps, and call every collective on every rank of its group.",
    ),
    "frozen": (
        *("frozen", "is stopped, and others wait"),
        "Somebody has sent it SIGSTOP or pressed Ctrl-Z.",
        "To look at one rank with a debugger, start the job with --debug-rank.",
    ),
    "lost": (
        *("lost", "is not heard of any more, nor is its machine, and others wait"),
        "Its machine, or the network to it, is down.",
        "See whether that machine can be reached, and what its kernel's log (dmesg) says.",
    ),
}
