"""Differences between ranks' records of one collective: which there are, whether they are errors,
and what is said of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..flight_recorder import RawRecord, Record
from .report import Finding, advice_on_method, method_in
from .states import RecordRow

KINDS = ("desync", "ended", "swap", "batches", "lines")
"""How two records of one collective can differ, the gravest first.

"desync": the calls themselves differ; "ended": one rank has run out of batches and the other has
not; "swap": one rank makes two like calls in another order; "batches": different batches of one
loop; "lines": different lines.
"""


def is_error(kind: str, strict: bool) -> bool:
    """Return whether a difference is an error, not a warning: programs branch, and skip a bad
    batch, on purpose.
    """
    return strict or kind not in ("batches", "lines")


def compare_records(
    mine: RawRecord | RecordRow, theirs: RawRecord | RecordRow, uneven: bool = False
) -> Iterator[str]:
    """Yield how two records of one collective differ, the gravest first; a "swap" does not show in
    one collective.

    Args:
        mine: one record.
        theirs: the other one.
        uneven: whether ranks have different numbers of batches on purpose.
    """
    if mine.fingerprint != theirs.fingerprint:
        yield "desync"
    # under `Join` a rank that has run out of batches makes the collectives of the others, on a line
    # of torch's
    lines = mine.line != theirs.line and not mine.name and not uneven
    if mine.loop == theirs.loop and mine.loop and mine.batch != theirs.batch and not uneven:
        if mine.batch >= 0 and theirs.batch >= 0:
            yield "batches"
        elif lines and (mine.batch >= 0) != (theirs.batch >= 0):
            yield "ended"
    if lines:
        yield "lines"


def describe_difference(kind: str, ranks: tuple[int, int], calls: tuple[Record, Record]) -> Finding:
    """Return what is wrong where two ranks differ.

    Args:
        kind: one of `KINDS`.
        ranks: the two ranks.
        calls: their records; without a call site where only what is compared is known.
    """
    where = describe_collective(calls[0].sequence, calls[0].group)
    if kind in ("batches", "ended"):
        progress = []
        for rank, call in zip(ranks, calls, strict=True):
            how = "ran out of batches after" if call.finished else "is on batch"
            progress.append(f"rank {rank} {how} {call.batch}")
        sentence = f"Batch mismatch at {where}: {', '.join(progress)}."
        return Finding("batches", sentence, (), *_BATCH_ADVICE)
    if kind in ("lines", "swap"):
        sites = [
            f"rank {rank} at {call.call_site}: {call.source}"
            for rank, call in zip(ranks, calls, strict=True)
        ]
        title = "Call site mismatch" if kind == "lines" else "Swapped collectives"
        sentence = f"{title} at {where}: {calls[0].what} was called by {sites[0]}; by {sites[1]}."
        return Finding("desync", sentence, (), *(_LINE_ADVICE if kind == "lines" else _SWAP_ADVICE))
    if all(call.what.startswith("model(") for call in calls):
        models = [
            f"rank {rank} has {call.what.removeprefix('model')}"
            for rank, call in zip(ranks, calls, strict=True)
        ]
        sentence = f"The models differ in their parameters: {', '.join(models)}."
        return Finding("parameters", sentence, (), *_MODEL_ADVICE)
    is_named = len({call.name for call in calls}) > 1
    called = []
    for rank, call in zip(ranks, calls, strict=True):
        name = f" named {call.name!r}" if is_named and call.name else ""
        site = f" at {call.call_site}" if call.call_site else ""
        called.append(f"rank {rank} called {call.what}{name}{site}")
    return Finding(
        "desync", f"Desync at {where}: {', '.join(called)}.", (), *_cause_and_advice(ranks, calls)
    )


def describe_collective(sequence: int, group: str) -> str:
    """Return ``collective #6 of the default group``, or ``... of group tp``."""
    of_group = f"group {group}" if group else "the default group"
    return f"collective #{sequence} of {of_group}"


