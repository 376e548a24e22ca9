"""Tensors inside nested tuples, lists, mappings and dataclasses, treated as one thing."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..shards import bounds

__all__ = ["map_tensors", "narrow", "split", "tensors_of"]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with every tensor replaced by `fn` of it; whatever else it holds stays as it is.

    Looked into are tuples, named ones as well, lists, mappings and instances of dataclasses. Their types are kept.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(fn, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(fn, item) for item in tree)
    if isinstance(tree, Mapping):
        return _with_items(tree, {key: map_tensors(fn, item) for key, item in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _with_fields(tree, {f.name: map_tensors(fn, getattr(tree, f.name)) for f in dataclasses.fields(tree)})
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Every tensor in `tree`, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor), tree)
    return found


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if isinstance(tree, (dict, UserDict)):
        # Copies of these have items of their own, and whatever else the type holds, such as a defaultdict's factory.
        # One by one: where items are fields as well, as in what models of Transformers return, setting one sets both.
        new = copy.copy(tree)
        for key, value in items.items():
            new[key] = value
        return new
    return type(tree)(items)  # type: ignore[call-arg]


def _with_fields(tree: Any, values: dict[str, Any]) -> Any:
    # Not by its constructor, which may take other arguments or change them; and a frozen one lets nobody else set.
    new = copy.copy(tree)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def narrow(tree: Any, start: int, stop: int) -> Any:
    """The samples [start, stop) of every tensor, as views along the first dimension; 0-dim tensors stay whole."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, tree)


def split(tree: Any, samples: int, parts: int) -> list[tuple[Any, int]]:
    """`tree` of `samples` samples in `parts` contiguous parts, each with its number of samples.

    With fewer samples than parts the last ones have none, but keep their other dimensions.

    Raises:
        ConfigError: for a tensor whose first dimension is not that of the samples.
    """
    if parts == 1:
        return [(tree, samples)]
    map_tensors(lambda tensor: _check_first(tensor, samples), tree)
    cuts = [bounds(samples, parts, part) for part in range(parts)]
    return [(narrow(tree, start, stop), stop - start) for start, stop in cuts]


def _check_first(tensor: torch.Tensor, samples: int) -> None:
    if tensor.dim() and tensor.shape[0] != samples:
        raise ConfigError(
            "accumulate",
            f"1, or batches whose tensors all have their {samples} samples in the first dimension",
            found=f"one of shape {list(tensor.shape)}",
            hint="Collate samples into the first dimension and turn it in the model; "
            "a value for all samples can be 0-dim.",
        )
