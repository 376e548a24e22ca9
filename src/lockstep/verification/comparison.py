"""What differs first between the steps of one script at two numbers of workers, and the likely
cause (pure).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

__all__ = [
    "Comparison",
    "Difference",
    "RunRecord",
    "StepRecord",
    "TensorRecord",
    "compare",
    "diverging_ranks",
    "likely_cause",
    "tolerance",
]


# --- Records
# --------------------------------------------------------------------------------------------------


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor, in short.

    Attributes:
        digest: of all its bits.
        numel: number of its elements.
        norm: its 2-norm.
        sample: the values of some of its elements, always the same ones.
    """

    digest: str
    numel: int
    norm: float
    sample: tuple[float, ...]


class StepRecord(msgspec.Struct, frozen=True):
    """An optimizer and its tensors when its ``step()`` is called; clipping and reduction are done
    by then.

    Attributes:
        optimizer: the number of the optimizer, in the order of their first steps.
        step: the number of this optimizer's step, from 0.
        hyperparameters: those of each parameter group, as texts by name.
        parameters: by name, before the update.
        gradients: by the parameter's name.
        buffers: of all models, and their parameters that are not this optimizer's, by name.
    """

    optimizer: int
    step: int
    hyperparameters: tuple[dict[str, str], ...]
    parameters: dict[str, TensorRecord]
    gradients: dict[str, TensorRecord]
    buffers: dict[str, TensorRecord]


class RunRecord(msgspec.Struct, frozen=True):
    """The steps of one rank.

    Attributes:
        rank: the rank.
        workers: number of workers of the run.
        steps: of all optimizers, in order.
        layers: the classes of the models' layers.
        low_precision: whether some pass ran with autocast, or some gradient has a format of 16
            bits.
    """

    rank: int
    workers: int
    steps: tuple[StepRecord, ...]
    layers: tuple[str, ...] = ()
    low_precision: bool = False


# --- Comparison
# --------------------------------------------------------------------------------------------------

_GRADIENT = "gradient"
_PARAMETER = "parameter"
_BUFFER = "buffer"

# Rounding in float32 moves the gradient of a first step by some 1e-7 to 1e-5 of its norm
# (convolutions, normalisation in small batches), and each update about doubles the distance of two
# runs, at usual learning rates.
_FIRST_TOLERANCE = 1e-4
_GROWTH = 3.0
_LARGEST_TOLERANCE = 0.03
_LOW_PRECISION_TOLERANCE = 0.03  # a bfloat16 has eight bits


def tolerance(step: int, low_precision: bool) -> float:
    """Return how much of a gradient's norm rounding may explain at a step."""
    if low_precision:
        return _LOW_PRECISION_TOLERANCE
    return float(min(_FIRST_TOLERANCE * _GROWTH**step, _LARGEST_TOLERANCE))


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs that rounding does not explain.

    Attributes:
        step: the number of the optimizer's step; -1 if one run made fewer steps.
        optimizer: the number of the optimizer.
        kind: "steps", "parameter", "hyperparameter", "gradient" or "buffer".
        name: of the tensor or hyperparameter; "" for steps.
        values: texts of both values, for hyperparameters and steps.
        distance: the norm of the difference over the norm of the first; NaN where it has no
            meaning.
        ratio: the norm of the second over that of the first.
    """

    step: int
    optimizer: int
    kind: str
    name: str = ""
    values: tuple[str, str] = ("", "")
    distance: float = math.nan
    ratio: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        difference: the first one that rounding does not explain; None if there is none.
        same_bits: whether all tensors of all steps have the same bits.
        largest: the largest distance of the gradients of a step that rounding explains.
    """

    difference: Difference | None
    same_bits: bool
    largest: float


def compare(one: RunRecord, other: RunRecord) -> Comparison:
    """Compare two runs step by step, up to the first difference that rounding does not explain."""
    largest = 0.0
    same_bits = True
    low_precision = one.low_precision or other.low_precision
    for first, second in zip(one.steps, other.steps, strict=False):
        same_bits = same_bits and _digests(first) == _digests(second)
        difference, distance = _compare_step(first, second, low_precision)
        if difference is not None:
            return Comparison(difference, False, largest)
        largest = max(largest, distance)
    if len(one.steps) != len(other.steps):
        counts = (str(len(one.steps)), str(len(other.steps)))
        return Comparison(Difference(-1, 0, "steps", values=counts), False, largest)
    return Comparison(None, same_bits, largest)


