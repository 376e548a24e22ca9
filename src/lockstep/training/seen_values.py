"""Which values the compared samples had, so that samples with others are compared as well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..parallel.nested import tensors_of

__all__ = ["SeenValues"]

# Whole numbers that are told apart: among them usual labels to ignore, and the classes. Those beyond are as the ends.
_LOWEST, _HIGHEST = -256, 4095
_MOST_TENSORS = 8
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SeenValues:
    """The values of targets, and whole numbers of outputs, in the samples of a loss or metric that have been compared.

    What makes a loss no mean over samples is often in few samples: labels that it ignores, a class with another weight,
    a mask. Such samples have values that none before had. Of floating-point targets the smallest and the largest value
    count, by their signs and by whether they are numbers. Only tensors on the CPU are looked at, as reading others
    would wait for their device.
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
    """The codes of the values of one tensor that were seen: a whole number's own, or a sign, or 2 for NaN."""

    def __init__(self) -> None:
        self._seen = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.bool)
        self._run = 0, -1  # whole numbers, all of which were seen between these: the classes, after a few batches

    def has_all_of(self, tensor: torch.Tensor) -> bool:
        if tensor.is_floating_point():
            return all(self._seen[_sign(extreme) - _LOWEST] for extreme in _extremes(tensor))
        low, high = _extremes(tensor)
        return (self._run[0] <= low and high <= self._run[1]) or bool(self._seen[_indices(tensor)].all())

    def unlike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return where the tensor has values that were not seen."""
        if not tensor.is_floating_point():
            return ~self._seen[_indices(tensor)]
        signs = {_sign(extreme) for extreme in _extremes(tensor)}
        unseen = [sign for sign in signs if not self._seen[sign - _LOWEST]]
        return torch.isin(tensor.sign().masked_fill(tensor.isnan(), 2), torch.tensor(unseen, dtype=tensor.dtype))

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            for extreme in _extremes(tensor):
                self._seen[_sign(extreme) - _LOWEST] = True
        else:
            self._seen[_indices(tensor)] = True
            self._run = _longest_run(self._seen.nonzero().flatten().tolist())


def _looked_at(output: Any, target: Any) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Yield the tensors whose values are looked at, with their places."""
    for tree, of_tree in enumerate((output, target)):
        for number, tensor in enumerate(tensors_of(of_tree)[:_MOST_TENSORS]):
            kind = tree and tensor.dtype in _FLOATS if tensor.is_floating_point() else not tensor.is_complex()
            if kind and tensor.device.type == "cpu" and tensor.numel():
                yield (tree, number), tensor.detach() if tensor.requires_grad else tensor


def _extremes(tensor: torch.Tensor) -> tuple[float, float]:
    low, high = tensor.aminmax()
    return low.item(), high.item()


def _sign(value: float) -> int:
    """Return the sign of a number; 2 for NaN."""
    return 2 if math.isnan(value) else (value > 0) - (value < 0)


def _indices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long().clamp(_LOWEST, _HIGHEST) - _LOWEST


def _longest_run(indices: list[int]) -> tuple[int, int]:
    """Return the first and the last whole number of the longest run; none of them is beyond what is told apart."""
    longest = 0, -1
    start = indices[0]
    for index, after in zip(indices, [*indices[1:], -1], strict=True):
        if after != index + 1:
            if index - start > longest[1] - longest[0]:
                longest = start + _LOWEST, index + _LOWEST
            start = after
    return longest
