"""Whether a collate function makes other values of a batch than of its parts: each worker collates
its part alone.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch

from ..parallel.nested import named_tensors

MAX_SAMPLES = 8
"""Samples of which a batch is made for the comparison, at most."""

_TOLERANCE = 1e-3  # of the largest value; other sizes of a batch are rounded differently


def describe_collate(
    collate: Callable[[list[Any]], Any],
    samples: list[Any],
    copied: Callable[[list[Any]], list[Any]],
    seed: Callable[[int], None],
) -> str:
    """Return how what a collate function returns depends on the division of a batch; "" if it does
    not.

    It is called twice with all samples, with other random draws, and with each half of them. It
    gets copies, and is copied itself, as it may change both. Only floating-point tensors with a row
    for each sample are compared with those of the halves, whatever the order of the rows; those
    that are padded to other lengths are not. A batch may have more that depends on its samples and
    is right: indices, lengths, masks.

    Args:
        collate: the collate function.
        samples: at most `MAX_SAMPLES`.
        copied: copies samples.
        seed: seeds the global random generators by a number.
    """
    half = len(samples) // 2
    if not half:
        return ""

    def collated(part: list[Any], key: int) -> dict[str, torch.Tensor]:
        seed(key)
        # a copy of an object that collates, or of the object of a method, which may count its calls
        call: Callable[[list[Any]], Any]
        if isinstance(collate, types.MethodType):
            call = types.MethodType(collate.__func__, copy.copy(collate.__self__))
        else:
            call = copy.copy(collate)
        return named_tensors(call(copied(part)))

    try:
        whole = collated(samples, 0)
        again = collated(samples, 1)
        if not _equal(whole, again):
            return _DRAWS
        first = collated(samples[:half], 0)
        second = collated(samples[half:], 0)
        paths = whole.keys() & first.keys() & second.keys()
        other = sorted(
            path for path in paths if _differs(whole[path], first[path], second[path], half)
        )
    # of the collate function, or of a copy; an error of it is left to the training
    except Exception:
        return ""
    if not other:
        return ""
    return _DEPENDS.format(f" (in its element {other[0]})" if other[0] else "")


_DRAWS = (
    "collate_fn draws random numbers: they depend on how a batch is divided among the workers. "
    "Draw in the data set, for each sample, or use virtual_workers, which fix the division"
)
_DEPENDS = (
    "collate_fn makes other values of a batch than of its halves{}: they depend on which samples "
    "are collated together, and each worker collates its part of a batch alone. Do that for each "
    "sample in the data set, in the model or the loss with lockstep.whole_batch, or use "
    "virtual_workers, which fix the division"
)


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        tensor.shape == right[path].shape
        and bool(((tensor == right[path]) | (tensor != tensor)).all())
        for path, tensor in left.items()
    )


def _differs(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor, half: int) -> bool:
    """Return whether the rows of both halves, in any order, are others than those of the whole."""
    by_sample = all(
        tensor.is_floating_point() and tensor.dim() for tensor in (whole, first, second)
    )
    if (
        not by_sample
        or len(first) != half
        or whole.shape != (len(first) + len(second), *first.shape[1:])
    ):
        return False
    if second.shape[1:] != first.shape[1:] or not whole.numel():
        return False
    tensors = _projected(whole)
    other = _projected(torch.cat([first, second]))
    return bool((tensors - other).abs().max() > _TOLERANCE * whole.abs().max())


def _projected(rows: torch.Tensor) -> torch.Tensor:
    """Return one number for each row, in order."""
    flat = rows.detach().double().flatten(1) if rows.dim() > 1 else rows.detach().double()[:, None]
    weights = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64).cos()
    return (flat * weights).sum(1).div(max(1.0, flat.shape[1] ** 0.5)).sort().values
