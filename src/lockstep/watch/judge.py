"""Whether two ranks that are in the collective of one number are in the same one."""

from __future__ import annotations

from dataclasses import dataclass

from ..recorder import Raw, Record
from .finding import Finding

__all__ = ["BATCHES", "Difference", "differs", "explain"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Attributes: kind, "desync", "batches", "parameters" or "lines"; sentence; cause; advice."""

    kind: str
    sentence: str
    cause: str = ""
    advice: str = ""

    def as_warning(self) -> str:
        """What is said of it where it is no error."""
        return f"warning: {self.sentence} {self.cause} {self.advice}"

    def as_finding(self, key: int, sequence: int) -> Finding:
        """The error in the collective `sequence` of the group `key`."""
        kind = "desync" if self.kind == "lines" else self.kind
        return Finding(kind, self.sentence, (), self.cause, self.advice, key, sequence)


def differs(mine: Raw, theirs: Raw, uneven: bool = False) -> str:
    """In what two records of one collective differ: "desync", "batches", "lines" or "" for nothing.

    Args:
        mine: one.
        theirs: the other.
        uneven: ranks have different numbers of batches on purpose.
    """
    if mine.fingerprint != theirs.fingerprint:
        return "desync"
    lines = mine.line != theirs.line and not mine.name
    if mine.loop == theirs.loop and mine.loop and mine.batch != theirs.batch and not uneven:
        both_inside = mine.batch >= 0 and theirs.batch >= 0
        if both_inside or (lines and (mine.batch >= 0) != (theirs.batch >= 0)):
            return "batches"
    return "lines" if lines else ""


def explain(kind: str, ranks: tuple[int, int], calls: tuple[Record, Record]) -> Difference:
    """The same in words.

    Args:
        kind: as `differs` says.
        ranks: the two.
        calls: what each of them has called.
    """
    where = _where(calls[0])
    if kind == "batches":
        sentence = f"Rank {ranks[0]} {_batch(calls[0])}, rank {ranks[1]} {_batch(calls[1])}, in {where}."
        return Difference(kind, sentence, *BATCHES)
    if kind == "lines":
        told = [f"rank {rank} at {call.place}: {call.source}" for rank, call in zip(ranks, calls, strict=True)]
        return Difference(
            kind, f"{calls[0].what} as {where} was called from different lines: {told[0]}; {told[1]}.", *_LINES
        )
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
