"""The comparison by halves: whether a loss or a metric of a few samples is the sum of those of
their two halves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...errors import ConfigError, TransportError
from ...parallel.nested import map_tensors, tensors_of
from ...parallel.randomness import preserve_generators
from .sum_and_count import as_sum, is_pair

_log = logging.getLogger(__name__)

LossLike = Callable[[Any, Any], Any]
"""A loss or a metric: (output, target) → one of the forms of `sum_and_count.as_sum`."""

Passes = Callable[[], AbstractContextManager[object]]
"""Returns the context manager that a model and its loss are called in, such as autocast."""

MAX_FLOAT64_VALUES = 1 << 20
"""Up to this number of values (8 MiB), functions are compared in float64, where rounding is
negligible.
"""


@dataclass(frozen=True)
class Samples:
    """The arguments of a loss or metric for some samples.

    Attributes:
        output: the output, detached.
        target: the target, detached.
        size: number of samples.
        rows: the size of the first dimension of tensors that are split by samples: the samples, or
            a multiple of them. None if no tensor can be split.
    """

    output: Any
    target: Any
    size: int
    rows: int | None

    @classmethod
    def few_of(
        cls, output: Any, target: Any, size: int, turn: int, most: int, sample: int | None = None
    ) -> Samples:
        """Return a block of the samples of a call: other ones at each turn.

        Samples that belong together are neighbours in many data sets, so the block is as long as a
        power of two.

        Args:
            output: the output of `size` samples.
            target: their targets.
            size: number of samples.
            turn: the number of the block, if the samples were cut into blocks of one length.
            most: number of samples; fewer if they have too many values, but at least two.
            sample: a sample that is in the block, whatever the turn.
        """
        output, target = map_tensors(
            torch.Tensor.detach, {"output": output, "target": target}
        ).values()
        rows = _sample_rows(output, target, size)
        every = cls(output, target, size, rows)
        if rows is None or size < 2:
            return every
        values = sum(
            tensor.numel() for tensor in _floats((output, target)) if _is_sliced(tensor, rows)
        )
        affordable = min(most, MAX_FLOAT64_VALUES * size // max(1, values))
        length = 1 << max(1, affordable.bit_length() - 1)
        if affordable >= size or length >= size:
            return every
        number = turn if sample is None else sample // length
        start = min(number % -(-size // length) * length, size - length)
        part = every.rows_of(start, start + length)

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            # as a view would keep the memory of all samples
            return _cut(tensor, rows, part).clone()

        return cls(
            map_tensors(kept, output), map_tensors(kept, target), length, part.stop - part.start
        )

    @property
    def device(self) -> torch.device:
        """The device of the first tensor; the CPU without one."""
        return device_of((self.output, self.target))

    def values(self) -> int:
        """Return the number of floating-point values."""
        return sum(tensor.numel() for tensor in _floats((self.output, self.target)))

    def rows_of(self, start: int, stop: int) -> slice:
        """Return the rows of the samples [start, stop) in tensors that are split."""
        of_sample = (self.rows or 0) // self.size
        return slice(start * of_sample, stop * of_sample)

    def by_target(self) -> Samples:
        """Return the samples in the order of their targets, if each has one number.

        Halves with as many samples of each class may give the same by chance: the recall of one
        class, or its F1; a mean over labels that are not ignored, where each half has as many of
        them; and all pairs of samples, where the targets of both halves have the same mean.
        """
        target = self.target
        rows = self.rows
        is_one_number = (
            isinstance(target, torch.Tensor)
            and target.numel() == self.size
            and not target.is_complex()
        )
        if rows != self.size or not is_one_number:
            return self
        order = target.reshape(-1).argsort(stable=True)

        def ordered(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[order] if _is_sliced(tensor, rows) else tensor

        return replace(self, output=map_tensors(ordered, self.output), target=ordered(target))

    def in_float64(self) -> Samples:
        """Return the samples with their floating tensors in float64."""

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        return replace(
            self, output=map_tensors(wide, self.output), target=map_tensors(wide, self.target)
        )


def _sample_rows(output: Any, target: Any, size: int) -> int | None:
    outputs, targets = (
        {t.shape[0] for t in tensors_of(tree) if t.dim()} for tree in (output, target)
    )
    if len(outputs | targets) == 1 and size and not min(outputs | targets) % size:
        return min(outputs | targets) or None  # such as all tokens of all samples in one dimension
    return size if size in outputs and targets <= {size} else None


def _cut(tensor: torch.Tensor, rows: int | None, part: slice) -> torch.Tensor:
    return tensor[part] if _is_sliced(tensor, rows) else tensor


def _is_sliced(tensor: torch.Tensor, rows: int | None) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _floats(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(tree) if tensor.is_floating_point()]


def device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor of `tree`; the CPU without one."""
    if isinstance(tree, (tuple, list)) and tree and isinstance(tree[0], torch.Tensor):
        return tree[0].device
    return next((tensor.device for tensor in tensors_of(tree)), torch.device("cpu"))


