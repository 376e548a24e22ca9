"""Tensors inside nested tuples, lists and dicts, treated as one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..shards import bounds

__all__ = ["map_tensors", "narrow", "split"]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with every tensor replaced by `fn` of it; whatever else it holds stays as it is."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(fn, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(fn, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(fn, item) for key, item in tree.items()}
    return tree


def narrow(tree: Any, start: int, stop: int) -> Any:
    """The samples [start, stop) of every tensor, as views along the first dimension."""
    return map_tensors(lambda tensor: tensor[start:stop], tree)


def split(tree: Any, samples: int, parts: int) -> list[tuple[Any, int]]:
    """`tree` of `samples` samples in `parts` contiguous parts, each with its number of samples.

    With fewer samples than parts the last ones have none, but keep their other dimensions.
    """
    if parts == 1:
        return [(tree, samples)]
    cuts = [bounds(samples, parts, part) for part in range(parts)]
    return [(narrow(tree, start, stop), stop - start) for start, stop in cuts]
