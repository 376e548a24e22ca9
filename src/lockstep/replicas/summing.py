"""Sums tensors over devices, and copies one to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..shards import bounds

__all__ = ["allreduce_", "broadcast_", "reduce_"]


def allreduce_(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor, one for each device, by the sum of all: the same bits everywhere, in the order of the list.

    Each device sums its own part of the tensor and hands the result to the others, so that with k devices each sends
    and receives 2 (k - 1) / k of the size, where one device that sums for all would receive and send k - 1 times as
    much (reduce-scatter and all-gather: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009). Copies go from device to device; the order of a sum does not depend on who makes it.

    Args:
        tensors: of one shape and dtype, dense, and none of them in the memory of another.

    Raises:
        ConfigError: for others.
    """
    _exchange(tensors, receivers=range(len(tensors)))


def reduce_(tensors: Sequence[torch.Tensor]) -> None:
    """As `allreduce_`, but the first alone gets the sum; the others are left with anything."""
    _exchange(tensors, receivers=range(1))


def broadcast_(tensors: Sequence[torch.Tensor]) -> None:
    """Copy the first tensor into each of the others, on whatever devices they are.

    Raises:
        ConfigError: for tensors of several shapes or dtypes.
    """
    _check(tensors)
    with torch.no_grad():
        for tensor in tensors[1:]:
            tensor.copy_(tensors[0], non_blocking=True)


def _exchange(tensors: Sequence[torch.Tensor], receivers: range) -> None:
    _check(tensors)
    places = [(tensor.device, tensor.data_ptr()) for tensor in tensors if tensor.numel()]
    if len(set(places)) < len(places):
        got = "the same tensor twice"
        raise ConfigError(
            "tensors", "tensors in memory of their own", found=got, hint="Copies on one device are copies, too."
        )
    with torch.no_grad():
        flat = [_flat(tensor) for tensor in tensors]
        for part in range(len(flat)):
            _sum_part(flat, part, receivers)
        for number in receivers:
            if flat[number].data_ptr() != tensors[number].data_ptr():
                tensors[number].copy_(flat[number].view(tensors[number].shape))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension: a view where the memory allows it."""
    return tensor.detach().contiguous().view(-1)


def _sum_part(flat: Sequence[torch.Tensor], part: int, receivers: range) -> None:
    """Sum part `part` where the device of that number is, in the list's order, and give it to the receivers."""
    start, stop = bounds(flat[0].numel(), len(flat), part)
    if start == stop:
        return
    device = flat[part].device
    total = flat[0][start:stop].to(device, non_blocking=True)
    # The first term is the sum's place where it may be; elsewhere it is read before it is overwritten.
    for tensor in flat[1:]:
        total.add_(tensor[start:stop].to(device, non_blocking=True))
    for number in receivers:
        if number or total.data_ptr() != flat[0][start:stop].data_ptr():
            flat[number][start:stop].copy_(total, non_blocking=True)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    if not isinstance(tensors, Sequence) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ConfigError("tensors", "a list with a tensor for each device", found=type(tensors).__name__)
    if not tensors:
        raise ConfigError("tensors", "a tensor for each device", found="none")
    kinds = {(tuple(tensor.shape), tensor.dtype, tensor.layout) for tensor in tensors}
    if len(kinds) > 1:
        got = ", ".join(f"{list(shape)} {dtype} {layout}" for shape, dtype, layout in sorted(kinds, key=str))
        raise ConfigError("tensors", "one shape, dtype and layout on all devices", found=got)
    if tensors[0].layout != torch.strided:
        raise ConfigError("tensors", "dense tensors", found=str(tensors[0].layout), hint="Use to_dense().")