# Tolerated relative differences of values and gradients. A function of float64 outputs may still
# compute in float32.
_FLOAT64 = (1e-5, 1e-5)
_FLOAT32 = (1e-4, 1e-3)
# Kernels of lower precision than the tensors have, such as TF32, differ by that much with the
# number of samples.
_REDUCED = (1e-3, 1e-3)
# Gradients of one tensor are compared relative to at least this share of those of all: theirs may
# be rounding alone.
_LEAST_SHARE = 1e-2
# The first value of a pair is taken for a mean if it differs by less from the mean of the halves: a
# sum would be twice that.
_MEAN_FOR_SUM = 0.2


@dataclass(frozen=True)
class Difference:
    """What a comparison has found.

    Attributes:
        whole: (sum, count) of the samples.
        halves: the sums of those of their two halves.
        gradients: the relative difference of their gradients; 0.0 if that is rounding.
        is_pair: whether the function has returned (sum, count).
        is_other_form: whether the function has returned another number of values than one for each
            of fewer samples.
    """

    whole: tuple[float, float]
    halves: tuple[float, float]
    gradients: float = 0.0
    is_pair: bool = False
    is_other_form: bool = False


@dataclass(frozen=True)
class _Result:
    """What a function gives for some samples.

    Attributes:
        total: the sum over them.
        count: what it is a sum over.
        gradients: those of the sum with respect to each leaf, None where it does not depend on it.
    """

    total: float
    count: float
    gradients: list[torch.Tensor | None]


