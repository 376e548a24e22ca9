"""Which values the compared samples had, so that samples with others are compared as well."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...parallel.nested import tensors_of

# Whole numbers that are told apart: among them usual labels to ignore, and the classes. Those
# beyond are as the ends.
_LOWEST = -256
_HIGHEST = 4095
_MOST_TENSORS = 8
_FEW = 256  # so many numbers are looked up one by one: an operation on tensors costs more
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SeenValues:
    """The values of targets, and whole numbers of outputs, in the samples of a loss or metric that
    have been compared.

    What makes a loss no mean over samples is often in few samples: labels that it ignores, a class
    with another weight, a mask. Such samples have values that none before had. Of floating-point
    targets the smallest and the largest value count, by their signs and by whether they are
    numbers. Only tensors on the CPU are looked at, as reading others would wait for their device.
    """

    def __init__(self) -> None:
        self._of_tensors: dict[tuple[int, int], _Codes] = {}

    def unlike_sample(self, output: Any, target: Any, size: int) -> int | None:
        """Return the first sample with a value that was not seen; None if there is none.

        Args:
            output: the output of `size` samples.
            target: their targets.
            size: number of samples.
        """
        for place, tensor in _looked_at(output, target):
            seen = self._of_tensors.get(place)
            if seen is None:
                return 0
            if not seen.has_all_of(tensor):
                unlike = seen.unlike(tensor)
                first = int(unlike.flatten().nonzero()[0])
                return min(size - 1, first * size // unlike.numel())
        return None

    def add(self, output: Any, target: Any) -> None:
        """Add the values of samples that are compared."""
        for place, tensor in _looked_at(output, target):
            self._of_tensors.setdefault(place, _Codes()).add(tensor)


class _Codes:
    """The codes of the values of one tensor that were seen: a whole number's own, or a sign, or 2
    for NaN.
    """

    def __init__(self) -> None:
        self._seen = set[int]()
        # the same, for many numbers at once
        self._table = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.bool)
        # whole numbers, all of which were seen between these: the classes, after a few batches
        self._run = (0, -1)

    def has_all_of(self, tensor: torch.Tensor) -> bool:
        if tensor.is_floating_point():
            low, high = _extremes(tensor)
            return _sign(low) in self._seen and _sign(high) in self._seen
        if tensor.numel() <= _FEW and self._seen.issuperset(tensor.flatten().tolist()):
            return True
        low, high = _extremes(tensor)
        return (self._run[0] <= low and high <= self._run[1]) or bool(
            self._table[_indices(tensor)].all()
        )

    def unlike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return where the tensor has values that were not seen."""
        if not tensor.is_floating_point():
            return ~self._table[_indices(tensor)]
        signs = {_sign(extreme) for extreme in _extremes(tensor)}
        unseen = torch.tensor(sorted(signs - self._seen), dtype=tensor.dtype)
        return torch.isin(tensor.sign().masked_fill(tensor.isnan(), 2), unseen)

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            for extreme in _extremes(tensor):
                self._table[_sign(extreme) - _LOWEST] = True
        else:
            self._table[_indices(tensor)] = True
        places = self._table.nonzero().flatten().tolist()
        self._seen = {place + _LOWEST for place in places}
        self._run = _longest_run(places)


def _looked_at(output: Any, target: Any) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """Return the tensors whose values are looked at, with their places."""
    values = []
    for number, tensor in enumerate(_tensors(output)):
        if (
            not (tensor.is_floating_point() or tensor.is_complex())
            and tensor.is_cpu
            and tensor.numel()
        ):
            values.append(((0, number), tensor))
    for number, tensor in enumerate(_tensors(target)):
        is_known = (
            tensor.dtype in _FLOATS if tensor.is_floating_point() else not tensor.is_complex()
        )
        if is_known and tensor.is_cpu and tensor.numel():
            values.append(((1, number), tensor.detach() if tensor.requires_grad else tensor))
    return values


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [tree] if isinstance(tree, torch.Tensor) else tensors_of(tree)[:_MOST_TENSORS]


def _extremes(tensor: torch.Tensor) -> tuple[float, float]:
    low, high = tensor.aminmax()
    return low.item(), high.item()


def _sign(value: float) -> int:
    """Return the sign of a number; 2 for NaN."""
    return 2 if math.isnan(value) else (value > 0) - (value < 0)


def _indices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long().clamp(_LOWEST, _HIGHEST) - _LOWEST


def _longest_run(indices: list[int]) -> tuple[int, int]:
    """Return the first and the last whole number of the longest run; none of them is beyond what is
    told apart.
    """
    longest = 0, -1
    start = indices[0]
    for index, after in zip(indices, [*indices[1:], -1], strict=True):
        if after != index + 1:
            if index - start > longest[1] - longest[0]:
                longest = start + _LOWEST, index + _LOWEST
            start = after
    return longest
