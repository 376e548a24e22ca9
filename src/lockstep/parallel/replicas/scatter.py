"""Lists of devices, and scatter and gather of batches over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import arguments, devices
from ...errors import ConfigError
from ..nested import cut_lists, map_tensors, per_sample
from ..shards import bounds

Device = torch.device | str | int
"""A device, its name, or the number of an accelerator."""


def as_devices(devices: Iterable[Device], argument: str = "devices") -> list[torch.device]:
    """Convert each of `devices` to a torch.device with an index; "cpu:1" and the like are the CPU.

    Args:
        devices: at least one device; a device may be listed several times, e.g. ``["cpu", "cpu"]``,
            ``[0, 1]``.
        argument: the name of the list in errors.

    Raises:
        ConfigError: if it is not a list, is empty, or names a device that does not exist.
    """
    if isinstance(devices, (str, torch.device, int)) or not isinstance(devices, Iterable):
        raise ConfigError(argument, 'a list of devices, e.g. ["cpu", "cpu"]', devices)
    converted = [as_device(device, argument) for device in devices]
    if not converted:
        raise ConfigError(argument, "at least one device", found="an empty list")
    return converted


def as_device(device: Device, argument: str = "device") -> torch.device:
    """Convert `device` to a torch.device with an index.

    Raises:
        ConfigError: if it is not a device, or does not exist.
    """
    kind = devices.accelerator()
    if isinstance(device, int) and not isinstance(device, bool):
        if kind is None:
            raise ConfigError(
                argument, 'devices by name, e.g. ["cpu", "cpu"]', device, "There is no accelerator."
            )
        device = torch.device(kind, device)
    try:
        converted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(argument, 'a device, e.g. "cpu" or "cuda:0"', device, reason) from None
    if converted.type in ("cpu", "meta"):
        return torch.device(converted.type)
    count = torch.accelerator.device_count() if converted.type == kind else 0
    index = (
        torch.accelerator.current_device_index()
        if converted.index is None and count
        else converted.index or 0
    )
    if index >= count:
        available = ", ".join(["cpu", *(f"{kind}:{number}" for number in range(count))])
        raise ConfigError(argument, f"available devices ({available})", got=str(converted))
    return torch.device(converted.type, index)


def all_devices() -> list[torch.device]:
    """Return every accelerator; without one, the CPU once."""
    kind = devices.accelerator()
    if kind is None:
        return [torch.device("cpu")]
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def scatter(batch: Any, devices: Iterable[Device], dim: int = 0) -> list[Any]:
    """Split `batch` into one part for each of `devices`, on that device.

    Tensors may be nested in tuples (including named tuples), lists, mappings and dataclasses, whose
    types are kept. Each tensor is split along `dim` separately: parts are contiguous, in order, and
    differ by at most one sample, the first parts being larger: 17 samples on two devices are 9 + 8.
    With fewer samples than devices the last parts are empty. A 0-dim tensor is copied to every
    device. Lists and arrays that have an item for each sample, see
    `lockstep.parallel.nested.per_sample`, are split as tensors are; other values are passed on
    unchanged.

    Parts on the batch's own device are views of it.

    Args:
        batch: tensors, nested as below.
        devices: the devices.
        dim: the dimension of the samples.

    Raises:
        ConfigError: for a list of devices that cannot be used, a tensor without dimension `dim`, or
            one that cannot be split by samples: packed sequences, sparse and nested tensors.
    """
    targets = as_devices(devices)
    dim = arguments.whole("dim", dim)
    check_can_be_cut(batch)
    return [
        _part(batch, number, len(targets), target, dim) for number, target in enumerate(targets)
    ]


def _part(batch: Any, number: int, parts: int, device: torch.device, dim: int) -> Any:
    batch = with_lists_cut(batch, number, parts, dim)
    return map_tensors(lambda t: cut(t, number, parts, dim).to(device, non_blocking=True), batch)


def with_lists_cut(batch: Any, number: int, parts: int, dim: int) -> Any:
    """Return a batch with part `number` of `parts` of the lists and arrays that have an item for
    each sample.
    """
    sizes = {
        tensor.shape[dim] for _, tensor in leaves(batch) if -tensor.dim() <= dim < tensor.dim()
    }
    samples = sizes.pop() if len(sizes) == 1 else None
    return cut_lists(batch, samples, *bounds(samples or 0, parts, number))


def check_can_be_cut(batch: Any) -> None:
    """Check that every tensor can be split by samples.

    Raises:
        ConfigError: naming the first that cannot be.
    """
    hint = "Pass the model a padded, dense tensor, and the lengths as another tensor."
    for path, tensor in leaves(batch):
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
            raise ConfigError(
                "batch",
                "tensors that can be cut",
                found=f"{kind} at {path or 'its top'}",
                hint=hint,
            )


def cut(tensor: torch.Tensor, number: int, parts: int, dim: int) -> torch.Tensor:
    """Return part `number` of `parts` of a tensor along `dim`, as a view; a 0-dim tensor is
    returned unchanged.
    """
    if tensor.dim() == 0:
        return tensor
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(
            "dim", f"a dimension of every tensor, such as that of shape {list(tensor.shape)}", dim
        )
    start, stop = bounds(tensor.shape[dim], parts, number)
    return tensor.narrow(dim, start, stop - start)


def gather(parts: Sequence[Any], device: Device | None = None, dim: int = 0) -> Any:
    """Concatenate the tensors of all parts along `dim`: the inverse of `scatter`.

    0-dim tensors, such as a loss of each part, become one tensor of shape (parts,). Other values
    are those of the first part. Gradients flow back to the parts.

    Args:
        parts: trees of the same structure.
        device: the target device; that of the first part's tensors when None.
        dim: the dimension of the samples.

    Raises:
        ConfigError: for parts of different structures, or shapes that do not fit.
    """
    target = None if device is None else as_device(device)
    dim = arguments.whole("dim", dim)
    return join(parts, lambda _, column: concatenate(column, target or column[0].device, dim))


def concatenate(column: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    """Concatenate tensors on `device` along `dim`; 0-dim tensors are stacked."""
    moved = [tensor.to(device, non_blocking=True) for tensor in column]
    if all(tensor.dim() == 0 for tensor in moved):
        return torch.stack(moved)
    try:
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    except (RuntimeError, IndexError):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in moved)
        expected = f"tensors that differ in dimension {dim} alone"
        hint = "A model's outputs must have their samples in this dimension."
        raise ConfigError("parts", expected, found=f"shapes {shapes}", hint=hint) from None


def join(parts: Sequence[Any], fn: Callable[[str, list[torch.Tensor]], Any]) -> Any:
    """Return a tree like the first of `parts`, with `fn(path, the parts' tensors at path)` instead
    of each tensor.

    Raises:
        ConfigError: for parts of different structures.
    """
    if not parts:
        raise ConfigError("parts", "at least one part", found="none")
    named = [dict(leaves(part)) for part in parts]
    for number, other in enumerate(named):
        if other.keys() != named[0].keys():
            got = (
                f"part {number} with {_list_paths(other)} where part 0 has {_list_paths(named[0])}"
            )
            raise ConfigError("parts", "tensors at the same paths of every part", found=got)
    paths = iter(named[0])

    def joined(_: torch.Tensor) -> Any:
        path = next(paths)
        return fn(path, [other[path] for other in named])

    return map_tensors(joined, parts[0])


def _list_paths(named: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(path or "a tensor" for path in named) or "no tensor"


def leaves(
    tree: Any, path: str = "", samples: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its path, such as ``[0]['mask']``, in the order of
    `map_tensors`.

    With `samples`, tensors in lists of an item for each sample are left out.
    """
    if samples is not None and per_sample(tree, samples):
        return
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, PackedSequence):
        # A tuple of tensors that cannot be split by samples.
        hint = "Pack it inside of the model, from a padded tensor and its lengths."
        raise ConfigError(
            "batch",
            "tensors that can be cut",
            found=f"a packed sequence at {path or 'its top'}",
            hint=hint,
        )
    elif isinstance(tree, (tuple, list)):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{path}[{number}]", samples)
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from leaves(item, f"{path}[{key!r}]", samples)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}", samples)