class Halves:
    """The comparison of a function's sum, count and gradients for a few samples with those for
    their halves.

    Args:
        fn: (output, target) → see `as_sum`.
        samples: its arguments. For a single sample there are no halves, but `fn` is called equally
            often, because it may communicate with other ranks.
        parameters: parameters of `fn`; gradients are with respect to them instead of the output.
        tolerance: (formats of the function's results) → tolerated relative differences of values
            and gradients; by the formats of all tensors when None.
        sums_add_up: whether to compare the sums of (sum, count) as well. A loss may gather the
            outputs of all workers, and return the sum over this worker's samples, which is right
            and does not add up over halves.

    Attributes:
        is_unsteady: whether the function has given another value when it was called again: it draws
            random numbers, or has a state, and cannot be compared.
    """

    def __init__(
        self,
        fn: LossLike,
        samples: Samples,
        parameters: Sequence[torch.Tensor] = (),
        tolerance: Callable[[set[torch.dtype]], tuple[float, float]] | None = None,
        sums_add_up: bool = False,
    ) -> None:
        self._fn = fn
        self._samples = samples
        self._parameters = list(parameters)
        self._tolerance_of_dtypes = tolerance
        self._sums_add_up = sums_add_up
        self._dtypes = set[torch.dtype]()
        self._is_pair = False
        self._is_by_sample = False
        self.is_unsteady = False

    def difference(self, gradients: bool) -> Difference | None:
        """Return the difference between the samples and their halves; None if it is no more than
        rounding.

        Gradients are more sensitive than values: at the beginning of a training the losses of all
        tokens are nearly equal, and so is every weighted mean of them.
        """
        size = self._samples.size
        half = max(1, size // 2)
        ranges = [(0, half), (half, size)] if size > 1 else [(0, 1), (0, 1)]
        whole = self._evaluate(0, size, gradients)
        results = [self._evaluate(start, stop, gradients) for start, stop in ranges]
        parts = [result for result in results if result is not None]
        if whole is None or len(parts) < len(results):
            return Difference((math.nan, size), (math.nan, size), is_other_form=True)
        halves = self._add(parts)
        if self._counts_nothing(whole, parts):
            return Difference(
                (whole.total, whole.count), (halves.total, halves.count), is_pair=self._is_pair
            )
        values = [
            whole.total,
            whole.count,
            *(value for part in parts for value in (part.total, part.count)),
        ]
        distances = self._distances(whole, halves, parts)
        if self._is_pair and not self._sums_add_up and not self._is_mean_for_sum(whole, parts):
            distances = (0.0, *distances[1:])
        if size < 2 or not all(map(math.isfinite, values)) or not self._exceeding(distances):
            return None
        again = self._evaluate(0, size, gradients)
        repeated = (math.inf,) * 3 if again is None else self._distances(whole, again, [again])
        if self._exceeding(repeated):
            self.is_unsteady = True
            return None
        if not any(distances[place] > 4 * repeated[place] for place in self._exceeding(distances)):
            return None  # gradients that are summed in no fixed order
        distance = distances[2] if 2 in self._exceeding(distances) else 0.0
        return Difference(
            (whole.total, whole.count), (halves.total, halves.count), distance, self._is_pair
        )

    def _counts_nothing(self, whole: _Result, parts: list[_Result]) -> bool:
        """Return whether some of the samples give no number because the function counts nothing in
        them.

        Then either the whole gives one, or the outputs are numbers.
        """
        if math.isfinite(whole.total):
            return not all(math.isfinite(part.total) for part in parts)
        if self._is_by_sample or not all(math.isnan(result.total) for result in (whole, *parts)):
            return False
        return all(bool(tensor.isfinite().all()) for tensor in _floats(self._samples.output))

    def _exceeding(self, distances: tuple[float, float, float]) -> list[int]:
        """Return the places of `_distances` that are more than rounding."""
        values, gradients = self._tolerance()
        if self._is_pair and not self._sums_add_up:
            gradients = math.inf
        return [
            place
            for place, limit in enumerate((values, values, gradients))
            if distances[place] > limit
        ]

    def _is_mean_for_sum(self, whole: _Result, parts: list[_Result]) -> bool:
        """Return whether the first value of a pair is rather the mean of those of the halves than
        their sum.
        """
        mean = sum(part.total for part in parts) / 2
        return abs(whole.total - mean) <= _MEAN_FOR_SUM * max(abs(whole.total), abs(mean))

    def _distances(
        self, whole: _Result, other: _Result, parts: list[_Result]
    ) -> tuple[float, float, float]:
        """Return the relative differences of sums, counts and gradients."""
        totals = max(abs(whole.total), sum(abs(part.total) for part in parts))
        counts = max(abs(whole.count), sum(abs(part.count) for part in parts))
        if self._dtypes != {torch.float64}:
            # A small loss may be the difference of large outputs, and has their rounding.
            totals = max(totals, counts)
        return (
            abs(whole.total - other.total) / (totals or 1.0),
            abs(whole.count - other.count) / (counts or 1.0),
            _distance(whole.gradients, other.gradients),
        )

    def _tolerance(self) -> tuple[float, float]:
        if self._tolerance_of_dtypes is not None:
            return self._tolerance_of_dtypes(self._dtypes)
        formats = {
            *self._dtypes,
            *(tensor.dtype for tensor in _floats((self._samples.output, self._samples.target))),
        }
        if formats == {torch.float64}:
            return _FLOAT64
        device = self._samples.device
        rounding = rounding_of(formats, device)
        values, gradients = _FLOAT32 if device.type == "cpu" else _REDUCED
        return max(values, rounding), max(gradients, rounding)

    def _evaluate(self, start: int, stop: int, gradients: bool) -> _Result | None:
        """Return the function's result for the samples [start, stop); None if it is not one value
        for each of them.
        """
        samples = self._samples
        part = self._samples.rows_of(start, stop)
        leaves = list(self._parameters)

        def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
            leaf = _cut(tensor, samples.rows, part).detach()
            wanted = gradients and not self._parameters and leaf.is_floating_point()
            if wanted and _is_sliced(tensor, samples.rows):
                leaves.append(leaf.requires_grad_())
            return leaf

        output = map_tensors(as_leaf, samples.output)
        target = map_tensors(partial(_cut, rows=samples.rows, part=part), samples.target)
        value = self._fn(output, target)
        self._is_pair = is_pair(value)
        self._is_by_sample = isinstance(value, torch.Tensor) and value.dim() > 0
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            self._dtypes.add(value.dtype)
        try:
            total, count = as_sum(value, stop - start)
        except ConfigError:
            return None
        if isinstance(total, torch.Tensor) and total.is_floating_point():
            self._dtypes.add(total.dtype)
        if self._is_pair and not _value(count) and not math.isfinite(_value(total)):
            total = 0.0  # the mean over nothing, times nothing
        of_leaves: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if gradients and leaves and isinstance(total, torch.Tensor) and total.requires_grad:
            of_leaves = torch.autograd.grad(total, leaves, allow_unused=True)
        return _Result(_value(total), _value(count), list(of_leaves))

    def _add(self, parts: list[_Result]) -> _Result:
        """Return the results of the halves as one."""
        joined: list[torch.Tensor | None] = []
        for pair in zip(*(part.gradients for part in parts), strict=True):
            known = [gradient for gradient in pair if gradient is not None]
            if len(known) < len(pair):
                joined.append(None)
            else:
                joined.append(known[0] + known[1] if self._parameters else torch.cat(known))
        return _Result(sum(part.total for part in parts), sum(part.count for part in parts), joined)


def _value(number: Any) -> float:
    return float(number.detach() if isinstance(number, torch.Tensor) else number)


def _distance(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    """Return the largest relative difference of two tensors at the same place; 0 without comparable
    tensors.
    """
    pairs = [
        (a, b)
        for a, b in zip(ours, theirs, strict=True)
        if a is not None and b is not None and a.shape == b.shape
    ]
    norms = [[_norm(tensor) for tensor in (a - b, a, b)] for a, b in pairs]
    if not norms:
        return 0.0
    of_all = max(math.hypot(*(norm[number] for norm in norms)) for number in (1, 2))
    distances = [norm[0] / max(norm[1], norm[2], _LEAST_SHARE * of_all, 1e-300) for norm in norms]
    return max(distance if math.isfinite(distance) else 0.0 for distance in distances)


def _norm(tensor: torch.Tensor) -> float:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def rounding_of(formats: Iterable[torch.dtype], device: torch.device) -> float:
    """Return the relative difference that rounding to the least precise of `formats`, or to
    autocast's, may make.
    """
    rounded = set(formats)
    if torch.is_autocast_enabled(device.type):
        rounded.add(torch.get_autocast_dtype(device.type))
    return max((4 * torch.finfo(dtype).eps for dtype in rounded), default=0.0)


def compare_or_skip(
    compare: Callable[[], Difference | None], device: torch.device
) -> Difference | None:
    """Return the result of `compare`; None if it fails, because the function cannot be called with
    half of its samples.

    The random generators are restored. An error of the transport is raised.
    """
    try:
        with preserve_generators(device), torch.enable_grad():
            return compare()
    except TransportError:
        raise
    except Exception as error:
        _log.debug("the halves of a batch are not compared: %s: %s", type(error).__name__, error)
        return None


def depends_on_unsliced(fn: LossLike, samples: Samples, passes: Passes) -> bool:
    """Return whether the function uses outputs that cannot be split by samples, such as a loss
    computed by the model.

    If so, it returns NaN when these outputs are NaN.
    """
    if all(_is_sliced(tensor, samples.rows) for tensor in _floats(samples.output)):
        return False

    def with_nan(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or _is_sliced(tensor, samples.rows):
            return tensor
        return torch.full((), math.nan, dtype=tensor.dtype, device=tensor.device).expand(
            tensor.shape
        )

    with passes(), torch.no_grad():
        value = fn(map_tensors(with_nan, samples.output), samples.target)
        total, _ = as_sum(value, samples.size)
    return bool(torch.as_tensor(total).isnan())
