"""Functions over all tensors in nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from .shards import bounds

__all__ = [
    "collated_size",
    "cut_lists",
    "map_tensors",
    "named_tensors",
    "narrow",
    "per_sample",
    "sample_count",
    "split",
    "tensors_of",
]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return `tree` with every tensor replaced by `fn` of it; other values are unchanged.

    It descends into tuples, named tuples, lists, mappings and instances of dataclasses, and keeps
    their types.
    """
    return _map(fn, tree, None)


def _map(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None) -> Any:
    """Return `tree` with every tensor, and what else `is_leaf` says is a leaf, replaced by `fn` of
    it.
    """
    if isinstance(tree, torch.Tensor) or (is_leaf is not None and is_leaf(tree)):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(fn, item, is_leaf) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(fn, item, is_leaf) for item in tree)
    if isinstance(tree, Mapping):
        return _with_items(tree, {key: _map(fn, item, is_leaf) for key, item in tree.items()})
    if _is_dataclass(tree):
        return _with_fields(
            tree,
            {f.name: _map(fn, getattr(tree, f.name), is_leaf) for f in dataclasses.fields(tree)},
        )
    return tree


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return what `tree` consists of, with the end of its path, such as ``['mask']``; None for a
    leaf.
    """
    if isinstance(tree, (tuple, list)):
        return [(f"[{number}]", item) for number, item in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", item) for key, item in tree.items()]
    if _is_dataclass(tree):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return every tensor in `tree`, in the order of `map_tensors`."""
    tensors: list[torch.Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor), tree)
    return tensors


def named_tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor in `tree` by its place in it, such as ``[0]`` or ``['mask']``."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    named: dict[str, torch.Tensor] = {}
    for name, child in _children(tree) or ():
        named |= named_tensors(child, path + name)
    return named


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        ConfigError: if the tensors have no common first dimension.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        expected = (
            "a global batch whose tensors have all their samples in the first dimension, or their "
            "number"
        )
        raise ConfigError(
            "batch",
            expected,
            found=f"first dimensions {sorted(sizes)}" if sizes else type(batch).__name__,
        )
    return sizes.pop()


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if isinstance(tree, (dict, UserDict)):
        # A copy keeps further attributes, such as a defaultdict's factory. Items are set one by
        # one: in the outputs of Transformers' models, items are fields as well, and setting an item
        # sets both.
        new = copy.copy(tree)
        for key, value in items.items():
            new[key] = value
        return new
    return type(tree)(items)  # type: ignore[call-arg]


def _with_fields(tree: Any, values: dict[str, Any]) -> Any:
    # Not by the constructor, which may take other arguments or change them; and a frozen dataclass
    # refuses setattr().
    new = copy.copy(tree)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def narrow(tree: Any, start: int, stop: int, samples: int | None = None) -> Any:
    """Return the samples [start, stop) of every tensor, as views along the first dimension; 0-dim
    tensors unchanged.

    Args:
        tree: the batch.
        start, stop: the samples.
        samples: number of samples in the batch, if lists and arrays are to be cut as well, see
            `per_sample`.

    Raises:
        ConfigError: see `per_sample`.
    """

    def cut(leaf: Any) -> Any:
        return leaf if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf[start:stop]

    return _map(cut, tree, None if samples is None else lambda part: per_sample(part, samples))


def split(tree: Any, samples: int, parts: int) -> list[tuple[Any, int]]:
    """Split a `tree` of `samples` samples into `parts` contiguous parts, each with its number of
    samples.

    Tensors are split, and the lists and arrays that have an item for each sample, see `per_sample`.
    With fewer samples than parts, the last ones have 0 samples, and the same other dimensions.

    Raises:
        ConfigError: a tensor's first dimension is not the number of samples; see also `per_sample`.
    """
    if parts == 1:
        return [(tree, samples)]
    _check_batch_dim(tree, samples)
    cuts = [bounds(samples, parts, part) for part in range(parts)]
    return [(narrow(tree, start, stop, samples), stop - start) for start, stop in cuts]


def _check_batch_dim(tree: Any, samples: int, path: str = "") -> None:
    if isinstance(tree, torch.Tensor):
        if tree.dim() and tree.shape[0] != samples:
            raise ConfigError(
                "gradient_accumulation_steps",
                f"1, or batches whose tensors all have their {samples} samples in the first "
                "dimension",
                found=f"one of shape {list(tree.shape)} at {path or 'the batch'}",
                hint="Collate samples into the first dimension and transpose in the model; "
                "a value for all samples can be 0-dim.",
            )
    elif not per_sample(tree, samples):
        for name, child in _children(tree) or ():
            _check_batch_dim(child, samples, path + name)


