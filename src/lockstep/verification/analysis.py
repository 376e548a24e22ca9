"""Which runs of a script tell whether it depends on the number of workers, and the verdict that
they give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import counted
from .causes import (
    Verdict,
    batch_growth,
    batch_norm_verdict,
    cause_of,
    dropout_verdict,
    follows_batch,
    ranks_with_the_same_samples,
    same_samples,
)
from .comparison import Comparison, Difference, compare, compare_before, diverging_ranks
from .held import Held
from .records import RunRecord

Run = Callable[[int, Held, str], list[RunRecord]]


@dataclass(frozen=True)
class Row:
    """A run, compared with the first one of its kind.

    Attributes:
        name: such as "2 workers, same global batch".
        steps: recorded steps of rank 0.
        comparison: None for a first run.
    """

    name: str
    steps: int
    comparison: Comparison | None


@dataclass(frozen=True)
class Analysis:
    """What the runs of a script have told.

    Attributes:
        rows: the runs, in order.
        difference: the first difference that rounding does not explain, in the runs that decided;
            None if there is none.
        names: of the two numbers of workers that differ, such as ("1 worker", "2 workers").
        verdict: why the script gives another result at another number of workers; None if it does
            not.
        notes: sentences on what was held, and on what else is worth knowing.
        several_optimizers: whether the script has more than one optimizer.
    """

    rows: tuple[Row, ...]
    difference: Difference | None = None
    names: tuple[str, str] = ("", "")
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()
    several_optimizers: bool = False


def analyse(run: Run, counts: Sequence[int]) -> Analysis:
    """Run a script at each number of workers, twice at the first, and find out why it differs, if
    it does.

    What frameworks do by convention, and what hides other differences, is then held the same in
        further runs: the
    global batch, where each worker's batch has a fixed size; the order of samplers of torch;
    dropout; the statistics of batch norm. What still differs is the verdict; if nothing does, it is
    what was held, except for the global batch.

    Args:
        run: runs the script on a number of workers and returns the records of its ranks; it gets
            what is held, and a name for the user.
        counts: numbers of workers.
    """
    rows: list[Row] = []
    runs: dict[str, list[RunRecord]] = {}
    for count in (counts[0], *counts):
        name = counted(count, "worker")
        name = f"{name} again" if name in runs else name
        runs[name] = run(count, Held(), name)
        first = next(iter(runs.values()))
        comparison = compare(first[0], runs[name][0]) if len(runs) > 1 else None
        rows.append(Row(name, len(runs[name][0].steps), comparison))
    reference, again, *others = runs.values()
    several = len({step.optimizer for step in reference[0].steps}) > 1
    for name, records in runs.items():
        diverged = diverging_ranks(records)
        if diverged is not None:
            rank, step, parameter = diverged
            verdict = Verdict(
                "synchronisation",
                f"On {name}, rank {rank} has another {parameter} than rank 0 before step {step}: "
                "the gradients are not "
                "summed over the workers, or each of them updates its model by its own rules.",
                "Wrap the model in DistributedDataParallel, call the wrapped model, and leave "
                "no_sync() in the last "
                "forward and backward pass before the step.",
            )
            return Analysis(tuple(rows), None, (name, name), verdict)
    repeated = compare(reference[0], again[0]).difference
    if repeated is not None:
        name = counted(counts[0], "worker")
        verdict = Verdict(
            "seeds",
            f"Not the number of workers: two runs with {name} differ too, at step "
            f"{max(repeated.step, 0)}.",
            "Seed what the script draws (torch.manual_seed, numpy.random.seed, random.seed, "
            "random_state of "
            "scikit-learn) before it is drawn.",
        )
        return Analysis(tuple(rows), repeated, (name, f"{name} again"), verdict, (), several)
    notes = []
    if any(records[0].repeated_order for records in runs.values()):
        notes.append(
            "A DistributedSampler shuffles every epoch alike: call its set_epoch(epoch) before "
            "each epoch."
        )
    for other in others:
        difference = compare(reference[0], other[0]).difference
        if difference is not None:
            break
    else:
        return Analysis(tuple(rows), notes=tuple(notes))
    return _find_cause(run, rows, (reference, other), difference, math.lcm(*counts), notes, several)


def _find_cause(
    run: Run,
    rows: list[Row],
    pair: tuple[list[RunRecord], list[RunRecord]],
    difference: Difference,
    parts: int,
    notes: list[str],
    several: bool,
) -> Analysis:
    """Return the analysis of two runs that differ, after further runs in which more is held the
    same.
    """
    counts = (pair[0][0].workers, pair[1][0].workers)
    names = (counted(counts[0], "worker"), counted(counts[1], "worker"))
    held = Held()

    def run_held(what: str) -> tuple[tuple[list[RunRecord], list[RunRecord]], Comparison]:
        held_pair = (
            run(counts[0], held, f"{names[0]}, {what}"),
            run(counts[1], held, f"{names[1]}, {what}"),
        )
        comparison = compare(held_pair[0][0], held_pair[1][0])
        rows.append(Row(f"{names[0]}, {what}", len(held_pair[0][0].steps), None))
        rows.append(Row(f"{names[1]}, {what}", len(held_pair[1][0].steps), comparison))
        return held_pair, comparison

    one, other = pair
    growth = batch_growth(one, other)
    alike = ranks_with_the_same_samples(other)
    if growth is not None and alike is None and all(records[0].divides_batches for records in pair):
        held = replace(held, batch_parts=parts)
        pair, comparison = run_held("same global batch")
        notes.append(
            f"Each worker's batch has {growth[0] // counts[0]} samples, so a step has {growth[0]} "
            f"on {names[0]} and "
            f"{growth[1]} on {names[1]}. Compared were runs with the same global batch, each "
            "worker's being a part of it."
        )
        one, other = pair
        scaled = None
        if comparison.difference is not None:
            scaled = follows_batch(one, other, comparison.difference)
        if scaled is not None and comparison.difference is not None:
            notes.append(scaled)
            comparison = compare_before(one[0], other[0], comparison.difference)
        elif comparison.difference is None:
            notes.append(
                "Hyperparameters are the same at both: learning rates are usually scaled with the "
                "global batch."
            )
        if comparison.difference is None:
            return Analysis(tuple(rows), notes=tuple(notes))
        difference = comparison.difference
    other_samples = difference.kind == "gradient" and not same_samples(one, other, difference)
    if difference.kind in ("gradient", "buffer", "steps") and (alike is None or held.batch_parts):
        conditions = {
            "the same order of samples": other_samples,
            "no dropout": one[0].has_dropout or other[0].has_dropout,
            "batch norm by its running statistics": one[0].has_batch_statistics
            or other[0].has_batch_statistics,
        }
        applied = [name for name, applies in conditions.items() if applies]
        if applied:
            order, dropout, batch_norm = conditions.values()
            held = replace(held, order=order, dropout=dropout, batch_norm=batch_norm)
            (held_one, held_other), comparison = run_held(", ".join(applied))
            shown = f"With {' and '.join(applied)}"
            if comparison.difference is None:
                proof = (
                    f"{shown}, all steps agree up to rounding ({comparison.largest:.1g} of the "
                    "gradients' norm)."
                )
                if order:
                    verdict = cause_of(one, other, difference)
                elif dropout:
                    verdict = dropout_verdict(other, difference)
                else:
                    verdict = batch_norm_verdict(other, difference)
                verdict = replace(verdict, evidence=f"{verdict.evidence} {proof}")
                return Analysis(tuple(rows), difference, names, verdict, tuple(notes), several)
            if dropout or batch_norm:
                notes.append(f"{shown} in both runs; what is said above differs all the same.")
            one, other, difference = held_one, held_other, comparison.difference
    verdict = cause_of(one, other, difference)
    return Analysis(tuple(rows), difference, names, verdict, tuple(notes), several)
