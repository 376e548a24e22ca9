"""The cause of the first difference between two runs of a script, with its evidence and what to do
(pure).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import counted
from .comparison import Difference, same_value
from .records import RunRecord, StepRecord


@dataclass(frozen=True)
class Verdict:
    """Why a script differs at another number of workers.

    Attributes:
        cause: in few words, such as "gradient scale".
        evidence: sentences with the values that show it.
        remedy: sentences that say what to do.
    """

    cause: str
    evidence: str
    remedy: str


def _step_of(record: RunRecord, difference: Difference) -> StepRecord | None:
    """Return the step of a record at which runs differ."""
    for step in record.steps:
        if (step.optimizer, step.step) == (difference.optimizer, difference.step):
            return step
    return None


def _samples(ranks: Sequence[RunRecord], number: int) -> Counter[str]:
    """Return the samples of all ranks in the step at a position of the records."""
    return Counter(
        sample
        for rank in ranks
        if number < len(rank.steps)
        for sample in rank.steps[number].samples
    )


def _positions(
    one: Sequence[RunRecord], other: Sequence[RunRecord], difference: Difference
) -> range:
    """Return the positions of the steps up to that of a difference."""
    for position, step in enumerate(one[0].steps):
        if (step.optimizer, step.step) == (difference.optimizer, difference.step):
            return range(position + 1)
    return range(min(len(one[0].steps), len(other[0].steps)))


def same_samples(
    one: Sequence[RunRecord], other: Sequence[RunRecord], difference: Difference
) -> bool:
    """Return whether both runs have used the same samples in each step up to that of a difference.

    True too if the samples are not known.
    """
    return all(
        _samples(one, position) == _samples(other, position)
        for position in _positions(one, other, difference)
    )


def batch_growth(one: Sequence[RunRecord], other: Sequence[RunRecord]) -> tuple[int, int] | None:
    """Return the numbers of samples of the first step of both runs if each worker has as many in
    both; else None.
    """
    sizes = [sum(_samples(ranks, 0).values()) for ranks in (one, other)]
    if (
        0 in sizes
        or sizes[0] * other[0].workers != sizes[1] * one[0].workers
        or sizes[0] == sizes[1]
    ):
        return None
    return sizes[0], sizes[1]


def cause_of(
    one: Sequence[RunRecord], other: Sequence[RunRecord], difference: Difference
) -> Verdict:
    """Return the cause of a difference.

    Args:
        one: the records of all ranks with the first number of workers.
        other: those with another one.
        difference: their first difference.
    """
    names = tuple(counted(ranks[0].workers, "worker") for ranks in (one, other))
    if difference.kind == "parameter":
        return Verdict(
            "initial weights",
            f"{difference.name} differs by {difference.distance:.2g} of its norm before the first "
            "step.",
            "Seed each rank alike, with torch.manual_seed, before the model is made; seed by the "
            "rank after it.",
        )
    if difference.kind == "hyperparameter":
        return _hyperparameter_cause(one, other, difference, names)
    alike = ranks_with_the_same_samples(other)
    if alike is not None and not same_samples(one, other, difference):
        return Verdict(
            "data order",
            f"On {names[1]}, ranks 0 and {alike[0]} train on the same {alike[1]} samples in step "
            "0.",
            "Give each rank its own part: a DistributedSampler for the DataLoader, or the data "
            "loader preparation of "
            "the library that the script uses.",
        )
    growth = batch_growth(one, other)
    if growth is not None and not same_samples(one, other, difference):
        return Verdict(
            "global batch",
            f"A step has {growth[0]} samples on {names[0]} and {growth[1]} on {names[1]}: each "
            "worker takes "
            f"{growth[0] // one[0].workers}.",
            "Divide the global batch by the number of workers, or expect another training: with "
            "more samples a step, "
            "other learning rates are right.",
        )
    if difference.kind == "steps":
        return Verdict(
            "number of steps",
            f"The script makes {difference.values[0]} steps on {names[0]} and "
            f"{difference.values[1]} on {names[1]}.",
            "Let the loop end by the number of global batches: check drop_last, the batch size of "
            "each worker, and "
            "rules that a rank applies to its own part of the data.",
        )
    if not same_samples(one, other, difference):
        return _data_cause(one, other, difference, names)
    if difference.kind == "buffer":
        return _buffer_cause(difference)
    return _gradient_cause(one, other, difference, names)


def dropout_verdict(other: Sequence[RunRecord], difference: Difference) -> Verdict:
    """Return the verdict on a difference that is gone without dropout."""
    alike = len({record.steps[0].draws for record in other if record.steps}) == 1
    masks = (
        "the same masks for dropout, for other samples"
        if alike and len(other) > 1
        else "masks for dropout of its own"
    )
    remedy = "virtual_workers=V of Lockstep makes masks independent of the number of workers."
    if alike and len(other) > 1:
        remedy = (
            "Seed torch by the rank after the model is made, so that no rank repeats another's "
            f"masks. {remedy}"
        )
    return Verdict(
        "random draws",
        f"The gradient of {difference.name} differs by {difference.distance:.2g} of its norm at "
        "step "
        f"{difference.step}: each rank draws {masks}.",
        remedy,
    )


def batch_norm_verdict(other: Sequence[RunRecord], difference: Difference) -> Verdict:
    """Return the verdict on a difference that is gone if batch norm uses its running statistics."""
    layers = [layer for layer in other[0].layers if "BatchNorm" in layer]
    named = f" ({', '.join(layers)})" if layers else ""
    return Verdict(
        "batch norm statistics",
        f"The {difference.kind} of {difference.name} differs by {difference.distance:.2g} of its "
        "norm at step "
        f"{difference.step}: batch norm{named} takes mean and variance from each worker's part of "
        "the batch.",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs; sync_batchnorm=True of "
        "Lockstep's Trainer, or "
        "virtual_workers=V, on all devices.",
    )


def _hyperparameter_cause(
    one: Sequence[RunRecord],
    other: Sequence[RunRecord],
    difference: Difference,
    names: tuple[str, ...],
) -> Verdict:
    values = difference.values
    texts = [_rounded(value) for value in values]
    shown = (
        f"{difference.name} at step {difference.step} is {texts[0]} on {names[0]} and "
        f"{texts[1]} on {names[1]}"
    )
    key = difference.name.partition(" of group ")[0]
    group = int(difference.name.rpartition(" ")[2]) if " of group " in difference.name else 0
    if difference.step == 0:
        ratio = other[0].workers / one[0].workers
        try:
            factor = float(values[1]) / float(values[0])
        except (ValueError, ZeroDivisionError):
            factor = math.nan
        if key == "lr" and (
            math.isclose(factor, ratio, rel_tol=1e-3)
            or math.isclose(factor, ratio**0.5, rel_tol=1e-3)
        ):
            return Verdict(
                "learning rate",
                f"{shown}: it is multiplied by {factor:.3g}, for {ratio:g} times as many workers.",
                "Scale the learning rate by the global batch, not by the number of workers: with "
                "the same global batch "
                "it stays as it is.",
            )
        return Verdict(
            "hyperparameters",
            f"{shown}, before any update.",
            "Compute it from the global batch and the number of global steps, which no number of "
            "workers changes.",
        )
    moved = _moves_of_schedule(one[0], values[1], key, group, difference)
    if moved is not None:
        return Verdict(
            "learning-rate steps",
            f"{shown}, as {names[0]} has it at step {moved}: the schedule moves "
            f"{moved / difference.step:g} times a step.",
            "Step the scheduler once a global batch. Accelerate steps a prepared scheduler once "
            "for each worker, for "
            "schedules in samples: use Accelerator(step_scheduler_with_optimizer=False) and leave "
            "the scheduler out of "
            "prepare(), or split_batches=True.",
        )
    if not same_samples(one, other, difference):  # an epoch ends earlier, and the schedule moves
        return _data_cause(one, other, difference, names)
    return Verdict(
        "learning-rate steps" if key == "lr" else "hyperparameters",
        f"{shown}.",
        "It is changed by calls whose number depends on the number of workers. Step schedulers "
        "once a global batch, and "
        "compute their length from the number of global batches.",
    )


def follows_batch(
    one: Sequence[RunRecord], other: Sequence[RunRecord], difference: Difference
) -> str | None:
    """Return what a hyperparameter does if it is scaled as the global batch of the script is; None
    if it is not.

    Args:
        one: the records of a script whose global batch grows with the number of workers, with one
            of them; what is compared has the same global batch.
        other: those with another number of workers.
        difference: their first difference.
    """
    if difference.kind != "hyperparameter":
        return None
    ratio = other[0].workers / one[0].workers
    values = " and ".join(map(_rounded, difference.values))
    shown = f"{difference.name} at step {difference.step} is {values}"
    key, _, group = difference.name.partition(" of group ")
    if difference.step == 0:
        try:
            factor = float(difference.values[1]) / float(difference.values[0])
        except (ValueError, ZeroDivisionError):
            return None
        if key != "lr" or not any(
            math.isclose(factor, expected, rel_tol=1e-3) for expected in (ratio, ratio**0.5)
        ):
            return None
        return (
            f"{shown}: it is scaled with the global batch that the script has. Compared was the "
            "first step."
        )
    if (
        _moves_of_schedule(one[0], difference.values[1], key, int(group or 0), difference)
        != difference.step * ratio
    ):
        return None
    return (
        f"{shown}: the schedule moves {ratio:g} times as far a step, as the script's global batch "
        "grows. With a fixed "
        "global batch it would depend on the number of workers. Compared were the steps until then."
    )


def _rounded(value: str) -> str:
    """Return a number in at most eight digits, and any other value as it is."""
    try:
        return f"{float(value):.8g}"
    except ValueError:
        return value


def _moves_of_schedule(
    one: RunRecord, value: str, key: str, group: int, difference: Difference
) -> int | None:
    """Return the later step of the first run that has a hyperparameter's value of the other one;
    None without one.
    """
    for step in one.steps:
        if (
            step.optimizer == difference.optimizer
            and step.step > difference.step
            and group < len(step.hyperparameters)
            and same_value(step.hyperparameters[group].get(key, ""), value)
        ):
            return step.step
    return None


def ranks_with_the_same_samples(ranks: Sequence[RunRecord]) -> tuple[int, int] | None:
    """Return (rank, number of samples) of the first rank that has the samples of rank 0 in the
    first step.
    """
    first = _samples(ranks[:1], 0)
    for record in ranks[1:]:
        if first and _samples([record], 0) == first:
            return record.rank, sum(first.values())
    return None


def _data_cause(
    one: Sequence[RunRecord],
    other: Sequence[RunRecord],
    difference: Difference,
    names: tuple[str, ...],
) -> Verdict:
    for position in _positions(one, other, difference):
        left = _samples(one, position)
        right = _samples(other, position)
        if left == right:
            continue
        count = one[0].steps[position].step
        common = (left & right).total()
        evidence = (
            f"In step {count}, {common} of {left.total()} samples on {names[0]} are among the "
            f"{right.total()} on "
            f"{names[1]}."
        )
        repeated = right.total() - len(right)
        if common == left.total() < right.total():
            return Verdict(
                "data order",
                f"{evidence} {right.total() - left.total()} more were added so that all workers "
                "have as many.",
                "A DistributedSampler without drop_last repeats samples at the end of an epoch, "
                "and Accelerate with "
                "even_batches does: make the size of the data set, or of its last batch, "
                "divisible by the number of workers.",
            )
        if repeated and common > left.total() / 2:
            evidence += f" {repeated} of them are repeated."
        if common > left.total() / 2 or left.total() != right.total():
            remedy = (
                "The end of an epoch depends on the number of workers: drop_last and the padding "
                "of samplers count each "
                "worker's part. Make the size of the data set divisible by the global batch, or "
                "drop the rest before it "
                "is divided."
            )
        else:
            remedy = (
                "Shuffle by the same rule at every number of workers: a DistributedSampler on one "
                "worker too, with "
                "set_epoch; in Accelerate DataLoaderConfiguration(use_seedable_sampler=True). If "
                "the order is the same, "
                "augmentation draws numbers that depend on the worker: key them by (seed, epoch, "
                "sample)."
            )
        return Verdict("data order", evidence, remedy)
    raise ValueError("the samples are the same")


def _buffer_cause(difference: Difference) -> Verdict:
    evidence = (
        f"{difference.name} differs by {difference.distance:.2g} of its norm at step "
        f"{difference.step}."
    )
    if difference.name.endswith("n_averaged"):
        remedy = (
            "The average is updated once for each call on a worker. Update it once a global "
            "batch: give it to "
            "lockstep.prepare, or use lockstep.callbacks.AveragedWeights with the Trainer."
        )
    else:
        remedy = (
            "It is computed from a worker's own part of the batch. Statistics over the whole "
            "batch need "
            "synchronised batch norm: sync_batchnorm=True of Lockstep's Trainer, or "
            "torch.nn.SyncBatchNorm."
        )
    return Verdict("buffers", evidence, remedy)


def _gradient_cause(
    one: Sequence[RunRecord],
    other: Sequence[RunRecord],
    difference: Difference,
    names: tuple[str, ...],
) -> Verdict:
    left = _step_of(one[0], difference)
    right = _step_of(other[0], difference)
    where = f"The gradient at step {difference.step}"
    if left is not None and right is not None and not math.isnan(difference.scale):
        shown = (
            f"{where} is {difference.scale:.4g} times as large on {names[1]} as on {names[0]}, "
            "in the same direction."
        )
        ratio = other[0].workers / one[0].workers
        passes = right.passes / left.passes if left.passes else math.nan
        if passes != 1 and math.isclose(difference.scale, passes, rel_tol=0.02):
            return Verdict(
                "gradient scale",
                f"{shown} A rank has {left.passes} forward passes a step on {names[0]} and "
                f"{right.passes} on {names[1]}.",
                "Divide the loss by the number of accumulated passes, so that the step is that of "
                "their mean.",
            )
        if math.isclose(difference.scale, ratio, rel_tol=0.02):
            return Verdict(
                "gradient scale",
                shown,
                "It is a sum over the workers where there should be the mean over the global "
                "batch: divide by the number "
                "of workers once, or use DistributedDataParallel, which does.",
            )
        if math.isclose(difference.scale, 1 / ratio, rel_tol=0.02):
            return Verdict(
                "gradient scale",
                shown,
                "The loss is a sum over a worker's samples (reduction='sum'), of which "
                "DistributedDataParallel takes the "
                "mean over workers: divide by the number of samples of the global batch, and "
                "multiply by the number of "
                "workers; or use the mean.",
            )
        return Verdict(
            "gradient scale",
            shown,
            "Look for a factor that depends on the number of workers: in the loss, its "
            "normalisation, or gradient "
            "accumulation.",
        )
    uneven = _uneven_counts(other, difference)
    if uneven is not None:
        counts, what = uneven
        return Verdict(
            "gradient scale",
            f"At step {difference.step} the loss is a mean over {' and '.join(map(str, counts))} "
            f"{what} on ranks 0 and 1 of "
            f"{names[1]}, and the mean of these means gives the smaller part more weight. {where} "
            "differs by "
            f"{difference.distance:.2g} of its norm in {difference.name}.",
            "Divide each worker's sum by the count of the global batch (all-reduce it first), "
            "times the number of workers.",
        )
    evidence = (
        f"{where} differs by {difference.distance:.2g} of its norm in {difference.name}; samples "
        "and hyperparameters are the same."
    )
    if one[0].has_draws or other[0].has_draws:
        return Verdict(
            "random draws",
            f"{evidence} Forward passes draw random numbers{_draws_in_words(other)}.",
            "Let the draws depend on the sample, not on the worker. virtual_workers=V of Lockstep "
            "makes those of torch "
            "independent of the number of workers.",
        )
    return Verdict(
        "loss",
        evidence,
        "Look for a loss over a worker's whole part of the batch (in-batch negatives, a batch F1, "
        "a mean over what each "
        "part counts), and for gradients that are changed by hand before they are reduced.",
    )


def _uneven_counts(
    ranks: Sequence[RunRecord], difference: Difference
) -> tuple[tuple[int, int], str] | None:
    """Return what the first two ranks count in a step if it is not the same."""
    steps = [
        step for step in (_step_of(record, difference) for record in ranks) if step is not None
    ]
    if len(steps) < 2:
        return None
    if steps[0].targets and steps[1].targets and len({step.targets for step in steps}) > 1:
        other = next(step for step in steps[1:] if step.targets != steps[0].targets)
        return (steps[0].targets, other.targets), "targets"
    if len({len(step.samples) for step in steps}) > 1:
        shorter = next(step for step in steps[1:] if len(step.samples) != len(steps[0].samples))
        return (len(steps[0].samples), len(shorter.samples)), "samples"
    return None


def _draws_in_words(ranks: Sequence[RunRecord]) -> str:
    """Return what follows "draw random numbers": whether ranks draw the same ones."""
    states = [record.steps[0].draws for record in ranks if record.steps]
    if len(states) < 2:
        return ""
    alike = len(set(states)) == 1
    return ", the same ones on each rank" if alike else ", other ones on each rank"