def size_finding(ranks: tuple[int, int], sizes: tuple[int, int], tag: int, call: str) -> Finding:
    """Return the finding for a message that is larger than its receive.

    Args:
        ranks: source and destination.
        sizes: of the message and of the tensor that is to receive it, in bytes.
        tag: of the message.
        call: the one of both that came second, as text.
    """
    of_tag = f" (tag {tag})" if tag else ""
    return Finding(
        "desync",
        f"Rank {ranks[0]} sends {sizes[0]:,} bytes to rank {ranks[1]}{of_tag}, which receives "
        f"into {sizes[1]:,} bytes, in {call}.",
        (),
        "The tensors of this send and recv have other shapes or dtypes, or messages are received "
        "in another order than they were sent.",
        "Receive into a tensor of the shape and dtype that is sent, in the order of the sends; "
        "give messages that may overtake each other tags.",
    )


# Likely cause, and what to do.

_LINE_ADVICE = (
    "Two collectives are called in another order on one rank, or a collective that only one rank "
    "calls was matched with another one.",
    "Call the same collectives in the same order on every rank. If ranks branch here on purpose, "
    "nothing is wrong: "
    'lockstep.flight_recorder.named("...") names a collective, and LOCKSTEP_WATCHDOG=strict '
    "makes this an error.",
)

_SWAP_ADVICE = (
    "Each rank has just called what the other one calls now: a loop calls the same items in "
    "another order on one rank, as over a set, or over a dictionary that was filled in another "
    "order.",
    "Iterate in the same order on every rank, for example over sorted items. If nothing is "
    "wrong, give both "
    'collectives the same name: with lockstep.flight_recorder.named("...").',
)

_BATCH_ADVICE = (
    "A rank has skipped a batch, has taken an extra one, or has fewer batches than another.",
    "Let every rank take the same number of batches. If the numbers differ on purpose, call "
    "lockstep.flight_recorder.note_batch(-1) after each batch.",
)

_MODEL_ADVICE = (
    "The model has other layers, other sizes, or another order of layers on one rank.",
    "Build the same model on every rank: the class, its options and its layers must not depend on "
    "the rank.",
)


_SAME_ORDER = "Call the same collectives in the same order on every rank of the group."


def _cause_and_advice(ranks: tuple[int, int], calls: tuple[Record, Record]) -> tuple[str, str]:
    first, second = calls
    methods = [method_in(call.name) for call in calls]
    if methods[0] != methods[1]:
        at = max(
            (0, 1), key=lambda number: (methods[number] != "Trainer.fit") * len(methods[number])
        )
        at = at if methods[at] else 1 - at
        others = f"in {methods[1 - at]}" if methods[1 - at] else "not"
        return (
            f"Rank {ranks[at]} is in {methods[at]}, rank {ranks[1 - at]} is {others}: it is "
            "called in a branch that only some ranks take.",
            advice_on_method(methods[at]),
        )
    if not (first.call_site and second.call_site):
        return (
            "A collective is in a branch that only some ranks take, or their tensors differ.",
            _SAME_ORDER,
        )
    same_operation = first.what.partition("(")[0] == second.what.partition("(")[0]
    if first.loop == second.loop and first.finished != second.finished and not same_operation:
        return (
            "One rank has fewer batches than another, and has continued with what follows the "
            "loop.",
            "Give every rank the same number of batches, e.g. with a DistributedSampler, "
            "drop_last=True or lockstep.Loader.",
        )
    if not same_operation or first.call_site != second.call_site or first.name != second.name:
        return (
            "A collective is in a branch that only some ranks take, or ranks call collectives in "
            "different orders.",
            _SAME_ORDER,
        )
    return (
        "Tensors have different shapes or dtypes on some ranks: a smaller last batch, another "
        "model, or mixed precision on some ranks only.",
        "Give the tensors the same shape and dtype on every rank before the collective.",
    )
