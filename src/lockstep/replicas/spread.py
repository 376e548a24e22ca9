"""Cuts batches into a part for each device, and puts the parts together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..data.nested import map_tensors
from ..errors import ConfigError
from ..shards import bounds
from .devices import Device, as_device, as_devices

__all__ = ["concatenate", "cut", "gather", "join", "leaves", "scatter"]


def scatter(batch: Any, devices: Iterable[Device], dim: int = 0) -> list[Any]:
    """A part of `batch` for each of `devices`, on that device.

    Tensors are looked for in nested tuples (named ones too), lists, mappings and dataclasses, whose types are kept.
    Each is cut along `dim` on its own: parts are contiguous, in order, and differ by one sample at most, the first
    ones taking the rest: 17 samples on two devices are 9 + 8. With fewer samples than devices the last parts are
    empty. A 0-dim tensor goes to every device whole, and whatever is no tensor is handed on as it is.

    Parts on the device that the batch is on are views of it.

    Raises:
        ConfigError: for a list of devices that cannot be used, a tensor without dimension `dim`, or one that has no
            samples side by side: packed sequences, sparse and nested tensors.
    """
    places = as_devices(devices)
    check_can_be_cut(batch)
    return [_part(batch, number, len(places), place, dim) for number, place in enumerate(places)]


def _part(batch: Any, number: int, parts: int, device: torch.device, dim: int) -> Any:
    return map_tensors(lambda t: cut(t, number, parts, dim).to(device, non_blocking=True), batch)


def check_can_be_cut(batch: Any) -> None:
    """See that every tensor has its samples side by side.

    Raises:
        ConfigError: naming the first that has not.
    """
    hint = "Give the model a padded, dense tensor, and what it needs to know beside it."
    for path, tensor in leaves(batch):
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
            raise ConfigError("batch", "tensors that can be cut", found=f"{kind} at {path or 'its top'}", hint=hint)


def cut(tensor: torch.Tensor, number: int, parts: int, dim: int) -> torch.Tensor:
    """Part `number` of `parts` of a tensor along `dim`, a view; a 0-dim tensor stays whole."""
    if tensor.dim() == 0:
        return tensor
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError("dim", f"a dimension of every tensor, such as that of shape {list(tensor.shape)}", dim)
    start, stop = bounds(tensor.shape[dim], parts, number)
    return tensor.narrow(dim, start, stop - start)


def gather(parts: Sequence[Any], device: Device | None = None, dim: int = 0) -> Any:
    """What `scatter` took apart: the tensors of all parts, one behind the other along `dim`.

    0-dim tensors, such as a loss of each part, become one of shape (parts,). What is no tensor is taken from the first
    part. Gradients flow back to the parts.

    Args:
        parts: trees of the same make.
        device: where to; that of the first part's tensors when None.
        dim: along which.

    Raises:
        ConfigError: for parts that hold tensors in other places than the first, or shapes that do not fit.
    """
    place = None if device is None else as_device(device)
    return join(parts, lambda _, column: concatenate(column, place or column[0].device, dim))


def concatenate(column: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    """Tensors of all parts as one."""
    moved = [tensor.to(device, non_blocking=True) for tensor in column]
    if all(tensor.dim() == 0 for tensor in moved):
        return torch.stack(moved)
    try:
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    except (RuntimeError, IndexError):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in moved)
        expected = f"tensors that differ in dimension {dim} alone"
        hint = "What a model returns must have its samples there."
        raise ConfigError("parts", expected, found=f"shapes {shapes}", hint=hint) from None


def join(parts: Sequence[Any], fn: Callable[[str, list[torch.Tensor]], Any]) -> Any:
    """A tree like the first of `parts`, with `fn(path, the tensors there in all parts)` for each of its tensors.

    Raises:
        ConfigError: for parts that hold tensors in other places than the first.
    """
    if not parts:
        raise ConfigError("parts", "at least one part", found="none")
    named = [dict(leaves(part)) for part in parts]
    for number, other in enumerate(named):
        if other.keys() != named[0].keys():
            got = f"part {number} with {_places(other)} where part 0 has {_places(named[0])}"
            raise ConfigError("parts", "tensors in the same places of every part", found=got)
    paths = iter(named[0])

    def joined(_: torch.Tensor) -> Any:
        path = next(paths)
        return fn(path, [other[path] for other in named])

    return map_tensors(joined, parts[0])


def _places(named: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(path or "a tensor" for path in named) or "no tensor"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree with its place, such as ``[0]['mask']``, in the order of `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, PackedSequence):
        # It is a tuple of tensors, but neither of them has its samples side by side.
        hint = "Pack it inside of the model, from a padded tensor and its lengths."
        raise ConfigError(
            "batch", "tensors that can be cut", found=f"a packed sequence at {path or 'its top'}", hint=hint
        )
    elif isinstance(tree, (tuple, list)):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{path}[{number}]")
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}")