def per_sample(value: Any, samples: int) -> bool:
    """Return whether a list, tuple or array of a batch has an item for each of its `samples`
    samples.

    It is as long as the batch, and its items are alike: strings, numbers, or images of their own
    sizes. A list of tensors that have all samples in their first dimension, such as the pair of
    inputs and targets, is none.

    Raises:
        ConfigError: for as many lists as samples, each with as many items: nothing tells which of
            the two are samples.
    """
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == samples
    is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    if not is_list or len(value) != samples or not samples:
        return False
    # items of one sample each are of one kind, or missing
    present = [item for item in value if item is not None]
    kinds = {_kind(item) for item in present if not isinstance(item, (list, tuple)) or item}
    if len(kinds) > 1:
        return False
    # of a batch all items have all samples each, as tensors or lists
    have_samples = [_has_samples(item, samples) for _, item in _children(value) or ()]
    if True not in have_samples or False in have_samples:
        return True
    if not any(tensor.dim() and tensor.shape[0] == samples for tensor in tensors_of(value)):
        expected = (
            f"lists of which it is known whether they have an item for each of {samples} samples"
        )
        hint = "Return a dict of lists or tensors from the collate function."
        raise ConfigError(
            "batch", expected, found=f"{samples} lists of {samples} items each", hint=hint
        )
    return False


def cut_lists(tree: Any, samples: int | None, start: int, stop: int) -> Any:
    """Return the items [start, stop) of every list and array without tensors that has an item for
    each sample.

    Args:
        tree: the batch.
        samples: number of samples in the batch; None if it is not known, then nothing is cut.
        start, stop: the samples.

    Raises:
        ConfigError: see `per_sample`.
    """
    if samples is None:
        return tree
    return _map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else leaf[start:stop],
        tree,
        lambda part: not tensors_of(part) and per_sample(part, samples),
    )


def _has_samples(item: Any, samples: int) -> bool | None:
    """Return whether all samples are in `item`; None for a value that may be one for all of
    them.
    """
    if isinstance(item, torch.Tensor):
        return item.shape[0] == samples if item.dim() else None
    if isinstance(item, (list, tuple, np.ndarray)) and per_sample(item, samples):
        return True
    children = [_has_samples(child, samples) for _, child in _children(item) or ()]
    if False in children:
        return False
    return True if True in children else None


def _kind(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return "tensor", item.dim(), item.dtype
    if isinstance(item, (bool, int, float)):
        return "number"
    if isinstance(item, (list, tuple)):
        kinds = [_kind(part) for part in item]
        # of one kind, in any number
        return type(item), kinds[0] if len(set(kinds)) == 1 else tuple(kinds)
    return type(item)


def collated_size(tree: Any, samples: int) -> int:
    """Return the number of samples that a collate function has made a batch of, from the batch.

    Args:
        tree: the batch; None has no samples.
        samples: the samples that the function was given; it may have left some out, or added some.

    Returns:
        The length that all tensors have in common, or else all lists. It is `samples` where there
        are several lengths, or where samples are in the second dimension.
    """
    if tree is None:
        return 0
    noted = _Lengths()
    noted.note(tree, samples, is_root=True)
    tensors = noted.tensors
    if tensors and all(tensor.ndim > 1 and tensor.shape[1] == samples for tensor in tensors):
        return samples
    lengths = {tensor.shape[0] for tensor in tensors} or noted.lists or noted.lists_of_tensors
    return lengths.pop() if len(lengths) == 1 else samples


class _Lengths:
    """The lengths of what a batch consists of.

    Attributes:
        tensors: the tensors and arrays that are in no list of tensors.
        lists: the lengths of lists of other items.
        lists_of_tensors: those of lists that may have one tensor for each sample, or tensors of all
            samples.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.lists: set[int] = set()
        self.lists_of_tensors: set[int] = set()

    def note(self, tree: Any, samples: int, is_root: bool) -> None:
        """Note the lengths in `tree`; the list or tuple at the root consists of inputs and
        targets.
        """
        children = [child for _, child in _children(tree) or ()]
        is_list = isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields")
        if isinstance(tree, (torch.Tensor, np.ndarray)):
            self.tensors += [tree] if tree.ndim else []
        elif not is_list or is_root:
            for child in children:
                self.note(child, samples, is_root=False)
        elif not any(isinstance(child, torch.Tensor) for child in children):
            self.lists.add(len(children))
        elif not any(
            tensor.dim() and tensor.shape[0] == samples for tensor in tensors_of(children)
        ):
            self.lists_of_tensors.add(len(children))
        else:
            self.lists_of_tensors.add(samples)
