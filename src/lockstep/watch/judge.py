"""Whether two ranks that are in the collective of one number are in the same one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..recorder import Raw, Record
from .finding import Finding

__all__ = ["BATCHES", "KINDS", "Difference", "differences", "explain", "is_error"]

KINDS = ("desync", "ended", "swap", "batches", "lines")
"""In what two records of one collective can differ, the gravest first.

"desync" is the call itself; "ended", one rank has run out of the batches that the other still takes; "swap", two like
calls that one rank makes in another order, see `swaps`; "batches", other batches of one loop; "lines", other lines.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Attributes: kind, one of `KINDS` or "parameters"; sentence; cause; advice."""

    kind: str
    sentence: str
    cause: str = ""
    advice: str = ""

    def as_warning(self) -> str:
        """What is said of it where it is no error."""
        return f"warning: {self.sentence} {self.cause} {self.advice}"

    def as_finding(self, key: int, sequence: int) -> Finding:
        """The error in the collective `sequence` of the group `key`."""
        kind = {"lines": "desync", "swap": "desync", "ended": "batches"}.get(self.kind, self.kind)
        return Finding(kind, self.sentence, (), self.cause, self.advice, key, sequence)


def is_error(kind: str, strict: bool) -> bool:
    """Whether ranks that differ like that cannot go on: programs branch, and skip a bad batch, on purpose."""
    return strict or kind not in ("batches", "lines")


def differences(mine: Raw, theirs: Raw, uneven: bool = False) -> Iterator[str]:
    """In what two records of one collective differ, the gravest first; a "swap" does not show in one collective.

    Args:
        mine: one.
        theirs: the other.
        uneven: ranks have different numbers of batches on purpose.
    """
    if mine.fingerprint != theirs.fingerprint:
        yield "desync"
    lines = mine.line != theirs.line and not mine.name
    if mine.loop == theirs.loop and mine.loop and mine.batch != theirs.batch and not uneven:
        if mine.batch >= 0 and theirs.batch >= 0:
            yield "batches"
        elif lines and (mine.batch >= 0) != (theirs.batch >= 0):
            yield "ended"
    if lines:
        yield "lines"


def explain(kind: str, ranks: tuple[int, int], calls: tuple[Record, Record]) -> Difference:
    """The same in words.

    Args:
        kind: one of `KINDS`.
        ranks: the two.
        calls: what each of them has called.
    """
    where = _where(calls[0])
    if kind in ("batches", "ended"):
        sentence = f"Rank {ranks[0]} {_batch(calls[0])}, rank {ranks[1]} {_batch(calls[1])}, in {where}."
        return Difference(kind, sentence, *BATCHES)
    if kind in ("lines", "swap"):
        told = [f"rank {rank} at {call.place}: {call.source}" for rank, call in zip(ranks, calls, strict=True)]
        how = "was called from different lines" if kind == "lines" else "has changed places with the one before it"
        sentence = f"{calls[0].what} as {where} {how}: {told[0]}; {told[1]}."
        return Difference(kind, sentence, *(_LINES if kind == "lines" else _SWAP))
    if all(call.what.startswith("model(") for call in calls):
        told = [f"rank {rank} {call.what.removeprefix('model')}" for rank, call in zip(ranks, calls, strict=True)]
        return Difference("parameters", f"The models differ in their parameters: {' and '.join(told)}.", *_MODELS)
    names = {call.name for call in calls}
    named = [f" named {call.name!r}" if len(names) > 1 and call.name else "" for call in calls]
    told = [f"rank {r} called {c.what}{n}" for r, c, n in zip(ranks, calls, named, strict=True)]
    return Difference("desync", f"As {where}, {told[0]} and {told[1]}.", *_cause(calls))


_LINES = (
    "Two collectives are in another order on one rank, or one that a single rank calls was answered by another one.",
    "Call the same collectives in the same order on every rank. Where ranks branch on purpose nothing is wrong; "
    'LOCKSTEP_WATCH=strict makes it an error, and lockstep.recorder.named("...") gives a collective a name.',
)

_SWAP = (
    "Each rank has just called what the other calls now: a loop calls the same things in another order on one rank, as "
    "over a set, or a dictionary that was filled in another order.",
    "Call them in the same order on every rank: sort them, say. Where nothing is wrong, let both collectives have the "
    'same name: with lockstep.recorder.named("...").',
)


BATCHES = (
    "A rank has skipped a batch or taken one more, or has fewer batches than another.",
    "Let every rank take as many batches as the others. Where they take other numbers on purpose, call "
    "lockstep.recorder.note_batch(-1) after each.",
)


_MODELS = (
    "The model is made of other layers, of other sizes, or in another order on one rank.",
    "Build the same model on every rank: the class, its options and its layers must not depend on the rank.",
)


def _where(call: Record) -> str:
    return f"collective {call.sequence} of {f'group {call.group}' if call.group else 'all ranks'}"


def _batch(call: Record) -> str:
    if call.finished:
        return f"has run out of batches after {call.batch}"
    return f"is on batch {call.batch}"


def _cause(calls: tuple[Record, Record]) -> tuple[str, str]:
    first, second = calls
    same_operation = first.what.partition("(")[0] == second.what.partition("(")[0]
    if first.finished != second.finished and not same_operation:
        return (
            "One rank has fewer batches than another, and goes on with what comes after the loop.",
            "Give every rank as many batches, e.g. with a DistributedSampler, drop_last=True or lockstep.Loader.",
        )
    if not same_operation or first.place != second.place or first.name != second.name:
        return (
            "A collective stands in a branch that only some ranks take, or ranks call them in different orders.",
            "Let every rank of the group call the same collectives in the same order.",
        )
    return (
        "Tensors have other shapes or types on some ranks: a last batch that is smaller, another model, or mixed "
        "precision that is on for some ranks only.",
        "Make the tensors alike on every rank before they are sent.",
    )
