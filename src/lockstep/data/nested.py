"""Functions over all tensors in nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..invariance.shards import bounds

__all__ = ["map_tensors", "narrow", "sample_count", "split", "tensors_of"]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return `tree` with every tensor replaced by `fn` of it; other values are unchanged.

    It descends into tuples, named tuples, lists, mappings and instances of dataclasses, and keeps their types.
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
    """Return every tensor in `tree`, in the order of `map_tensors`."""
    tensors: list[torch.Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor), tree)
    return tensors


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        ConfigError: if the tensors have no common first dimension.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        expected = "a global batch whose tensors have all their samples in the first dimension, or their number"
        raise ConfigError(
            "batch", expected, found=f"first dimensions {sorted(sizes)}" if sizes else type(batch).__name__
        )
    return sizes.pop()


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if isinstance(tree, (dict, UserDict)):
        # A copy keeps further attributes, such as a defaultdict's factory. Items are set one by one: in the outputs of
        # Transformers' models, items are fields as well, and setting an item sets both.
        new = copy.copy(tree)
        for key, value in items.items():
            new[key] = value
        return new
    return type(tree)(items)  # type: ignore[call-arg]


def _with_fields(tree: Any, values: dict[str, Any]) -> Any:
    # Not by the constructor, which may take other arguments or change them; and a frozen dataclass refuses setattr().
    new = copy.copy(tree)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def narrow(tree: Any, start: int, stop: int) -> Any:
    """Return the samples [start, stop) of every tensor, as views along the first dimension; 0-dim tensors unchanged."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, tree)


def split(tree: Any, samples: int, parts: int) -> list[tuple[Any, int]]:
    """Split a `tree` of `samples` samples into `parts` contiguous parts, each with its number of samples.

    With fewer samples than parts, the last ones have 0 samples, and the same other dimensions.

    Raises:
        ConfigError: a tensor's first dimension is not the number of samples.
    """
    if parts == 1:
        return [(tree, samples)]
    map_tensors(lambda tensor: _check_batch_dim(tensor, samples), tree)
    cuts = [bounds(samples, parts, part) for part in range(parts)]
    return [(narrow(tree, start, stop), stop - start) for start, stop in cuts]


def _check_batch_dim(tensor: torch.Tensor, samples: int) -> None:
    if tensor.dim() and tensor.shape[0] != samples:
        raise ConfigError(
            "gradient_accumulation_steps",
            f"1, or batches whose tensors all have their {samples} samples in the first dimension",
            found=f"one of shape {list(tensor.shape)}",
            hint="Collate samples into the first dimension and transpose in the model; "
            "a value for all samples can be 0-dim.",
        )