def diverging_ranks(ranks: Sequence[RunRecord]) -> tuple[int, int, str] | None:
    """Return (rank, step, parameter) of the first parameter that differs among the workers of one
    run, if one does.
    """
    for first, *others in zip(*(record.steps for record in ranks), strict=False):
        for record, step in zip(ranks[1:], others, strict=True):
            for name, tensor in first.parameters.items():
                if name in step.parameters and step.parameters[name].digest != tensor.digest:
                    return record.rank, step.step, name
    return None


def _compare_step(
    first: StepRecord, second: StepRecord, low_precision: bool
) -> tuple[Difference | None, float]:
    """Return the first difference of a step that rounding does not explain, and the distance of its
    gradients.
    """
    number = first.step
    optimizer = first.optimizer
    limit = tolerance(first.step, low_precision)
    at_first = number == 0 and any(map(_bits_differ, *_paired(first.parameters, second.parameters)))
    for name, left, right in _pairs(first.parameters, second.parameters) if at_first else ():
        if _distance(left, right) > 1e-6:
            return Difference(0, optimizer, _PARAMETER, name, ("", ""), _distance(left, right)), 0.0
    for group, (left_group, right_group) in enumerate(
        zip(first.hyperparameters, second.hyperparameters, strict=False)
    ):
        for name, value in left_group.items():
            if not _same_value(value, right_group.get(name, "missing")):
                values = (value, right_group.get(name, "missing"))
                where = name if len(first.hyperparameters) == 1 else f"{name} of group {group}"
                return Difference(number, optimizer, "hyperparameter", where, values), 0.0
    whole = _whole_distance(first.gradients, second.gradients)
    if whole > limit or first.gradients.keys() != second.gradients.keys():
        name, distance, ratio = _worst_first(first.gradients, second.gradients, limit)
        return Difference(number, optimizer, _GRADIENT, name, ("", ""), distance, ratio), whole
    for name, left, right in _pairs(first.buffers, second.buffers):
        if _distance(left, right) > max(limit, 1e-3):
            return Difference(
                number, optimizer, _BUFFER, name, ("", ""), _distance(left, right)
            ), whole
    return None, whole


def _worst_first(
    first: Mapping[str, TensorRecord], second: Mapping[str, TensorRecord], limit: float
) -> tuple[str, float, float]:
    """Return (name, distance, ratio of norms) of the first gradient, in the model's order, that
    differs by `limit`.
    """
    total = math.sqrt(sum(tensor.norm**2 for tensor in first.values()))
    for name in first.keys() ^ second.keys():
        return name, math.inf, math.nan
    distances = {
        name: (left, right, _gap(left, right)) for name, left, right in _pairs(first, second)
    }
    for name, (left, right, gap) in distances.items():
        # a gradient that is nothing but rounding, such as that of a bias before batch norm, tells
        # nothing
        if gap > limit * max(left.norm, 0.01 * total):
            return name, gap / (left.norm or 1.0), right.norm / (left.norm or 1.0)
    name, (left, right, gap) = max(distances.items(), key=lambda each: each[1][2])
    return name, gap / (left.norm or 1.0), right.norm / (left.norm or 1.0)


def _whole_distance(first: Mapping[str, TensorRecord], second: Mapping[str, TensorRecord]) -> float:
    total = math.sqrt(sum(tensor.norm**2 for tensor in first.values()))
    gap = math.sqrt(sum(_gap(left, right) ** 2 for _, left, right in _pairs(first, second)))
    return gap / total if total > 0 else gap


def _distance(left: TensorRecord, right: TensorRecord) -> float:
    gap = _gap(left, right)
    return gap / left.norm if left.norm > 0 else gap


def _gap(left: TensorRecord, right: TensorRecord) -> float:
    """Return the norm of the difference, as far as the samples show it."""
    if left.digest == right.digest:
        return 0.0
    if left.numel != right.numel:
        return math.inf
    squares = sum(
        (a - b) ** 2
        for a, b in zip(left.sample, right.sample, strict=True)
        if not _same_number(a, b)
    )
    of_sample = math.sqrt(squares * left.numel / max(len(left.sample), 1))
    of_norm = 0.0 if _same_number(left.norm, right.norm) else abs(left.norm - right.norm)
    largest = max(of_sample, of_norm)
    return math.inf if math.isnan(largest) else largest


def _same_number(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _same_value(a: str, b: str) -> bool:
    """Return whether two values of a hyperparameter are equal, up to rounding."""
    if a == b:
        return True
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6)
    except ValueError:
        return False


