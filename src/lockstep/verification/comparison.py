"""What differs first between the steps of one script at two numbers of workers, beyond rounding
(pure).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .records import RunRecord, StepRecord, TensorRecord

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
        scale: the factor by which all gradients of the second are larger; NaN if they have no
            common factor.
    """

    step: int
    optimizer: int
    kind: str
    name: str = ""
    values: tuple[str, str] = ("", "")
    distance: float = math.nan
    ratio: float = math.nan
    scale: float = math.nan


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


def compare_before(one: RunRecord, other: RunRecord, difference: Difference) -> Comparison:
    """Compare two runs up to the step at which a hyperparameter differs, and without
    hyperparameters.
    """
    runs = []
    for record in (one, other):
        steps = [step for step in record.steps if step.step <= difference.step]
        bare = tuple(msgspec.structs.replace(step, hyperparameters=()) for step in steps)
        runs.append(msgspec.structs.replace(record, steps=bare))
    return compare(*runs)


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
    # the weights of the first step; equal bits have distance 0
    for name, left, right in _pairs(first.parameters, second.parameters) if number == 0 else ():
        if _distance(left, right) > 1e-6:
            return Difference(0, optimizer, _PARAMETER, name, ("", ""), _distance(left, right)), 0.0
    for group, (left_group, right_group) in enumerate(
        zip(first.hyperparameters, second.hyperparameters, strict=False)
    ):
        for name, value in left_group.items():
            if not same_value(value, right_group.get(name, "missing")):
                values = (value, right_group.get(name, "missing"))
                where = name if len(first.hyperparameters) == 1 else f"{name} of group {group}"
                return Difference(number, optimizer, "hyperparameter", where, values), 0.0
    total = math.sqrt(sum(gradient.norm**2 for gradient in first.gradients.values()))
    gaps = [_gap(left, right) for _, left, right in _pairs(first.gradients, second.gradients)]
    whole = math.sqrt(sum(gap**2 for gap in gaps))
    if total > 0:
        whole /= total
    if whole > limit or first.gradients.keys() != second.gradients.keys():
        name, distance, ratio = _worst_first(first.gradients, second.gradients, limit)
        scale = _common_factor(first.gradients, second.gradients, max(limit, 1e-3))
        return Difference(
            number, optimizer, _GRADIENT, name, ("", ""), distance, ratio, scale
        ), whole
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
    name, (left, right, gap) = max(distances.items(), key=lambda entry: entry[1][2])
    return name, gap / (left.norm or 1.0), right.norm / (left.norm or 1.0)


def _common_factor(
    first: Mapping[str, TensorRecord], second: Mapping[str, TensorRecord], limit: float
) -> float:
    """Return the factor by which all gradients of the second step are larger, up to `limit`; NaN if
    there is none.
    """
    squares = 0.0
    product = 0.0
    pairs = [
        (left, right, left.numel / max(len(left.sample), 1))
        for _, left, right in _pairs(first, second)
    ]
    for left, right, weight in pairs:
        if len(left.sample) != len(right.sample):
            return math.nan
        squares += weight * sum(a * a for a in left.sample)
        product += weight * sum(a * b for a, b in zip(left.sample, right.sample, strict=True))
    if (
        not squares
        or not math.isfinite(squares)
        or not math.isfinite(product)
        or first.keys() != second.keys()
    ):
        return math.nan
    factor = product / squares
    rest = sum(
        weight * sum((b - factor * a) ** 2 for a, b in zip(left.sample, right.sample, strict=True))
        for left, right, weight in pairs
    )
    return factor if math.sqrt(rest) <= limit * abs(factor) * math.sqrt(squares) else math.nan


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


def same_value(a: str, b: str) -> bool:
    """Return whether two values of a hyperparameter are equal, up to rounding."""
    if a == b:
        return True
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6)
    except ValueError:
        return False


def _pairs(
    first: Mapping[str, TensorRecord], second: Mapping[str, TensorRecord]
) -> Iterator[tuple[str, TensorRecord, TensorRecord]]:
    for name, tensor in first.items():
        if name in second:
            yield name, tensor, second[name]


def _digests(step: StepRecord) -> list[tuple[str, str]]:
    tensors = (step.parameters, step.gradients, step.buffers)
    return [(name, tensor.digest) for named in tensors for name, tensor in named.items()]
