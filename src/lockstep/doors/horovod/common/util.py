"""Small functions that scripts import from `horovod.common.util`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["gpu_available", "num_rank_is_power_2", "split_list"]

T = TypeVar("T")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether `num_rank` is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[T], num_parts: int) -> list[list[T]]:
    """`values` in order, in `num_parts` lists of which the first ones are longer by one; none of them is empty."""
    each, rest = divmod(len(values), num_parts)
    ends = [part * each + min(part, rest) for part in range(num_parts + 1)]
    parts = [list(values[start:end]) for start, end in itertools.pairwise(ends)]
    return [part for part in parts if part]


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether torch has a GPU here."""
    import torch

    return torch.cuda.is_available()