def _bits_differ(left: TensorRecord, right: TensorRecord) -> bool:
    return left.digest != right.digest


def _paired(
    first: Mapping[str, TensorRecord], second: Mapping[str, TensorRecord]
) -> tuple[list[TensorRecord], list[TensorRecord]]:
    names = [name for name in first if name in second]
    return [first[name] for name in names], [second[name] for name in names]


def _pairs(
    first: Mapping[str, TensorRecord], second: Mapping[str, TensorRecord]
) -> Iterator[tuple[str, TensorRecord, TensorRecord]]:
    for name, tensor in first.items():
        if name in second:
            yield name, tensor, second[name]


def _digests(step: StepRecord) -> list[tuple[str, str]]:
    tensors = (step.parameters, step.gradients, step.buffers)
    return [(name, tensor.digest) for each in tensors for name, tensor in each.items()]


# --- Likely cause
# --------------------------------------------------------------------------------------------------

_RANDOM_LAYERS = (
    "Dropout",
    "AlphaDropout",
    "FeatureAlphaDropout",
    "DropPath",
    "StochasticDepth",
    "RReLU",
)
_NORMS = ("BatchNorm", "SyncBatchNorm")


def likely_cause(
    one: RunRecord, other: RunRecord, found: Difference, repeated: Difference | None
) -> str:
    """Return one or two sentences on the likely cause of a difference, and its remedy.

    Args:
        one: the run with the first number of workers.
        other: that with another one.
        found: their first difference.
        repeated: the first difference between `one` and a second run with as many workers; None if
            there is none.
    """
    if repeated is not None:
        return (
            "not the number of workers: two runs with the same number differ too. Seed what the "
            "script draws (torch.manual_seed, numpy.random.seed, random.seed, random_state of "
            "scikit-learn) before it is drawn."
        )
    if found.kind == "steps":
        return (
            "the runs make different numbers of steps. The batch size is that of each worker, not "
            "the global batch, or the loop ends by another rule at another number of workers."
        )
    if found.kind == _PARAMETER:
        return (
            "the models begin with other weights: seed each rank alike, with torch.manual_seed, "
            "before the model."
        )
    if found.kind == "hyperparameter":
        return (
            f"{found.name} is changed once for each call on a worker, so its value follows from "
            "the number of workers. Step schedulers once a global batch: give them to "
            "lockstep.prepare or to the Trainer."
        )
    if found.kind == _BUFFER and found.name.endswith("n_averaged"):
        return (
            "the average is updated once for each call on a worker. Update it once a global "
            "batch: give it to lockstep.prepare, or use lockstep.callbacks.AveragedWeights with "
            "the Trainer."
        )
    if found.kind == _BUFFER:
        return (
            f"the buffer {found.name} is computed from a worker's own part of the batch. "
            "Statistics over the whole batch need synchronised batch norm: sync_batchnorm=True of "
            "the Trainer, or torch.nn.SyncBatchNorm."
        )
    return _gradient_cause(one, other, found)


def _gradient_cause(one: RunRecord, other: RunRecord, found: Difference) -> str:
    for factor, text in (
        (other.workers / one.workers, "sum"),
        (one.workers / other.workers, "mean"),
    ):
        if factor != 1 and math.isclose(found.ratio, factor, rel_tol=0.02) and found.distance > 0.3:
            return (
                f"the gradient is {found.ratio:.2g} times as large: a {text} over the workers "
                "where there should be the mean over the global batch. A loss with "
                "reduction='sum' needs its count, and an own loop the mean over all workers' "
                "samples."
            )
    random = [
        layer for layer in one.layers if layer in _RANDOM_LAYERS or layer.startswith("Dropout")
    ]
    if random:
        return (
            f"the model has {', '.join(random)}: each worker draws masks of its own. "
            "virtual_workers=V makes them independent of the number of workers."
        )
    norms = [layer for layer in one.layers if layer.startswith(_NORMS)]
    if norms and not any(layer.startswith("SyncBatchNorm") for layer in norms):
        return (
            f"the model has {', '.join(norms)}: its statistics are those of each worker's part of "
            "the batch. sync_batchnorm=True of the Trainer, or virtual_workers=V, makes them "
            "independent of the number of workers."
        )
    return (
        "the workers' data or loss: samples that differ among ranks, another global batch at "
        "another number of workers, a loss over the whole batch (in-batch negatives, a batch F1), "
        "or gradients that are changed by hand before they are summed."
    )
